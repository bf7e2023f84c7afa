"""How good the solver is, and how fast: problems in files, each solved in a process of its own.

``autoshard bench solver`` runs it. What is run is a list of :class:`Case`, from one or more sources
(:data:`SOURCES`): the contest's instances in a folder, problems of our own workloads. A row is done
when its process ends, so a run that is interrupted keeps what it has.
"""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autoshard.cost_models.microbenchmark import processor_name
from autoshard.errors import InputError
from autoshard.problem import load_problem
from autoshard.solve_runs import run_apart
from autoshard.table import Table

INSTANCES = Path(__file__).parent / "instances"
"""The contest's instances that come along."""

DEFAULT_LIMIT_S = 60.0
"""Time for a case whose own is not known [s]."""

USABLE = 0.1
"""Within this fraction of its final cost a choice is called usable."""

NEAR = 0.01
"""Within this fraction it is called near."""


@dataclass(frozen=True, slots=True)
class Case:
    """A problem to solve.

    Attributes:
        name: What its row is called.
        path: Its file.
        time_limit_s: Its own time limit [s]; None if it has none.
        best: The least cost known; None if unknown.
        optimum: Its proved optimum; None if unknown.
    """

    name: str
    path: Path
    time_limit_s: float | None = None
    best: int | None = None
    optimum: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """How one case went.

    Attributes:
        name: Of the case.
        nodes: Nodes of the problem.
        strategies: The most that a node has.
        edges: Edges of the problem.
        time_limit_s: Time that was given [s].
        status: The solver's; ``ERROR`` if its process gave no answer.
        error: Why.
        cost: Of the answer; None without one.
        lower_bound: Proved.
        gap: Of the answer, as a fraction of the cost.
        first_s: Seconds until the first feasible choice [s].
        first_cost: What it cost.
        usable_s: Seconds until a choice within 10% of the answer's cost [s].
        near_s: Seconds until a choice within 1% of the answer's cost [s].
        seconds: Until the solver ended [s].
        reading_s: Of reading the file [s].
        peak_rss_bytes: The most memory the process held, Python and JAX included [bytes].
        best: The least cost known from elsewhere.
        optimum: The proved optimum known from elsewhere.
        overdue: The solver had not ended a tenth of its time and 2 s after it, and was left.
    """

    name: str
    nodes: int
    strategies: int
    edges: int
    time_limit_s: float
    status: str
    error: str = ""
    cost: int | None = None
    lower_bound: int | None = None
    gap: float | None = None
    first_s: float | None = None
    first_cost: int | None = None
    usable_s: float | None = None
    near_s: float | None = None
    seconds: float | None = None
    reading_s: float | None = None
    peak_rss_bytes: int | None = None
    best: int | None = None
    optimum: int | None = None
    overdue: bool = False


