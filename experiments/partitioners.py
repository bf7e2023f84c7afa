"""One plan through XLA's partitioner and through Shardy's: what each compiles to, and how fast.

``python -m autoshard.experiments.partitioners`` plans every workload once on a (4, 2) mesh of
virtual CPU devices, compiles the plan both ways and writes ``docs/partitioners.md``. Both programs
of a workload are timed in turn, round by round.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard import FallbackWarning, Plan, Validation
from autoshard.errors import InputError, UnknownOpWarning
from autoshard.experiments.comparison import Program, measure, planned
from autoshard.experiments.timing import Interval, Timing, ratio
from autoshard.experiments.workloads import WORKLOADS, Workload, make
from autoshard.partition import PARTITIONERS
from autoshard.plan_text import nbytes

SIZES = (4, 2)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "partitioners.md"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload's plan, compiled both ways.

    Attributes:
        workload: Its name.
        validations: The plan held against each compiled program, in the order of ``PARTITIONERS``.
        timings: Of each program.
        ratio: Shardy's time over XLA's, round by round.
    """

    workload: str
    validations: tuple[Validation, ...]
    timings: tuple[Timing, ...]
    ratio: Interval

    @property
    def fallback_reason(self) -> str:
        """Why XLA partitioned what Shardy was to; empty if it did not."""
        return self.validations[1].fallback_reason


def compare(workload: Workload, mesh: Mesh, *, repeats: int = 20, budget_s: float = 30.0) -> Row:
    """Compile one plan of a workload both ways, check both against the function, time both.

    Args:
        workload: What to run.
        mesh: Where.
        repeats: Rounds of timing at most.
        budget_s: Time for the timing [s].
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the row says it
        warnings.simplefilter("ignore", UnknownOpWarning)
        return _compare(workload, mesh, repeats, budget_s)


def _compare(workload: Workload, mesh: Mesh, repeats: int, budget_s: float) -> Row:
    arguments = workload.init(0)
    plan: Plan | None = None
    programs: dict[str, Program] = {}
    validations = []
    for name in PARTITIONERS:
        program, validation = planned(workload, mesh, arguments, partitioner=name, plan=plan)
        plan, programs[name] = program.plan, program
        validations.append(validation)
    timings = measure(workload, programs, repeats=repeats, budget_s=budget_s)
    ours, theirs = timings["shardy"], timings["xla"]
    return Row(workload.name, tuple(validations), (theirs, ours), ratio(ours, theirs))


def page(rows: Sequence[Row], skipped: Sequence[tuple[str, str]], seconds: float) -> str:
    """The comparison as a page.

    Args:
        rows: One per workload.
        skipped: Workloads that could not be made, and why.
        seconds: What all of it took [s].
    """
    devices = int(np.prod(SIZES))
    exact = [r for r in rows if _is_exact(r, 1)]
    lines = [
        "# Two partitioners",
        "",
        "Written by `python -m autoshard.experiments.partitioners`. Each workload (size `tiny`) is",
        f"planned once on a {SIZES} mesh of {devices} virtual CPU devices. The same plan is then",
        'compiled with `partitioner="xla"`, where XLA reads its shardings as annotations, and with',
        '`partitioner="shardy"`, where Shardy\'s passes write the program of one device.',
        "",
        f"Of {len(rows)} workloads, {sum(not r.fallback_reason for r in rows)} run through Shardy "
        f"without falling back, and {len(exact)} of them",
        "compile to exactly the FLOPs, bytes and collectives that the plan predicts.",
        "",
        "## Compiled",
        "",
        "Per device and call: FLOP of products, bytes sent, and peak memory; *p* is predicted by",
        "the plan, *x* compiled through XLA, *s* through Shardy. *Unplanned* counts collectives",
        "that the plan does not name. The error is the largest difference from the unsharded",
        "function, relative to the largest magnitude of the same array.",
        "",
        "| workload | FLOP p | x | s | sent p | x | s | peak p | x | s "
        "| unplanned x | s | error x | s |",
        "|---|" + "---:|" * 13,
        *(_compiled_row(row) for row in rows),
        "",
        "## Measured",
        "",
        "Medians of interleaved rounds. The ratio is Shardy's time over XLA's, round by round,",
        "with its 95% interval. All virtual devices share the cores of one machine: a ratio says",
        "which program does less work, and nothing of a network.",
        "",
        "| workload | XLA [ms] | Shardy [ms] | ratio | interval | rounds |",
        "|---|---:|---:|---:|---:|---:|",
        *(_measured_row(row) for row in rows),
        "",
        "## Fallbacks",
        "",
        *([f"- {r.workload}: {r.fallback_reason}" for r in rows if r.fallback_reason] or ["None."]),
        *(["", "Not run here:", ""] if skipped else []),
        *(f"- {name}: {why}" for name, why in skipped),
        "",
        "## Where",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax "
        f"{jax.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}, {seconds:.0f} s in all.",
        "",
    ]
    return "\n".join(lines)


def _is_exact(row: Row, which: int) -> bool:
    v = row.validations[which]
    return (
        not v.fallback_reason
        and v.compiled.flops == v.predicted.flops
        and abs((v.compiled.collective_bytes or 0) - (v.predicted.collective_bytes or 0)) < 1
        and not v.unnamed_collectives
        and not v.absent_collectives
    )


def _compiled_row(row: Row) -> str:
    v = row.validations
    figures = (v[0].predicted, v[0].compiled, v[1].compiled)
    cells = [row.workload]
    cells += [f"{f.flops:.5g}" for f in figures]
    cells += [nbytes(f.collective_bytes or 0) for f in figures]
    cells += [nbytes(f.peak_bytes or 0) for f in figures]
    cells += [str(len(x.unnamed_collectives)) for x in v]
    cells += [f"{x.max_relative_error:.1e}" for x in v]
    return "| " + " | ".join(cells) + " |"


def _measured_row(row: Row) -> str:
    times = [f"{t.step_s.median * 1e3:.2f}" for t in row.timings]
    r = row.ratio
    cells = [row.workload, *times, f"{r.median:.2f}", f"{r.low:.2f} to {r.high:.2f}"]
    return "| " + " | ".join([*cells, str(len(row.timings[0].trials_s))]) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help="by default all")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of timing at most")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of timing per workload")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", int(np.prod(SIZES)))
    devices = np.array(jax.devices()[: int(np.prod(SIZES))]).reshape(SIZES)
    mesh = Mesh(devices, ("data", "model"))
    start, rows, skipped = time.perf_counter(), [], []
    for name in options.workloads:
        try:
            workload = make(name)
        except InputError as error:  # a package that it needs is missing
            skipped.append((name, error.problem))
            continue
        row = compare(workload, mesh, repeats=options.repeats, budget_s=options.budget)
        rows.append(row)
        print(
            f"{name}: {row.validations[1].partitioner}, ratio {row.ratio.median:.2f}"
            f"{' (' + row.fallback_reason + ')' if row.fallback_reason else ''}",
            flush=True,
        )
        options.out.write_text(page(rows, skipped, time.perf_counter() - start), encoding="utf-8")


if __name__ == "__main__":
    main()
