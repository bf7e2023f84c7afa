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

from autoshard import Plan, autoshard
from autoshard.cost_models.compiled import read_compiled
from autoshard.experiments.arrays import PyTree
from autoshard.experiments.experts import Expert
from autoshard.experiments.timing import Stepper, Timing, interleaved
from autoshard.experiments.workloads import Workload
from autoshard.partition import Partitioner
from autoshard.validate import Figures, Validation, validate

OWN = "autoshard"
"""How the chosen plan is called beside the hand-made ones."""


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
class Comparison:
    """A workload's plan, what became of it, and the plans that people make by hand.

    Attributes:
        workload: What was run.
        plan: The chosen plan.
        validation: The plan held against the compiled program and the unsharded values.
        own: The chosen plan's figures.
        experts: The hand-made plans' figures.
    """

    workload: Workload
    plan: Plan
    validation: Validation
    own: Row
    experts: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The chosen plan first, then the hand-made ones."""
        return (self.own, *self.experts)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; per device and call, in FLOP, bytes and seconds."""
        v = self.validation
        return {
            "workload": self.workload.name,
            "size": self.workload.size,
            "mesh": dict(zip(self.plan.mesh.names, self.plan.mesh.sizes, strict=True)),
            **self.own.to_json(),
            "partitioner": v.partitioner,
            "fallback_reason": v.fallback_reason,
            "max_relative_error": v.max_relative_error,
            "unnamed_collectives": list(v.unnamed_collectives),
            "absent_collectives": list(v.absent_collectives),
            "involuntary_remat": v.involuntary_remat,
            "disagreements": [asdict(d) for d in v.disagreements],
            "planning_s": self.plan.planning_s,
            "compile_s": v.compile_s,
            "solver": {"status": self.plan.solver.status, "gap": self.plan.solver.gap},
            "experts": {row.name: row.to_json() for row in self.experts},
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


def planned(
    workload: Workload,
    mesh: Mesh,
    arguments: Sequence[Any],
    *,
    partitioner: Partitioner = "xla",
    plan: Plan | None = None,
) -> tuple[Program, Validation]:
    """The workload as :func:`autoshard.autoshard` runs it, and what became of its plan.

    Args:
        workload: What to run.
        mesh: Where.
        arguments: Concrete arguments to check values with; abstract ones to compile only.
        partitioner: Who writes the program of one device.
        plan: A plan to use instead of searching for one.
    """
    step = autoshard(
        workload.fn,
        mesh,
        donate_argnums=workload.donate_argnums,
        plan=plan,
        partitioner=partitioner,
    )
    plan = step.plan(*arguments)
    leaves = jax.tree.leaves(tuple(arguments))
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # Compiled inside, where XLA's log is read; later calls of the step find it compiled.
    validation = validate(
        plan, lambda: step.compile(*arguments), None if abstract else leaves, repeats=0
    )

    def place(*values: Any) -> Sequence[Any]:
        placed = plan.place(*values)
        return placed if len(values) > 1 else (placed,)

    return Program(plan, step.compile(*arguments).compiled, place, step), validation


def by_hand(workload: Workload, expert: Expert, mesh: Mesh) -> Program:
    """The workload under ``jax.jit`` with the shardings of a hand-made plan.

    Args:
        workload: What to run.
        expert: The hand-made plan.
        mesh: Where; its axes are of the kind ``Auto``.
    """
    pinned = autoshard(
        workload.fn,
        mesh,
        donate_argnums=workload.donate_argnums,
        in_shardings=expert.in_shardings(mesh),
        out_shardings=expert.out_shardings(mesh),
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


def compare(
    workload: Workload,
    mesh: Mesh,
    *,
    run: bool = True,
    partitioner: Partitioner = "xla",
    repeats: int = 20,
    budget_s: float = 60.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda stage: None,
) -> Comparison:
    """Plan, compile, check and time a workload beside its hand-made plans.

    Args:
        workload: What to run.
        mesh: Where; its axes are of the kind ``Auto``.
        run: Whether to run anything; otherwise values are not checked and the clock is left out.
        partitioner: Who writes the program of one device for the workload's own plan.
        repeats: Rounds of timing at most.
        budget_s: Time for the timing [s].
        seed: Of the arguments and of the order of timing.
        say: Called with what is going on.
    """
    say("planning and compiling")
    arguments = workload.init(seed) if run else workload.args
    own, validation = planned(workload, mesh, arguments, partitioner=partitioner)
    programs = {OWN: own}
    for name, expert in workload.experts.items():
        say(f"compiling the hand-made plan {name}")
        programs[name] = by_hand(workload, expert, mesh)
    timings: Mapping[str, Timing] = {}
    if run:
        say(f"timing {len(programs)} programs in turn")
        timings = measure(workload, programs, repeats=repeats, budget_s=budget_s, seed=seed)
    rows = tuple(_row(name, program, timings.get(name)) for name, program in programs.items())
    return Comparison(workload, own.plan, validation, rows[0], rows[1:])


def _row(name: str, program: Program, timing: Timing | None) -> Row:
    read = read_compiled(program.compiled)
    return Row(
        name,
        Figures.of(program.plan.predicted),
        Figures(read.flops, read.collective_bytes, read.peak_bytes),
        Figures(step_s=timing.step_s.median if timing else None),
    )