def contest(folder: Path) -> Iterator[Case]:
    """The instances in a folder, smallest file first; what is known of each from its table."""
    table = folder / "reference.csv"
    known = _references(table if table.is_file() else INSTANCES / "reference.csv")
    found = [p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz"))]
    if not found:
        raise InputError(
            "the folder holds no problem", at=str(folder), fix="name one with .json or .json.gz"
        )
    for path in sorted(found, key=lambda p: (p.stat().st_size, p.name)):
        name = path.name.removesuffix(".gz").removesuffix(".json").rpartition("-")[2]
        row = known.get(name, {}) if "iopddl" in path.name else {}
        optimum = _number(row.get("proved_optimum"))
        best = _least(_number(row.get("contest_best")), _number(row.get("best_published_after")))
        best = optimum if optimum is not None else best
        limit = row.get("time_limit_s")
        yield Case(name, path, float(limit) if limit else None, best, optimum)


def workloads(folder: Path) -> Iterator[Case]:
    """The problems of our own workloads without a memory limit, written into a folder."""
    from autoshard.experiments.own_problems import written

    for path in written(folder):
        yield Case(path.name.removesuffix(".json.gz"), path)


SOURCES: Table[Callable[[Path], Iterator[Case]]] = Table(
    "source of problems",
    {
        "contest": "autoshard.experiments.solver_bench:contest",
        "workloads": "autoshard.experiments.solver_bench:workloads",
    },
)
"""Where cases come from: each is given a folder, to find or to write its problems in."""


def bench(
    cases: Sequence[Case],
    *,
    solver: str = "exact",
    time_limit_s: float | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Row]:
    """Solve cases one after the other.

    Args:
        cases: What to solve.
        solver: Name of the solver.
        time_limit_s: Time for each [s]; None: its own.
        seed: For the solver.
        say: Told what is being done.
    """
    for case in cases:
        limit = time_limit_s or case.time_limit_s or DEFAULT_LIMIT_S
        say(f"{case.name}, up to {limit:g} s")
        problem = load_problem(case.path)
        sizes = [len(cost) for cost in problem.costs]
        about = (case.name, len(sizes), max(sizes, default=0), len(problem.edges), limit)
        del problem  # the child has its own
        run = run_apart(case.path, solver, time_limit_s=limit, seed=seed)
        known: dict[str, Any] = {"best": case.best, "optimum": case.optimum}
        if "error" in run:
            yield Row(*about, "ERROR", run["error"], **known)
            continue
        costs = [(m["seconds"], m["cost"]) for m in run["timeline"] if m["cost"] is not None]
        yield Row(
            *about,
            status=run["status"],
            cost=run["cost"],
            lower_bound=run["lower_bound"],
            gap=run["gap"],
            first_s=costs[0][0] if costs else None,
            first_cost=costs[0][1] if costs else None,
            usable_s=_within(USABLE, run["cost"], costs),
            near_s=_within(NEAR, run["cost"], costs),
            seconds=run["seconds"],
            reading_s=run["reading_s"],
            peak_rss_bytes=run["peak_rss_bytes"],
            overdue=run["interrupted"] == "overdue",
            **known,
        )
        if run["interrupted"] == "Ctrl-C":
            return


HEAD = (
    "problem", "nodes", "edges", "limit [s]", "cost", "at least", "gap", "to the best known",
    "first [s]", "first cost", "within 10% [s]", "within 1% [s]", "time [s]", "memory [MiB]",
)  # fmt: skip
"""Columns of the table."""


def cells(row: Row) -> list[str]:
    """A row of the table; a short one, which ends in a remark, if there is no answer."""
    about = [row.name, f"{row.nodes:,}", f"{row.edges:,}", f"{row.time_limit_s:g}"]
    if row.error:
        return [*about, row.error]
    gap = "-" if row.gap is None else "optimal" if row.gap == 0 else f"{row.gap:.3%}"
    return [
        *about,
        row.status.lower() if row.cost is None else f"{row.cost:,}",
        "-" if row.lower_bound is None else f"{row.lower_bound:,}",
        gap,
        against(row),
        _seconds(row.first_s),
        _above(row.first_cost, row.cost),
        _seconds(row.usable_s),
        _seconds(row.near_s),
        _seconds(row.seconds) + (" overdue" if row.overdue else ""),
        "-" if row.peak_rss_bytes is None else f"{row.peak_rss_bytes / 2**20:,.0f}",
    ]


def against(row: Row) -> str:
    """The cost against the least known: ``optimum``, or by how much it is above or below."""
    if row.cost is None or row.best is None:
        return "-"
    if row.cost == row.optimum:
        return "optimum"
    return "equal" if row.cost == row.best else _above(row.cost, row.best)


def markdown(rows: Sequence[Row], solver: str, seed: int) -> str:
    """The table for a page, with what it was measured on."""
    lines = [
        f"Solver `{solver}`, seed {seed}, on {processor_name()}, {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}; each problem in a process of "
        "its own. *First* is the first feasible choice, its cost is relative to the final one; "
        "*memory* is the peak of the whole process, about 240 MiB of it Python and JAX.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---|" + "---:|" * (len(HEAD) - 1),
    ]
    for row in rows:
        found = cells(row)
        found += [""] * (len(HEAD) - len(found))
        lines.append("| " + " | ".join(found) + " |")
    return "\n".join(lines) + "\n"


def write_table(path: Path, name: str, table: str) -> None:
    """Put a table between its marks in a page: ``<!-- NAME -->`` and ``<!-- end of NAME -->``.

    Raises:
        InputError: The page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else f"{begin}{end}\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError(
            f"the page has no place for the table of {name}",
            at=str(path),
            fix=f"add the lines {begin.strip()} and {end}",
        )
    path.write_text(before + begin + table + end + after, encoding="utf-8")


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as JSON values."""
    return [asdict(row) for row in rows]


def rows_of(data: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows from JSON values, to write a table of runs made before."""
    names = {field.name for field in fields(Row)}
    return [Row(**{key: value for key, value in row.items() if key in names}) for row in data]


def _references(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row.get("instance", ""): row for row in csv.DictReader(file)}


def _number(text: str | None) -> int | None:
    return int(float(text)) if text and "e" in text.lower() else int(text) if text else None


def _least(exact: int | None, rounded: int | None) -> int | None:
    """The lesser of two costs, one of which is printed with nine digits."""
    if exact is None or rounded is None:
        return rounded if exact is None else exact
    return rounded if rounded < exact * (1 - 5e-9) else exact


def _within(part: float, final: int | None, costs: Sequence[tuple[float, int]]) -> float | None:
    """When a cost was at most this fraction above the final one first [s]."""
    if final is None:
        return None
    return next((s for s, cost in costs if cost <= final + part * abs(final)), None)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _above(cost: int | None, base: int | None) -> str:
    if cost is None or base is None:
        return "-"
    return f"{(cost - base) / abs(base):+.3%}" if base else f"{cost - base:+,}"
