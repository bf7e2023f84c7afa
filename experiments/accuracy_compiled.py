"""How right plans are about what XLA:TPU makes of them, over many programs, without a TPU.

``autoshard accuracy --compiled`` plans each program of :data:`POINTS`, compiles it ahead of time
and holds FLOPs, bytes sent, peak memory and the verdict on memory against the compiler's. It needs
the extra ``autoshard[tpu]``; one program costs some seconds. Rows are kept in a file as they come,
so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autoshard import autoshard
from autoshard.cost_models.aot_cache import cache_folder
from autoshard.cost_models.topology import Topology
from autoshard.errors import AutoshardError
from autoshard.experiments.workloads import make

UNLIMITED = 2**50
"""A memory limit that no plan exceeds [bytes]: plans that do not fit are part of the test."""

GOALS: Mapping[str, tuple[float, float]] = {
    "flops": (0.02, 1.0),
    "collective_bytes": (0.10, 1.0),
    "peak_bytes": (0.10, 0.9),
}
"""By figure: how far it may be off, and for what share of the programs it must not be."""

OOM_GOAL = 0.95
"""Share of programs of which it must be said rightly whether they fit."""


@dataclass(frozen=True, slots=True)
class Point:
    """A program to compile.

    Attributes:
        workload: Its name.
        size: The workload's size.
        topology: E.g. ``v5e:4x4``.
        mesh: Axes and sizes, e.g. ``data=4,model=4``.
        plan: ``auto``, or the hand-made plan whose shardings of arguments and results are pinned.
        overrides: Changes of the workload's configuration.
    """

    workload: str
    size: str
    topology: str
    mesh: str
    plan: str = "auto"
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        changes = "".join(f" {name}={value}" for name, value in self.overrides)
        return f"{self.workload} {self.size}{changes} on {self.topology} {self.mesh}: {self.plan}"


def _points() -> Iterator[Point]:
    square, long, wide = "data=4,model=4", "data=16,model=1", "data=2,model=8"
    train = (("batch", 16), ("seq", 2048))
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v5e:4x4", square, "2d"),
        ("v5e:4x4", long, "fsdp"),
        ("v5e:4x4", long, "dp"),
        ("v5e:4x4", wide, "tp"),
        ("v5p:2x2x4", square, "auto"),
        ("v5p:2x2x4", long, "fsdp"),
        ("v5p:2x2x4", wide, "2d"),
        ("v6e:4x4", square, "auto"),
        ("v6e:4x4", square, "2d"),
        ("v6e:4x4", long, "fsdp"),
        ("v6e:4x4", long, "dp"),
    ):
        yield Point("llama", "8b", topology, mesh, plan, train)
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v5e:4x4", wide, "tp"),
        ("v6e:4x4", square, "2d"),
        ("v5p:2x2x4", wide, "cp"),
    ):
        yield Point("llama_prefill", "8b", topology, mesh, plan)
    for topology, mesh, plan in (
        ("v5e:4x4", wide, "auto"),
        ("v5e:4x4", wide, "tp"),
        ("v6e:4x4", square, "2d"),
        ("v5p:2x2x4", long, "dp"),
    ):
        yield Point("llama_decode", "8b", topology, mesh, plan)
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v5p:2x2x4", square, "2d"),
        ("v6e:4x4", wide, "ep"),
        ("v5e:4x4", square, "ep"),
    ):
        yield Point("moe", "8x7b", topology, mesh, plan, train)
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v5e:4x4", long, "fsdp"),
        ("v5p:2x2x4", square, "2d"),
        ("v6e:4x4", wide, "tp"),
    ):
        yield Point("mlp", "large", topology, mesh, plan, (("batch", 32768),))
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v5e:4x4", long, "fsdp"),
        ("v6e:4x4", square, "2d"),
        ("v5p:2x2x4", long, "dp"),
    ):
        yield Point("diffusion_transformer", "xl", topology, mesh, plan)
    for topology, mesh, plan in (
        ("v5e:4x4", long, "dp"),
        ("v6e:4x4", long, "fsdp"),
        ("v5p:2x2x4", square, "auto"),
    ):
        yield Point("resnet", "resnet50", topology, mesh, plan)
    for topology, mesh, plan in (
        ("v5e:4x4", long, "dp"),
        ("v5e:4x4", square, "2d"),
        ("v6e:4x4", square, "auto"),
    ):
        yield Point("conformer", "l", topology, mesh, plan)
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v6e:4x4", long, "fsdp"),
        ("v5p:2x2x4", wide, "tp"),
    ):
        yield Point("equinox_mixer", "b16", topology, mesh, plan)
    flax = (("width", 2048), ("hidden", 8192), ("vocab", 32768), ("seq", 1024), ("batch", 128))
    for topology, mesh, plan in (
        ("v5e:4x4", square, "auto"),
        ("v6e:4x4", long, "fsdp"),
        ("v5p:2x2x4", square, "2d"),
    ):
        yield Point("flax_transformer", "small", topology, mesh, plan, flax)


POINTS = tuple(_points())
"""The programs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One program, planned and compiled; None where a figure is not known.

    Attributes:
        point: The program.
        outcome: What became of it; a problem of planning in words.
        predicted: FLOPs, bytes sent and peak memory by the plan.
        compiled: The same of the compiled program.
        fits: Whether the plan says that it fits into the device.
        seconds: Time for planning and compiling [s].
    """

    point: str
    outcome: str
    predicted: Mapping[str, float]
    compiled: Mapping[str, float]
    fits: bool | None
    seconds: float

    def error(self, figure: str) -> float | None:
        """Predicted over compiled less one; None if one is not known."""
        predicted, compiled = self.predicted.get(figure), self.compiled.get(figure)
        if predicted is None or compiled is None:
            return None
        if not compiled:
            return 0.0 if not predicted else float("inf")
        return predicted / compiled - 1

    @property
    def verdict(self) -> bool | None:
        """Whether it was said rightly if the program fits; None if the compiler did not say."""
        if self.outcome not in ("fits", "out of memory") or self.fits is None:
            return None
        return self.fits == (self.outcome == "fits")


def check(point: Point, say: Callable[[str], None] = lambda stage: None) -> Row:
    """Plan a program, compile it, and lay the figures side by side."""
    start = time.perf_counter()
    workload = make(point.workload, point.size, **dict(point.overrides))
    sizes = (axis.partition("=") for axis in point.mesh.split(","))
    mesh = Topology(point.topology).mesh({name: int(size) for name, _, size in sizes})
    pins: dict[str, Any] = {}
    if point.plan != "auto":
        expert = workload.experts[point.plan]
        pins = {
            "in_shardings": expert.in_shardings(mesh),
            "out_shardings": expert.out_shardings(mesh),
        }
    limited = None if point.plan == "auto" else UNLIMITED
    step = autoshard(
        workload.fn,
        mesh,
        donate_argnums=workload.donate_argnums,
        memory_limit=limited,
        time_limit_s=30.0,
        **pins,
    )
    try:
        report = step.validate(*workload.args, say=say)
    except AutoshardError as error:
        if "autoshard[tpu]" in str(error):
            raise
        return Row(str(point), error.problem, {}, {}, None, time.perf_counter() - start)
    ahead = report.ahead
    assert ahead is not None
    device = Topology(point.topology).chip
    assert device is not None
    known = report.compiled.to_json()
    return Row(
        point=str(point),
        outcome=ahead.outcome,
        predicted={k: report.predicted.to_json()[k] or 0 for k in GOALS},
        compiled={k: v for k in GOALS if (v := known[k]) is not None},
        fits=(report.predicted.peak_bytes or 0) <= device.memory_bytes,
        seconds=time.perf_counter() - start,
    )


def load(path: Path) -> dict[str, Row]:
    """The rows of a file by point; an unfinished last line is left out."""
    rows: dict[str, Row] = {}
    if path.exists():
        names = {f.name for f in fields(Row)}
        for line in path.read_text("utf-8").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and set(found) == names:
                rows[found["point"]] = Row(**found)
    return rows


@dataclass(frozen=True, slots=True)
class Summary:
    """How many programs meet a goal.

    Attributes:
        figure: What was compared.
        met: Programs within the bound.
        programs: Programs compared.
        wanted: Share of them that must be within.
        bound: Largest error allowed; None for a verdict.
    """

    figure: str
    met: int
    programs: int
    wanted: float
    bound: float | None

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.programs > 0 and self.met >= self.wanted * self.programs

    def __str__(self) -> str:
        what = "right" if self.bound is None else f"within {self.bound:.0%}"
        share = self.met / self.programs if self.programs else 0.0
        return (
            f"{self.figure:18} {what} for {self.met} of {self.programs} programs ({share:.0%}, "
            f"goal {self.wanted:.0%}): {'met' if self.holds else 'not met'}"
        )


def summarize(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """The goals over some rows; programs that do not fit are judged by the verdict alone."""
    fitting = [row for row in rows if row.outcome == "fits"]
    found = []
    for figure, (bound, wanted) in GOALS.items():
        errors = [e for row in fitting if (e := row.error(figure)) is not None]
        met = sum(abs(e) <= bound for e in errors)
        found.append(Summary(figure, met, len(errors), wanted, bound))
    verdicts = [v for row in rows if (v := row.verdict) is not None]
    found.append(Summary("fits or not", sum(verdicts), len(verdicts), OOM_GOAL, None))
    return tuple(found)


HEAD = ("program", "FLOPs", "bytes sent", "peak memory", "XLA says", "said rightly")
"""The columns of :func:`cells`."""


def cells(row: Row) -> tuple[str, ...]:
    """A row of a table: errors are predicted over compiled, less one."""
    errors = (row.error(figure) for figure in GOALS)
    shown = ("-" if e is None else f"{e:+.1%}" for e in errors)
    verdict = {True: "yes", False: "NO", None: "-"}[row.verdict]
    outcome = row.outcome if row.compiled else "not compiled: " + row.outcome.partition(":")[0]
    return (row.point, *shown, outcome, verdict)


def markdown(rows: Sequence[Row]) -> str:
    """The rows and the goals as a part of a page."""
    lines = [HEAD, ("---",) * len(HEAD), *map(cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {goal}" for goal in summarize(rows)) + "\n"


def run(
    points: Sequence[Point], path: Path, *, again: bool, say: Callable[[str], None]
) -> list[Row]:
    """Check points one after another; each row is written before the next program is planned."""
    rows = load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, point in enumerate(points, 1):
        if str(point) in rows and not again:
            continue
        say(f"{number} of {len(points)}: {point}")
        row = rows[str(point)] = check(point, say)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    return [rows[str(point)] for point in points]


def rows_file() -> Path:
    """Where rows are kept unless another file is named."""
    return cache_folder().parent / "accuracy" / "compiled.jsonl"
