"""How right predicted step times are about the clock, over many plans, on a mesh of virtual CPUs.

``python -m autoshard.experiments.accuracy_measured`` calibrates the cost model, makes plans for
each workload (the chosen one, those that people make by hand, and random ones), and times the plans
of a workload in turn on the same devices. It takes some minutes and wants the machine for itself.
Rows are kept in a file as they come, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard import Plan, autoshard
from autoshard.api import Sharded
from autoshard.cost_models.aot_cache import cache_folder
from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import Calibration, load_calibration, save_calibration
from autoshard.cost_models.microbenchmark import calibrate
from autoshard.errors import AutoshardError, InputError, UnknownOpWarning
from autoshard.experiments.random_plans import RandomPlans
from autoshard.experiments.timing import Stepper, interleaved
from autoshard.experiments.workloads import Workload, make
from autoshard.problem import Problem
from autoshard.solvers import SOLVERS, Progress, Solution
from autoshard.terminal import cpu_mesh, print_json, progress, warnings_as_sentences
from autoshard.typed import parse_mesh

MESH = "data=4,model=2"
"""The mesh of virtual CPU devices."""

PLANS = 10
"""Plans of each workload, as long as there are so many different ones."""

MOVED = (0.02, 0.4)
"""Least and largest share of the decisions in which a random plan differs from the chosen one."""

SAMPLES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"features": 256, "hidden": 1024, "blocks": 3, "classes": 256, "batch": 256},
    "llama": {"width": 128, "head_dim": 16, "hidden": 384, "vocab": 512, "seq": 64, "batch": 16},
    "moe": {"width": 128, "head_dim": 16, "hidden": 256, "vocab": 512, "seq": 64},
    "llama_prefill": {"width": 128, "head_dim": 16, "hidden": 384, "vocab": 512},
    "dlrm": {"rows": 4096, "width": 64, "bottom": (256, 128), "top": (256, 128), "batch": 512},
    "equinox_mixer": {"width": 128, "tokens_hidden": 64, "channels_hidden": 512, "batch": 32},
}
"""Workloads, and how their size ``tiny`` is changed: a step takes milliseconds, not microseconds,
and yet all plans of one compile and run within a minute."""

ERROR_GOAL, TAU_GOAL, REGRET_GOAL = 0.15, 0.8, 0.05
"""Largest median error, least rank correlation of every workload, largest mean regret."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan of a workload, predicted and timed.

    Attributes:
        name: ``auto``, a hand-made plan, or ``random`` and its seed.
        predicted_s: Time of a step by the plan's schedule [s].
        measured_s: Median of the timed steps [s].
        low_s: Lower end of the median's interval [s].
        high_s: Upper end [s].
        compute_s: Predicted time in ops [s].
        communication_s: Predicted time in collectives [s].
        collectives: Collectives in the plan, each as often as it runs.
    """

    name: str
    predicted_s: float
    measured_s: float
    low_s: float
    high_s: float
    compute_s: float
    communication_s: float
    collectives: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Row:
    """A workload.

    Attributes:
        workload: Its name.
        calibrated: When the cost model was calibrated.
        trials: Its plans.
        rounds: Timed steps of each.
        seconds: Time that planning, compiling and timing took [s].
    """

    workload: str
    calibrated: str
    trials: tuple[Trial, ...]
    rounds: int
    seconds: float

    @property
    def error(self) -> float:
        """Median over the plans of how far the prediction is off."""
        return statistics.median(abs(trial.error) for trial in self.trials)

    @property
    def tau(self) -> float:
        """Kendall's rank correlation of predicted and measured times.

        Pairs in the same order less pairs in the other, over all pairs; a pair that is predicted to
        be equal counts for neither.
        """
        signs = [
            np.sign(a.predicted_s - b.predicted_s) * np.sign(a.measured_s - b.measured_s)
            for i, a in enumerate(self.trials)
            for b in self.trials[:i]
        ]
        return float(np.mean(signs))

    @property
    def regret(self) -> float:
        """How much longer than the fastest plan the one takes that is predicted to be fastest."""
        picked = min(self.trials, key=lambda trial: trial.predicted_s)
        return picked.measured_s / min(t.measured_s for t in self.trials) - 1

    @property
    def spread(self) -> float:
        """Measured time of the slowest plan over that of the fastest."""
        times = [trial.measured_s for trial in self.trials]
        return max(times) / min(times)


class _Once:
    """The exact solver, for one problem that several plans are made from."""

    def __init__(self) -> None:
        self.found: Solution | None = None

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        if self.found is None:
            self.found = SOLVERS["exact"].solve(
                problem, time_limit_s=time_limit_s, seed=seed, hint=hint, progress=progress
            )
        return self.found


def plans(
    workload: Workload, mesh: Mesh, model: CalibratedModel, count: int = PLANS
) -> Iterator[tuple[str, Sharded, Plan]]:
    """Different plans of a workload: the chosen one, hand-made ones, random ones by seed."""
    seen: list[Plan] = []
    once = _Once()

    def ways() -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "auto", {"solver": once}
        for name, expert in workload.experts.items():
            pins = {
                "in_shardings": expert.in_shardings(mesh),
                "out_shardings": expert.out_shardings(mesh),
            }
            yield name, pins
        for seed in range(3 * count):
            yield f"random {seed}", {"solver": RandomPlans(seed, MOVED, once)}

    for name, options in ways():
        if len(seen) == count:
            return
        step = autoshard(
            workload.fn,
            mesh,
            donate_argnums=workload.donate_argnums,
            cost_model=model,
            time_limit_s=30.0,
            **options,
        )
        plan = step.plan(*workload.args)
        if not any(_is_same(plan, other) for other in seen):
            seen.append(plan)
            yield name, step, plan


def _is_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans of a function run the same program."""
    mine, theirs = (
        (p.argument_shardings, p.result_shardings, p.ops, p.reshards) for p in (plan, other)
    )
    return mine == theirs


