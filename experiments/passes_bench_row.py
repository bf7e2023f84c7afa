"""One row of the table of what passes buy."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = 8
"""Virtual CPU devices that programs are compiled for."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a program before and after a pass.

    Attributes:
        program: The program, in a few words.
        figure: What is compared, with its unit.
        predicted: Before and after, by the pass or the cost model; None if neither says.
        compiled: Before and after, read off the compiled programs; None if it is not in them.
        remark: What a reader must know.
    """

    program: str
    figure: str
    predicted: tuple[float, float] | None
    compiled: tuple[float, float] | None
    remark: str = ""

    def text(self, line: str) -> str:
        """The row as Markdown, under a line's name."""
        cells = [line, self.program, self.figure, _shown(self.predicted), _shown(self.compiled)]
        return "| " + " | ".join([*cells, self.remark or "-"]) + " |"


def _shown(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return "-"
    before, after = pair
    change = f" ({after / before - 1:+.0%})" if before else ""
    return f"{_number(before)} → {_number(after)}{change}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:.4g}"
