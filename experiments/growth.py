"""What planning costs against the number of layers and of mesh axes.

``python -m autoshard.experiments.growth`` plans the unrolled Llama train step with more and more
layers, and the scanned one on meshes of one to four axes. Each plan is made in its own process,
whose peak of memory is read at its end; nothing is compiled, no array is made.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autoshard import autoshard
from autoshard.cost_models.microbenchmark import processor_name
from autoshard.experiments.workloads import make

LAYERS = (1, 2, 4, 8, 16, 32, 80)
MESHES = ("32", "8,4", "4,4,2", "4,2,2,2")
STAGES = ("normalize", "extract", "price", "solve", "interpret")
AXES = "xyzw"


@dataclass(frozen=True, slots=True)
class Task:
    """One plan to make.

    Attributes:
        workload: Its row in the table of workloads.
        size: The workload's size.
        layers: Number of layers.
        mesh: Sizes of the mesh's axes, e.g. ``8,4``.
        cost_model: Name of the cost model.
    """

    workload: str
    size: str
    layers: int
    mesh: str
    cost_model: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What making one plan took.

    Attributes:
        task: The plan.
        trace_s: JAX's tracing and lowering [s].
        planning_s: All stages of planning [s].
        stages_s: Each of them [s].
        cpu_s: Processor time of tracing and planning together [s]; unlike the others it does not
            count waiting for a processor that others use.
        peak_rss_bytes: The most memory the process held, Python and JAX included [bytes].
        ops: Decisions about ops in the plan.
        nodes: Decisions in the solver's problem.
        objective_s: What the solver minimized [s].
        step_s: Predicted time of a step [s].
        peak_bytes: Predicted peak of memory on one device [bytes].
        status: What the solver proved.
        gap: How far the objective can be above the best at most; None if nothing is proved.
    """

    task: Task
    trace_s: float
    planning_s: float
    stages_s: dict[str, float]
    cpu_s: float
    peak_rss_bytes: int
    ops: int
    nodes: int
    objective_s: float
    step_s: float
    peak_bytes: int
    status: str
    gap: float | None


def planned(task: Task) -> Growth:
    """Make a plan here and now; the process must not have used its devices yet."""
    sizes = tuple(map(int, task.mesh.split(",")))
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    workload = make(task.workload, task.size, layers=task.layers)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), tuple(AXES[: len(sizes)]))
    step = autoshard(
        workload.fn, mesh, donate_argnums=workload.donate_argnums, cost_model=task.cost_model
    )
    start, busy = time.perf_counter(), time.process_time()
    plan = step.plan(*workload.args)
    cpu_s = time.process_time() - busy
    trace_s = time.perf_counter() - start - plan.planning_s
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, getrusage(2)
    return Growth(
        task=task,
        trace_s=trace_s,
        planning_s=plan.planning_s,
        stages_s=dict(plan.stages),
        cpu_s=cpu_s,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        ops=len(plan.ops),
        nodes=plan.solver.nodes,
        objective_s=plan.solver.objective_s,
        step_s=plan.predicted.step_s,
        peak_bytes=plan.predicted.peak_bytes,
        status=plan.solver.status,
        gap=plan.solver.gap,
    )