def check(
    workload: Workload,
    mesh: Mesh,
    calibration: Calibration,
    *,
    rounds: int,
    budget_s: float,
    count: int = PLANS,
    say: Callable[[str], None] = lambda stage: None,
) -> Row:
    """Plan, compile and time the plans of one workload.

    Args:
        workload: What to run.
        mesh: Where.
        calibration: Of the cost model.
        rounds: Timed steps of each plan at most.
        budget_s: Time for the timed steps [s].
        count: Plans at most.
        say: Told how it goes.
    """
    start = time.perf_counter()
    model = CalibratedModel(calibration, devices=mesh.devices.size)
    steppers: dict[str, Stepper] = {}
    chosen: dict[str, Plan] = {}
    for name, step, plan in plans(workload, mesh, model, count):
        say(f"{workload.name}: compiling plan {len(chosen) + 1}, {name}")
        step.compile(*workload.args)
        # A copy each, because a program may consume its donated arguments.
        arguments = jax.tree.map(lambda x: x.copy(), workload.init(0))
        placed = plan.place(*arguments)
        placed = placed if len(arguments) > 1 else (placed,)
        steppers[name], chosen[name] = Stepper(step, placed, workload.donate_argnums), plan
    say(f"{workload.name}: timing {len(steppers)} plans in turn")
    timings = interleaved(steppers, repeats=rounds, budget_s=budget_s)
    trials = tuple(
        Trial(
            name=name,
            predicted_s=plan.predicted.step_s,
            measured_s=timings[name].step_s.median,
            low_s=timings[name].step_s.low,
            high_s=timings[name].step_s.high,
            compute_s=plan.predicted.compute_s,
            communication_s=plan.predicted.communication_s,
            collectives=sum(c.trips for c in plan.collectives),
        )
        for name, plan in chosen.items()
    )
    done = len(next(iter(timings.values())).trials_s)
    return Row(workload.name, calibration.date, trials, done, time.perf_counter() - start)


def load(path: Path, calibration: Calibration) -> dict[str, Row]:
    """The rows of a file that rest on a calibration; an unfinished last line is left out."""
    rows: dict[str, Row] = {}
    names = {f.name for f in fields(Row)}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and set(found) == names:
            trials = tuple(Trial(**trial) for trial in found.pop("trials"))
            row = Row(trials=trials, **found)
            if row.calibrated == calibration.date:
                rows[row.workload] = row
    return rows


