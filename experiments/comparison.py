"""A workload's plan beside the plans that people make by hand: predicted, compiled, measured.

A hand-made plan fixes the shardings of arguments and results. Its *predicted* figures are those of
the cheapest plan that keeps them, under the same cost model; its *compiled* and *measured* figures
are those of ``jax.jit`` given these shardings, where XLA decides the rest. All programs are timed
in turn, in one run, on the same devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard import Plan, Sharded, autoshard
from autoshard.cost_models.compiled import read_compiled
from autoshard.experiments.arrays import PyTree
from autoshard.experiments.experts import Expert
from autoshard.experiments.timing import Stepper, Timing, interleaved
from autoshard.experiments.workloads import Workload


@dataclass(frozen=True, slots=True)
class Figures:
    """What one program does in one call, per device; None where it is not known.

    Attributes:
        flops: Of dots and convolutions [FLOP].
        collective_bytes: Bytes that one device sends.
        peak_bytes: Arguments, results and temporaries at their peak [bytes].
        step_s: Time of the call [s].
    """

    flops: float | None = None
    collective_bytes: float | None = None
    peak_bytes: int | None = None
    step_s: float | None = None

    def to_json(self) -> dict[str, float | int | None]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan in a comparison.

    Attributes:
        name: Of the plan.
        predicted: By the cost model.
        compiled: Of the program that XLA made.
        measured: By the clock.
    """

    name: str
    predicted: Figures
    compiled: Figures
    measured: Figures

    def to_json(self) -> dict[str, dict[str, float | int | None]]:
        """As plain JSON values."""
        return {
            "predicted": self.predicted.to_json(),
            "compiled": self.compiled.to_json(),
            "measured": self.measured.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Program:
    """Something that can be compiled, read and run.

    Attributes:
        plan: Its plan.
        compiled: What XLA made of it.
        place: Moves arguments to where the program wants them.
        call: Runs it on such arguments.
    """

    plan: Plan
    compiled: jax.stages.Compiled
    place: Callable[..., Sequence[Any]]
    call: Callable[..., Any]


def planned(workload: Workload, mesh: Mesh, **options: Any) -> tuple[Sharded, Program]:
    """The workload as :func:`autoshard.autoshard` runs it.

    Args:
        workload: What to run.
        mesh: Where.
        **options: Of :func:`autoshard.autoshard`.
    """
    step = autoshard(workload.fn, mesh, donate_argnums=workload.donate_argnums, **options)
    plan = step.plan(*workload.args)
    executable = step.compile(*workload.args)

    def place(*arguments: Any) -> Sequence[Any]:
        placed = plan.place(*arguments)
        return placed if len(arguments) > 1 else (placed,)

    return step, Program(plan, executable.compiled, place, step)


def by_hand(workload: Workload, expert: Expert, mesh: Mesh, **options: Any) -> Program:
    """The workload under ``jax.jit`` with the shardings of a hand-made plan.

    Args:
        workload: What to run.
        expert: The hand-made plan.
        mesh: Where.
        **options: Of :func:`autoshard.autoshard`, for the plan that prices it.
    """
    pinned = autoshard(
        workload.fn,
        mesh,
        donate_argnums=workload.donate_argnums,
        in_shardings=expert.in_shardings(mesh),
        out_shardings=expert.out_shardings(mesh),
        **options,
    )
    arguments = _named(expert.in_shardings(mesh), mesh)
    results = _named(expert.out_shardings(mesh), mesh)
    jitted = jax.jit(
        workload.fn,
        in_shardings=arguments,
        out_shardings=results,
        donate_argnums=workload.donate_argnums,
    )
    compiled = jitted.lower(*workload.args).compile()

    def place(*values: Any) -> Sequence[Any]:
        placed: Sequence[Any] = jax.device_put(values, arguments)
        return placed

    return Program(pinned.plan(*workload.args), compiled, place, compiled)


def _named(specs: PyTree, mesh: Mesh) -> PyTree:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def predicted(plan: Plan) -> Figures:
    """The figures that a plan promises."""
    p = plan.predicted
    return Figures(p.flops, p.collective_bytes, p.peak_bytes, p.step_s)


def compiled(program: jax.stages.Compiled) -> Figures:
    """The figures of a compiled program; time is not among them."""
    read = read_compiled(program)
    return Figures(read.flops, read.collective_bytes, read.peak_bytes)


def measure(
    workload: Workload,
    programs: Mapping[str, Program],
    *,
    repeats: int = 20,
    budget_s: float = 60.0,
    seed: int = 0,
) -> Mapping[str, Timing]:
    """Time programs of one workload in turn, each on its own copy of the same arguments."""
    steppers = {}
    for name, program in programs.items():
        # A copy each, because a program may consume its donated arguments.
        arguments = jax.tree.map(lambda x: x.copy(), workload.init(seed))
        steppers[name] = Stepper(program.call, program.place(*arguments), workload.donate_argnums)
    return interleaved(steppers, repeats=repeats, budget_s=budget_s, seed=seed)


def rows(
    programs: Mapping[str, Program], timings: Mapping[str, Timing] | None = None
) -> tuple[Row, ...]:
    """One row for each program, in their order."""
    return tuple(
        Row(
            name,
            predicted(program.plan),
            compiled(program.compiled),
            Figures(step_s=timings[name].step_s.median) if timings else Figures(),
        )
        for name, program in programs.items()
    )