def measured(task: Task) -> Growth:
    """Make a plan in a process of its own."""
    command = [sys.executable, "-m", "autoshard.experiments.growth", "--one", *_words(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Growth(**{**answer, "task": Task(**answer["task"])})


def _words(task: Task) -> list[str]:
    return [task.workload, task.size, str(task.layers), task.mesh, task.cost_model]


def exponent(rows: Sequence[Growth]) -> float | None:
    """The power of the number of layers with which processor time grows over the upper half.

    A least-squares line through the logarithms of the last rows, at least two and at least half of
    them: the fixed cost of a small program says nothing of growth. 1 is linear.
    """
    upper = [r for r in rows if r.cpu_s > 0][len(rows) // 2 :] if len(rows) > 3 else rows
    if len({r.task.layers for r in upper}) < 2:
        return None
    layers, seconds = zip(*((r.task.layers, r.cpu_s) for r in upper), strict=True)
    return float(np.polyfit(np.log(layers), np.log(seconds), 1)[0])


def table(rows: Sequence[Growth]) -> str:
    """The rows as a Markdown table: seconds per stage, memory, what was found."""
    head = ["workload", "layers", "mesh", "prices", "ops", "trace", *STAGES, "planning"]
    head += ["processor", "peak RSS", "step", "proved"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        t = r.task
        cells = [t.workload, str(t.layers), f"({t.mesh})", t.cost_model, str(r.ops)]
        cells.append(f"{r.trace_s:.1f} s")
        cells += [f"{r.stages_s.get(stage, 0.0):.2f} s" for stage in STAGES]
        cells += [f"**{r.planning_s:.1f} s**", f"{r.cpu_s:.1f} s"]
        cells.append(f"{r.peak_rss_bytes / 2**30:.2f} GiB")
        cells.append(f"{r.step_s:.4g} s")
        cells.append("?" if r.gap is None else "optimal" if not r.gap else f"within {r.gap:.2%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(layers: Sequence[Growth], meshes: Sequence[Growth]) -> str:
    """Both tables as a page for ``docs/``."""
    found = exponent(layers)
    parts = [
        "# What planning costs",
        "Written by `python -m autoshard.experiments.growth --write docs/growth.md`; nothing is "
        "typed in by hand. Each row is one plan made in a process of its own: seconds of JAX's "
        "tracing and lowering, of each stage of planning (a stage's time is without those inside "
        "it; *interpret* includes counting memory), processor time of tracing and planning "
        "together (less than their seconds where others use the machine), and the most memory the "
        "process held, Python and JAX included. Nothing was compiled. The step is predicted; "
        "*optimal* is said of the solver's objective.",
        f"Machine: {processor_name()}, Python {platform.python_version()}, jax {jax.__version__}.",
    ]
    if layers:
        parts += ["## Layers", table(layers)]
    if found is not None:
        parts.append(
            f"Over the upper half of the rows processor time grows with the power {found:.2f} of "
            "the number of layers."
        )
    if meshes:
        parts += ["## Mesh axes", table(meshes)]
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; see ``--help``."""
    parser = argparse.ArgumentParser("python -m autoshard.experiments.growth", description=__doc__)
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="e.g. 1,2,4; 0: none")
    parser.add_argument("--mesh", default="8,4", help="mesh of the rows over layers")
    parser.add_argument("--meshes", nargs="*", default=MESHES, help="meshes of the scanned step")
    parser.add_argument("--size", default="8b", help="size of the workloads")
    parser.add_argument("--cost-model", default="v5p")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # a child process: one task
    given = parser.parse_args(words)
    if given.one:
        workload, size, count, mesh, model = given.one
        print(json.dumps(asdict(planned(Task(workload, size, int(count), mesh, model)))))
        return
    rows: list[list[Growth]] = [[], []]
    deep = [int(n) for n in given.layers.split(",") if int(n)]
    tasks = [Task("llama_unrolled", given.size, n, given.mesh, given.cost_model) for n in deep]
    wide = [Task("llama", given.size, 32, mesh, given.cost_model) for mesh in given.meshes]
    for group, part in zip(rows, (tasks, wide), strict=True):
        for task in part:
            print(f"planning {' '.join(_words(task))}", file=sys.stderr, flush=True)
            group.append(measured(task))
    if given.json:
        answer = {
            "layers": [asdict(r) for r in rows[0]],
            "meshes": [asdict(r) for r in rows[1]],
            "exponent": exponent(rows[0]),
        }
        print(json.dumps(answer))
    else:
        print(document(*rows))
    if given.write is not None:
        given.write.write_text(document(*rows), encoding="utf-8")


if __name__ == "__main__":
    main()
