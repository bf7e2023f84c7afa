"""Line charts as SVG: no library, no script, one file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 190, 44, 52
COLOURS = ("#1b6ca8", "#c8553d", "#2f8f5b", "#8a5fb0", "#b8860b", "#555555")


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: What the legend calls it; empty: it is left out there.
        points: In order of x.
        colour: Any that SVG knows.
        dashed: Drawn with dashes.
        stepped: Keeps its value until the next point.
        dots: Points are marked.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False
    stepped: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """How values become places on an axis.

    Attributes:
        label: What the axis shows, with its unit.
        low: Value at its beginning.
        high: Value at its end.
        bend: A growing function that values go through before they are laid out evenly.
        ticks: Values to mark, with their texts.
    """

    label: str
    low: float
    high: float
    bend: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def linear(cls, label: str, values: Sequence[float]) -> Scale:
        """From the least to the largest of some values."""
        low, high = min(values), max(values)
        if low == high:
            low, high = low - 1, high + 1
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
        ticks = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return cls(label, low, high, lambda v: v, tuple((t, f"{t:.6g}") for t in ticks))

    @classmethod
    def signed_log(cls, label: str, values: Sequence[float], smallest: float, text: str) -> Scale:
        """Decades away from zero in both directions, even below ``smallest``.

        Args:
            label: What the axis shows.
            values: What it must hold; outside a million times ``smallest`` they are cut off.
            smallest: Where decades begin.
            text: Format of a tick, e.g. ``{:+.4g} %``.
        """

        def bend(value: float) -> float:
            return math.copysign(math.log10(1 + abs(value) / smallest), value)

        most = 1e6 * smallest
        low = max(-most, min(0.0, *values, -smallest) if min(values) < 0 else 0.0)
        high = min(most, max(smallest, *values))
        decades = [smallest * 10**n for n in range(7)]
        marks = [0.0, *decades[1:], *(-d for d in decades[1:])]  # the first would touch zero
        ticks = tuple((m, text.format(m)) for m in sorted(marks) if low <= m <= high)
        return cls(label, low, high, bend, ticks)

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1; what is outside lies on the edge."""
        low, high = self.bend(self.low), self.bend(self.high)
        here = self.bend(min(max(value, self.low), self.high))
        return (here - low) / (high - low) if high > low else 0.5


def chart(title: str, curves: Sequence[Curve], x: Scale, y: Scale) -> str:
    """The text of an SVG file."""
    wide, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + wide * x.place(point[0]), _TOP + tall * (1 - y.place(point[1]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for value, text in x.ticks:
        here = _LEFT + wide * x.place(value)
        parts += [
            f'<path d="M{here:.1f} {_TOP}V{_TOP + tall}" stroke="#e4e4e4"/>',
            f'<text x="{here:.1f}" y="{_TOP + tall + 18}" text-anchor="middle">'
            f"{escape(text)}</text>",
        ]
    for value, text in y.ticks:
        here = _TOP + tall * (1 - y.place(value))
        parts += [
            f'<path d="M{_LEFT} {here:.1f}H{_LEFT + wide}" stroke="#e4e4e4"/>',
            f'<text x="{_LEFT - 8}" y="{here + 4:.1f}" text-anchor="end">{escape(text)}</text>',
        ]
    parts += [
        f'<text x="{_LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"{escape(x.label)}</text>",
        f'<text transform="translate(18 {_TOP + tall / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>",
    ]
    row = 0
    for curve in curves:
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        path = _path([at(p) for p in curve.points], curve.stepped)
        parts.append(f'<path d="{path}" fill="none" stroke="{curve.colour}" '
                     f'stroke-width="2"{dash}/>')  # fmt: skip
        if curve.dots:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{curve.colour}"/>'
                for a, b in map(at, curve.points)
            ]
        if curve.name:
            height = _TOP + 8 + 20 * row
            right = _LEFT + wide + 14
            parts += [
                f'<path d="M{right} {height}h22" stroke="{curve.colour}" stroke-width="2"{dash}/>',
                f'<text x="{right + 28}" y="{height + 4}">{escape(curve.name)}</text>',
            ]
            row += 1
    return "\n".join([*parts, "</svg>"]) + "\n"


def _path(points: Sequence[tuple[float, float]], stepped: bool) -> str:
    words = []
    for number, (a, b) in enumerate(points):
        if number == 0:
            words.append(f"M{a:.1f} {b:.1f}")
        else:
            words.append(f"H{a:.1f}V{b:.1f}" if stepped else f"L{a:.1f} {b:.1f}")
    return "".join(words)