@dataclass(frozen=True, slots=True)
class Summary:
    """The goals over some workloads.

    Attributes:
        error: Median over all plans of how far the prediction is off.
        tau: Least rank correlation of a workload.
        regret: Mean over the workloads of what the choice of the fastest plan costs.
    """

    error: float
    tau: float
    regret: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        """The goals over at least one row."""
        return cls(
            statistics.median(abs(t.error) for row in rows for t in row.trials),
            min(row.tau for row in rows),
            statistics.mean(row.regret for row in rows),
        )

    @property
    def holds(self) -> bool:
        """Whether all goals are met."""
        return self.error <= ERROR_GOAL and self.tau >= TAU_GOAL and self.regret <= REGRET_GOAL

    def __str__(self) -> str:
        return (
            f"median error {self.error:.1%} (goal {ERROR_GOAL:.0%}), least Kendall's tau "
            f"{self.tau:.2f} (goal {TAU_GOAL}), mean regret {self.regret:.1%} "
            f"(goal {REGRET_GOAL:.0%}): {'met' if self.holds else 'not met'}"
        )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| workload | plans | rounds | slowest / fastest | median error | Kendall's tau | regret |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.workload} | {len(row.trials)} | {row.rounds} | {row.spread:.2f} | "
        f"{row.error:.1%} | {row.tau:.2f} | {row.regret:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def details(rows: Sequence[Row]) -> str:
    """Every plan as text."""
    lines = []
    for row in rows:
        lines.append(f"{row.workload}: predicted | measured [interval], ms")
        for t in sorted(row.trials, key=lambda t: t.measured_s):
            lines.append(
                f"  {t.name:10} {1e3 * t.predicted_s:8.2f} | {1e3 * t.measured_s:8.2f} "
                f"[{1e3 * t.low_s:.2f}, {1e3 * t.high_s:.2f}]  {t.error:+.1%}  "
                f"ops {1e3 * t.compute_s:.2f}, {t.collectives} collectives "
                f"{1e3 * t.communication_s:.2f}"
            )
    return "\n".join(lines)


BEGIN, END = "<!-- measured: written by the command -->", "<!-- end of measured -->"
"""Marks between which a document's text is replaced."""


def write(path: Path, rows: Sequence[Row], calibration: Calibration) -> None:
    """Put the table between the marks of a document.

    Raises:
        InputError: It has no such marks.
    """
    before, begin, rest = path.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(
            f"{path} does not say where the table belongs",
            at=str(path),
            fix=f"put the lines {BEGIN} and {END} into it",
        )
    machine = (
        f"{calibration.machine}, {calibration.cores} cores playing {calibration.devices} devices, "
        f"calibrated {calibration.date}, jax {calibration.jax_version}"
    )
    text = f"{table(rows)}\n\n{machine}: {Summary.of(rows)}."
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the workloads and print what came of it; status 1 if a goal is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=Path, help="file of the rows; default: in the cache folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads that hold TEXT")
    parser.add_argument("--again", action="store_true", help="calibrate and measure anew")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of a plan at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="time to time a workload [s]")
    parser.add_argument("--calibrate", type=float, default=40.0, help="time to calibrate [s]")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    options = parser.parse_args(arguments)
    path = options.rows or cache_folder().parent / "accuracy" / "measured.jsonl"
    constants = path.with_suffix(".calibration.json")
    names = [name for name in SAMPLES if options.only in name]
    mesh = cpu_mesh(parse_mesh(MESH))
    try:
        if not names:
            raise InputError(f"no workload holds {options.only!r}", fix="leave out --only")
        with (
            warnings_as_sentences(),
            warnings.catch_warnings(),
            redirect_stdout(sys.stderr),
            progress("accuracy") as say,
        ):
            warnings.simplefilter("ignore", UnknownOpWarning)
            path.parent.mkdir(parents=True, exist_ok=True)
            if options.again or not constants.exists():
                found = calibrate(
                    tuple(mesh.devices.flat),
                    budget_s=options.calibrate,
                    progress=lambda what, share: say(f"{what} ({share:.0%})"),
                )
                save_calibration(found, constants)
            calibration = load_calibration(constants)
            rows = load(path, calibration)
            for name in names:
                if name in rows:
                    continue
                row = rows[name] = check(
                    make(name, **SAMPLES[name]),
                    mesh,
                    calibration,
                    rounds=options.rounds,
                    budget_s=options.seconds,
                    say=say,
                )
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            told = [rows[name] for name in names]
            if options.write is not None:
                write(options.write, told, calibration)
    except AutoshardError as error:
        print(error, file=sys.stderr)
        return 2
    goals = Summary.of(told)
    if options.json:
        print_json({"rows": [asdict(r) for r in told], "goals": asdict(goals)})
    else:
        print(details(told), table(told), goals, sep="\n\n")
    return 0 if goals.holds else 1


if __name__ == "__main__":
    sys.exit(main())
