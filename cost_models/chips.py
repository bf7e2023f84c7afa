"""What is known of each chip: figures with their sources, read from ``chips.json``.

A chip of your own is a file of the same form (JSON or TOML), named wherever a chip can be named:
``Topology("mychip.toml:4x4")``, ``AnalyticModel(find_chip("mychip.toml"))``. See
:func:`load_chips` for what must be in it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from autoshard.errors import InputError, UnknownNameError
from autoshard.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it is from.

    Attributes:
        value: In bytes, bytes/s, FLOP/s, seconds or Hz, by the figure's name.
        sources: Where it was read, in full.
        note: What to know before using it.
        alternatives: Other values with their sources, where sources disagree.
    """

    value: float
    sources: tuple[str, ...]
    note: str = ""
    alternatives: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Chip:
    """A TPU or GPU, as its published and measured figures.

    Figures are per chip; ``ici_*`` are one link in one direction. :meth:`value` reads any of them.

    Attributes:
        name: E.g. ``v5e`` or ``H100``.
        kind: ``tpu`` or ``gpu``.
        figures: Every known figure by name.
        pod: Chips along each axis of the largest torus (TPU); empty for a GPU.
        aliases: Other names it goes by.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    figures: Mapping[str, Figure]
    pod: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()

    def value(self, *names: str) -> float:
        """The first of ``names`` that is known for this chip.

        Args:
            names: Figure names, the preferred one first.

        Raises:
            UnknownNameError: None of them is known.

        Examples:
            >>> CHIPS["v5e"].value("peak_fp4", "peak_bf16")
            197000000000000.0
        """
        for name in names:
            if name in self.figures:
                return self.figures[name].value
        raise UnknownNameError(
            f"chip {self.name} has no figure called {' or '.join(map(repr, names))}",
            fix=f"known: {', '.join(self.figures)}",
        )

    @property
    def devices(self) -> int:
        """JAX devices on one chip."""
        return int(self.value("jax_devices_per_chip"))

    @property
    def memory_bytes(self) -> float:
        """Memory that a program may use on one device [bytes].

        What the compiler allows where that is known, else the chip's HBM divided by its devices.
        """
        if "usable_bytes_per_device" in self.figures:
            return self.value("usable_bytes_per_device")
        return self.value("hbm_bytes") / self.devices

    def wraps(self, size: int) -> bool:
        """Whether an axis of ``size`` chips is closed to a ring.

        v5e and v6e close only an axis that spans the pod (16); chips built of 4x4x4 cubes (v4,
        v5p, v7x) close an axis made of whole cubes. Whether the *other* axes are whole cubes too
        cannot be seen from here, so an axis of 4 on those is taken to be closed.

        Source:
            The figure ``wrap_multiple``: jax-ml/scaling-book, tpus.md, "TPU Networking".
        """
        return size % int(self.value("wrap_multiple")) == 0


@cache
def _file() -> Any:
    text = resources.files("autoshard.cost_models").joinpath("chips.json").read_text("utf-8")
    return json.loads(text)


NEEDED: dict[str, tuple[str, ...]] = {
    "tpu": (
        "peak_bf16",
        "hbm_bytes",
        "hbm_bw",
        "ici_oneway_effective",
        "mxu_dim",
        "wrap_multiple",
    ),
    "gpu": ("peak_bf16", "hbm_bytes", "hbm_bw", "nvlink_oneway", "node", "node_egress"),
}
"""Figures without which a chip cannot be priced, by kind."""

ASSUMED: dict[str, float] = {
    "jax_devices_per_chip": 1,
    "chips_per_host": 4,
    "matmul_efficiency": 0.9,
    "hbm_efficiency": 0.85,
    "op_fixed_s": 8.343e-07,
    "collective_fixed_s": 5e-6,
    "hop_s": 1e-6,
    "nvlink_efficiency": 0.8222,
}
"""Figures that a chip of your own may leave out: those of chips in the catalogue (v5p, H100)."""


def _chip(name: str, row: Any, sources: Mapping[str, str]) -> Chip:
    figures = {
        key: Figure(
            value=float(figure["value"]),
            sources=tuple(sources[s] for s in figure["src"]),
            note=figure.get("note", ""),
            alternatives=tuple((a["value"], sources[a["src"]]) for a in figure.get("alt", ())),
        )
        for key, figure in row["figures"].items()
    }
    kind = cast(Literal["tpu", "gpu"], row["kind"])
    return Chip(
        name,
        kind,
        MappingProxyType(figures),
        tuple(row.get("pod", ())),
        tuple(row.get("aliases", ())),
    )


def load_chips(path: str | Path) -> Mapping[str, Chip]:
    """The chips of a file, in the form of the catalogue.

    The file is JSON, or TOML if its name ends in ``.toml``. Under ``chips`` it has a table per
    chip: ``kind`` (``tpu`` or ``gpu``), for a TPU ``pod`` (chips along each axis of its largest
    torus), and ``figures``. A figure is a table with ``value`` and ``src`` (where it is from: a
    sentence, or a key of the file's table ``sources``), or a plain number, whose source is then
    the file. The figures of :data:`NEEDED` must be there, those of :data:`ASSUMED` may be left out.

    Args:
        path: The file.

    Raises:
        InputError: It cannot be read, or a chip is not complete; says which figure of which chip.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        read: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"the chips in {path} cannot be read: {error}",
            at=str(path),
            fix="give a JSON or TOML file in the form of cost_models/chips.json",
        ) from error
    rows = read.get("chips") if isinstance(read, dict) else None
    if not isinstance(rows, dict) or not rows:
        raise InputError(
            f"{path} holds no chips", at=str(path), fix="give it a table [chips.NAME] per chip"
        )
    sources = read.get("sources", {})
    return {name: _checked_chip(name, row, sources, path) for name, row in rows.items()}


