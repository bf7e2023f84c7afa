"""The tables a report is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from autoshard.errors import InputError
from autoshard.shardings import MeshShape

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "arguments": ("path", "dtype", "shape", "sharding", "bytes"),
    "ops": (
        "index", "name", "source", "shapes", "sharding",
        "compute_s", "hbm_s", "comm_s", "bytes", "trips",
    ),
    "collectives": ("kind", "axes", "bytes", "trips", "seconds", "source"),
    "memory": ("time", "bytes", "label"),
    "timeline": ("name", "kind", "streams", "start_s", "seconds", "trips"),
    "schedule": ("what", "seconds"),
    "edges": ("producer", "consumer", "reshard", "seconds"),
    "comparison": ("plan", "figure", "step_s", "flops", "collective_bytes", "peak_bytes"),
}  # fmt: skip
"""The columns that each table must have; others are left out of the page."""

FIGURES: Final = ("predicted", "compiled", "measured")
"""Values of ``comparison.figure``, in the order they are shown."""


def _empty(table: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(COLUMNS[table]))


@dataclass(frozen=True, slots=True)
class ReportData:
    """What a report shows. Everything is per device and for one call of the program.

    Attributes:
        title: What was planned, e.g. ``llama (small)``.
        mesh: The device mesh.
        machine: Where it ran, e.g. the processor's name.
        date: When, as text.
        versions: Name and version of what took part, e.g. ``(("jax", "0.10.2"),)``.
        solver_status: Why the solver stopped, as a sentence.
        solver_gap: Proved relative distance from the best plan; None if nothing is proved.
        planning_s: Time spent planning [s]; None if the plan was loaded.
        memory_limit_bytes: The limit the plan was made for [bytes]; None without one.
        arguments: One row per argument: ``path``, ``dtype``, ``shape`` (tuple of sizes),
            ``sharding`` (per dimension a tuple of axis names), ``bytes`` (of the piece).
        ops: One row per op: ``index``, ``name``, ``source``, ``shapes`` (of the results, as text),
            ``sharding`` (as text), predicted ``compute_s``, ``hbm_s``, ``comm_s`` [s] over all its
            ``trips``, and the ``bytes`` of its results.
        collectives: One row per collective that the plan asks for: ``kind``, ``axes`` (as text),
            ``bytes`` sent and ``seconds`` over all its ``trips``, ``source``.
        memory: ``bytes`` in use from each ``time`` (index of an op) on; ``label`` names the op.
        timeline: The predicted schedule of a step: per event its ``name``, ``kind`` (``compute``,
            ``loop`` or that of a collective), the ``streams`` it occupies (tuple of texts), when it
            starts and how long it takes (``start_s``, ``seconds``) and how often it happens in a
            step (``trips``); of a loop the first round, at the time of the loop.
        schedule: What the predicted step is made of: ``what``, as text, and its ``seconds``.
        edges: One row per value read: index of the ``producer`` op (-1 for an argument) and of the
            ``consumer``, the ``reshard`` between them as text (empty: none) and its ``seconds``.
        comparison: Rows of ``plan``, ``figure`` (predicted, compiled or measured), ``step_s``,
            ``flops``, ``collective_bytes``, ``peak_bytes``; absent numbers are NaN. The first plan
            is the one that this report is about.
    """

    title: str
    mesh: MeshShape
    machine: str
    date: str
    versions: tuple[tuple[str, str], ...]
    solver_status: str
    solver_gap: float | None = None
    planning_s: float | None = None
    memory_limit_bytes: int | None = None
    arguments: pd.DataFrame = field(default_factory=lambda: _empty("arguments"))
    ops: pd.DataFrame = field(default_factory=lambda: _empty("ops"))
    collectives: pd.DataFrame = field(default_factory=lambda: _empty("collectives"))
    memory: pd.DataFrame = field(default_factory=lambda: _empty("memory"))
    timeline: pd.DataFrame = field(default_factory=lambda: _empty("timeline"))
    schedule: pd.DataFrame = field(default_factory=lambda: _empty("schedule"))
    edges: pd.DataFrame = field(default_factory=lambda: _empty("edges"))
    comparison: pd.DataFrame = field(default_factory=lambda: _empty("comparison"))

    def __post_init__(self) -> None:
        for name, wanted in COLUMNS.items():
            missing = [c for c in wanted if c not in getattr(self, name).columns]
            if missing:
                raise InputError(
                    f"the table has no column {missing[0]!r}",
                    at=f"ReportData.{name}",
                    fix=f"give it the columns {', '.join(wanted)}",
                )
        unknown = sorted(set(self.comparison["figure"]) - set(FIGURES))
        if unknown:
            raise InputError(
                f"there is no figure called {unknown[0]!r}",
                at="ReportData.comparison",
                fix=f"use one of {', '.join(FIGURES)}",
            )
