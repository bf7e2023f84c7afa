"""What is known of each chip: figures with their sources, read from ``chips.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, cast

from autoshard.errors import UnknownNameError
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
    """

    name: str
    kind: Literal["tpu", "gpu"]
    figures: Mapping[str, Figure]

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


def _chip(name: str) -> Chip:
    sources, row = _file()["sources"], _file()["chips"][name]
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
    return Chip(name, kind, MappingProxyType(figures))


class _Chips(Mapping[str, Chip]):
    """The catalogue, read on first use."""

    def __init__(self) -> None:
        self._read: dict[str, Chip] = {}

    def __getitem__(self, name: str) -> Chip:
        if name not in self._read:
            if name not in _file()["chips"]:
                known = Table[Chip]("chip", dict.fromkeys(self, ""))
                return known[name]  # raises, with the nearest name
            self._read[name] = _chip(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_file()["chips"])

    def __len__(self) -> int:
        return len(_file()["chips"])


CHIPS: Mapping[str, Chip] = _Chips()
"""Every known chip by name; an unknown name is an error that lists the known ones."""