def _checked_chip(name: str, row: Any, sources: Any, path: Path) -> Chip:
    """A chip of a user's file, with each mistake named."""

    def wrong(problem: str, fix: str) -> InputError:
        return InputError(f"chip {name!r} {problem}", at=str(path), fix=fix)

    if not isinstance(row, dict) or row.get("kind") not in NEEDED:
        raise wrong("has no kind", 'say kind = "tpu" or kind = "gpu"')
    given = row.get("figures")
    if not isinstance(given, dict):
        raise wrong("has no figures", f"give a table [chips.{name}.figures]")
    missing = [figure for figure in NEEDED[row["kind"]] if figure not in given]
    if missing:
        raise wrong(f"lacks {', '.join(missing)}", f"give them in [chips.{name}.figures]")
    pod = row.get("pod", [])
    axes_known = isinstance(pod, list) and all(isinstance(n, int) and n > 0 for n in pod)
    if row["kind"] == "tpu" and not (axes_known and len(pod) in (1, 2, 3)):
        raise wrong(
            "has no pod", "say pod = [16, 16], the chips along each axis of its largest torus"
        )
    figures: dict[str, Any] = {
        key: {"value": value, "src": ["assumed, as in the catalogue"]}
        for key, value in ASSUMED.items()
    }
    for key, figure in given.items():
        value = figure.get("value") if isinstance(figure, dict) else figure
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise wrong(f"has {key} = {value!r}", "give a number above 0, in the units of its name")
        source = figure.get("src", str(path)) if isinstance(figure, dict) else str(path)
        cited = source if isinstance(source, list) else [source]
        note = figure.get("note", "") if isinstance(figure, dict) else ""
        figures[key] = {"value": value, "src": cited, "note": note}
    known = {s: str(sources.get(s, s)) for f in figures.values() for s in f["src"]}
    return _chip(name, {**row, "figures": figures}, known)


def find_chip(name: str) -> Chip:
    """A chip by its name, another name it goes by, or a file that holds it.

    Args:
        name: ``v5e``, ``tpu7x``, ``h100``; or ``chips.toml``, ``chips.json``, and
            ``chips.toml#name`` where the file holds several. Capitals do not matter.

    Raises:
        UnknownNameError: There is no such chip.
        InputError: The file cannot be used.

    Examples:
        >>> find_chip("tpu7x").name
        'v7x'
    """
    path, _, inner = name.partition("#")
    if path.endswith((".toml", ".json")):
        chips = load_chips(path)
        if inner in chips:
            return chips[inner]
        if not inner and len(chips) == 1:
            return next(iter(chips.values()))
        raise UnknownNameError(
            f"{path} holds no chip {inner!r}" if inner else f"{path} holds several chips",
            fix=f"say {path}#NAME, NAME one of {', '.join(chips)}",
        )
    if name in CHIPS:
        return CHIPS[name]
    for known, row in _file()["chips"].items():
        if name.lower() in (known.lower(), *row.get("aliases", ())):
            return CHIPS[known]
    return CHIPS[name]  # raises, with the nearest name


class _Chips(Mapping[str, Chip]):
    """The catalogue, read on first use."""

    def __init__(self) -> None:
        self._read: dict[str, Chip] = {}

    def __getitem__(self, name: str) -> Chip:
        if name not in self._read:
            if name not in self:
                known = Table[Chip]("chip", dict.fromkeys(self, ""))
                return known[name]  # raises, with the nearest name
            self._read[name] = _chip(name, _file()["chips"][name], _file()["sources"])
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in _file()["chips"]

    def __iter__(self) -> Iterator[str]:
        return iter(_file()["chips"])

    def __len__(self) -> int:
        return len(_file()["chips"])


CHIPS: Mapping[str, Chip] = _Chips()
"""Every known chip by name; an unknown name is an error that lists the known ones."""
