"""Problems of our own workloads: what building them costs, what solving them costs, what is proved.

``python -m autoshard.experiments.own_problems`` plans Llama (scanned and unrolled), MoE and ResNet
steps on meshes of two and three axes, each in a process of its own, and solves each problem again
under memory limits that are shares of what the unlimited plan holds. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autoshard import autoshard
from autoshard.cost_models.microbenchmark import processor_name
from autoshard.errors import InfeasibleError
from autoshard.experiments.growth import AXES
from autoshard.experiments.workloads import make
from autoshard.problem import Problem, evaluate, save_problem
from autoshard.solvers import Progress, Solution
from autoshard.solvers.exact import ExactSolver

SHARES = (1.0, 0.6, 0.4)
"""Memory limits, as shares of what the unlimited solution holds at its fullest moment."""


@dataclass(frozen=True, slots=True)
class Task:
    """A program and what it is planned for.

    Attributes:
        workload: Its row in the table of workloads.
        size: The workload's size.
        mesh: Sizes of the mesh's axes, e.g. ``8,4``.
        cost_model: Name of the cost model.
        layers: Number of layers; 0 for what the size says.
    """

    workload: str
    size: str
    mesh: str
    cost_model: str
    layers: int = 0

    @property
    def name(self) -> str:
        """E.g. ``llama_unrolled-8b-8x4-v5p-80``."""
        parts = [self.workload, self.size, self.mesh.replace(",", "x"), self.cost_model]
        return "-".join((*parts, str(self.layers)) if self.layers else parts)


TASKS = (
    Task("llama", "8b", "8,4", "v5p"),
    Task("llama", "8b", "4,4,2", "v5p"),
    Task("moe", "8x7b", "8,4", "v5p"),
    Task("moe", "8x7b", "4,4,2", "v5p"),
    Task("resnet", "resnet50", "8,4", "v5p"),
    Task("resnet", "resnet50", "4,4,2", "v5p"),
    Task("llama", "tiny", "4,2", "cpu"),
    Task("llama", "tiny", "2,2,2", "cpu"),
    Task("moe", "tiny", "4,2", "cpu"),
    Task("moe", "tiny", "2,2,2", "cpu"),
    Task("resnet", "tiny", "4,2", "cpu"),
    Task("resnet", "tiny", "2,2,2", "cpu"),
    Task("llama_unrolled", "8b", "8,4", "v5p", 80),
    Task("llama_unrolled", "8b", "4,4,2", "v5p", 80),
)
"""What is measured, the unrolled programs last."""


@dataclass(frozen=True, slots=True)
class Solved:
    """How solving one problem went.

    Attributes:
        task: Where it comes from.
        share: Its memory limit, as a share of what the unlimited solution holds; 0 for no limit.
        nodes: Its nodes.
        states: Strategies of all nodes together.
        edges: Its edges.
        build_cpu_s: Processor time from calling ``plan`` until the solver is called, JAX's tracing
            included [s]; 0 in rows with a limit, which need no other building.
        solve_cpu_s: Processor time in the solver, on a problem of fewer axes first where there are
            three or more [s].
        status: The solver's.
        gap: What is proved of the cost; None if nothing is.
        cost_s: What is minimized [s]; None without an answer.
    """

    task: Task
    share: float
    nodes: int
    states: int
    edges: int
    build_cpu_s: float
    solve_cpu_s: float
    status: str
    gap: float | None
    cost_s: float | None


@dataclass(slots=True)
class _Seen:
    """What a solver did: its last problem and answer, and when it worked."""

    begun: float | None = None
    cpu_s: float = 0.0
    last: tuple[Problem, Solution] | None = None


@dataclass(frozen=True, slots=True)
class _Watched(ExactSolver):
    """The default solver, watched."""

    seen: _Seen = field(default_factory=_Seen)

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        seen, start = self.seen, time.process_time()
        seen.begun = start if seen.begun is None else seen.begun
        found = ExactSolver.solve(
            self, problem, time_limit_s=time_limit_s, seed=seed, hint=hint, progress=progress
        )
        seen.cpu_s += time.process_time() - start
        seen.last = problem, found
        return found


def solved(
    task: Task, *, shares: Sequence[float] = SHARES, time_limit_s: float = 60.0
) -> Iterator[Solved]:
    """Plan here and now, then solve under each limit; the process must not have used its devices.

    Args:
        task: What to plan.
        shares: Memory limits, as shares of what the unlimited solution holds.
        time_limit_s: For each problem [s].
    """
    problem, found, build_cpu_s, cpu_s = _planned(task, time_limit_s)
    yield _row(task, 0.0, problem, found, build_cpu_s, cpu_s)
    if not found.choices:
        return
    peak = evaluate(problem, found.choices).peak_usage
    for share in shares:
        watched = _Watched()
        limited = replace(problem, usage_limit=int(share * peak))
        answer = watched.solve(limited, time_limit_s=time_limit_s, hint=found.choices)
        yield _row(task, share, problem, answer, 0.0, watched.seen.cpu_s)


def _planned(task: Task, time_limit_s: float) -> tuple[Problem, Solution, float, float]:
    """The problem, its solution, processor time of building and of solving [s]."""
    sizes = tuple(map(int, task.mesh.split(",")))
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    more = {"layers": task.layers} if task.layers else {}
    workload = make(task.workload, task.size, **more)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), tuple(AXES[: len(sizes)]))
    watched = _Watched()
    step = autoshard(
        workload.fn,
        mesh,
        donate_argnums=workload.donate_argnums,
        cost_model=task.cost_model,
        memory_limit=1 << 60,  # limits come after: the problem shall be the unlimited one
        solver=watched,
        time_limit_s=2 * time_limit_s,  # the plan without a limit gets half
    )
    start = time.process_time()
    with contextlib.suppress(InfeasibleError):  # out of time: the problem is known all the same
        step.plan(*workload.args)
    seen = watched.seen
    assert seen.last is not None
    assert seen.begun is not None
    return *seen.last, seen.begun - start, seen.cpu_s


def _row(
    task: Task, share: float, problem: Problem, found: Solution, build_s: float, solve_s: float
) -> Solved:
    return Solved(
        task=task,
        share=share,
        nodes=len(problem.costs),
        states=sum(map(len, problem.costs)),
        edges=len(problem.edges),
        build_cpu_s=build_s,
        solve_cpu_s=solve_s,
        status=found.status.name.lower(),
        gap=found.gap if math.isfinite(found.gap) else None,
        cost_s=found.cost * 1e-12 if found.choices else None,
    )


def table(rows: Sequence[Solved]) -> str:
    """The rows as a Markdown table."""
    head = ("problem", "limit", "nodes", "states", "edges", "build", "solve", "found", "proved")
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for r in rows:
        proved = r.status if r.gap is None else "optimal" if not r.gap else f"within {r.gap:.3%}"
        cells = [
            r.task.name,
            f"{r.share:.0%}" if r.share else "none",
            f"{r.nodes:,}",
            f"{r.states:,}",
            f"{r.edges:,}",
            f"{r.build_cpu_s:.1f} s" if not r.share else "",
            f"{r.solve_cpu_s:.1f} s",
            "-" if r.cost_s is None else f"{r.cost_s:.6g} s",
            proved,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(rows: Sequence[Solved], time_limit_s: float) -> str:
    """The table as a page for ``docs/``."""
    return "\n\n".join(
        (
            "# Problems of our own workloads",
            "Written by `python -m autoshard.experiments.own_problems --write "
            "docs/own_problems.md`; nothing is typed in by hand. Each program is planned in a "
            "process of its own. *Build* is the processor time until the solver is called, JAX's "
            "tracing included; *solve* is the solver's, on three axes with that of the problem "
            "that uses two of them as one. A limit is a share of what the unlimited solution "
            "holds by the problem's own memory rows; *infeasible* is proved. Each row had "
            f"{time_limit_s:g} s of wall clock.",
            f"Machine: {processor_name()}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, jax {jax.__version__}.",
            table(rows),
        )
    ) + "\n"  # fmt: skip


def written(folder: Path, tasks: Sequence[Task] = TASKS) -> Iterator[Path]:
    """Write the unlimited problem of each task into a folder; says where each one is."""
    for task in tasks:
        path = folder / f"{task.name}.json.gz"
        _child(task, "--save", str(path))
        yield path


def _child(task: Task, *more: str) -> list[str]:
    words = [task.workload, task.size, task.mesh, task.cost_model, str(task.layers)]
    command = [sys.executable, "-m", "autoshard.experiments.own_problems", "--one", *words, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if line.startswith("{")]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; see ``--help``."""
    parser = argparse.ArgumentParser(
        "python -m autoshard.experiments.own_problems", description=__doc__
    )
    parser.add_argument("--only", nargs="*", help="tasks whose name contains one of these")
    parser.add_argument("--time-limit", type=float, default=60.0, help="for each problem [s]")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # a child process: one task
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.one:
        name, size, shape, model, layers = given.one
        task = Task(name, size, shape, model, int(layers))
        if given.save is not None:
            save_problem(_planned(task, 1e-3)[0], given.save)
            return
        for row in solved(task, time_limit_s=given.time_limit):
            print(json.dumps(asdict(row)), flush=True)
        return
    rows: list[Solved] = []
    for task in TASKS:
        if given.only and not any(part in task.name for part in given.only):
            continue
        print(f"planning {task.name}", file=sys.stderr, flush=True)
        for line in _child(task, "--time-limit", str(given.time_limit)):
            answer: dict[str, Any] = json.loads(line)
            rows.append(Solved(**{**answer, "task": Task(**answer["task"])}))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        if given.write is not None:  # after each, so that a run that is stopped leaves its rows
            given.write.write_text(document(rows, given.time_limit), encoding="utf-8")
    print(json.dumps([asdict(r) for r in rows]) if given.json else document(rows, given.time_limit))


if __name__ == "__main__":
    main()
