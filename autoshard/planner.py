"""From a module to a plan: extract, price, solve, and put the solution into a user's words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any

from jax.extend.mlir import ir

from autoshard.budget import Search
from autoshard.cost_models import COST_MODELS
from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InputError
from autoshard.extract import extract
from autoshard.graph import Graph
from autoshard.interpret import interpret
from autoshard.memory import Footprint
from autoshard.origin import Origin
from autoshard.plan import Means, Plan
from autoshard.plan_parts import SolverReport
from autoshard.pricing import Priced, price, total_seconds
from autoshard.program import Boundary, normalize
from autoshard.shardings import MeshShape
from autoshard.solvers import SOLVERS, Progress, Solver
from autoshard.unknown import warn_of_unknown_ops


def plan_module(
    module: ir.Module,
    arguments: Sequence[Boundary],
    results: Sequence[Boundary],
    mesh: MeshShape,
    *,
    ties: Sequence[tuple[int, int]] = (),
    memory_limit: int | None = None,
    cost_model: CostModel | str = "cpu",
    solver: Solver | str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Choose a sharding for every argument, result and op of a lowered module.

    Args:
        module: A StableHLO module as JAX lowers it, without shardings; it is normalized in place.
        arguments: The caller's view of each argument of ``main``.
        results: The caller's view of each result of ``main``.
        mesh: The mesh to run on.
        ties: Pairs (argument position, result position) that share a buffer.
        memory_limit: What one device may hold at its peak [bytes]; None takes the cost model's.
        cost_model: A cost model or the name of one.
        solver: A solver or the name of one; None for the exact one.
        time_limit_s: Time the solver may take [s].
        progress: Called with signs of life from the solver.

    Raises:
        InfeasibleError: No plan fits the memory limit; says what is needed at least, and where.
        InputError: A pin or option that cannot be met.
    """
    start = time.perf_counter()
    if memory_limit is not None and not _at_least(memory_limit, 1):
        raise InputError(
            f"a memory limit of {memory_limit!r} is no number of bytes",
            fix="give the bytes that one device may use, e.g. memory_limit=16 * 2**30",
        )
    if not _at_least(time_limit_s, 0) or not time_limit_s:
        raise InputError(
            f"a time limit of {time_limit_s!r} is no positive number of seconds",
            fix="give time_limit_s in seconds, e.g. time_limit_s=60.0",
        )
    if progress is not None and not callable(progress):
        raise InputError(
            f"progress is a {type(progress).__name__}",
            fix="give a function that takes an autoshard.solvers.Progress",
        )
    model = COST_MODELS[cost_model]() if isinstance(cost_model, str) else cost_model
    chosen, label = _solver(solver)
    given = model.memory_bytes if memory_limit is None else memory_limit
    limit = None if given is None else int(given)
    clock = _Clock()
    with clock.stage("normalize"):
        normalize(module)
        origin = Origin.of(module, arguments, results, ties, model, time_limit_s)
    with clock.stage("extract"):
        graph = extract(module, mesh, arguments, results, ties)
    with clock.stage("price"):
        priced = price(graph, mesh, model, limit)
    plan = decide(
        graph,
        priced,
        Means(model, chosen),
        label,
        limit=limit,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    warn_of_unknown_ops(graph, plan)
    return replace(
        plan,
        planning_s=time.perf_counter() - start,
        origin=origin,
        stages=(*clock.spent_s.items(), *plan.stages),
    )


def decide(
    graph: Graph,
    priced: Priced,
    means: Means,
    label: str,
    *,
    limit: int | None,
    time_limit_s: float,
    hint: tuple[int, ...] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Solve a priced problem and say what the solution means.

    Args:
        graph: The program.
        priced: The problem.
        means: The cost model that priced it, and the solver.
        label: Name of the solver.
        limit: What one device may hold [bytes]; None for no limit.
        time_limit_s: Time the solver may take [s].
        hint: A choice to start from; it does not change what is proved.
        progress: Called with signs of life from the solver.

    Raises:
        InfeasibleError: No plan fits; says what is needed at least, and where.
    """
    mesh, model = priced.resharder.mesh, means.cost_model
    clock = _Clock()

    def interpreted(choices: Sequence[int]) -> tuple[Plan, Footprint]:
        with clock.stage("interpret"):
            return interpret(graph, priced, mesh, model, choices)

    with clock.stage("solve"):
        plan, solution = Search(
            graph=graph,
            priced=priced,
            interpret=interpreted,
            solver=means.solver,
            limit=limit,
            time_limit_s=time_limit_s,
            hint=hint,
            progress=progress,
        ).run()
    report = SolverReport(
        solver=label,
        status=solution.status.value,
        gap=solution.gap if math.isfinite(solution.gap) else None,
        objective_s=total_seconds(solution.cost),
        nodes=len(priced.nodes),
        edges=len(priced.problem.edges),
        seconds=solution.seconds,
    )
    return replace(
        plan,
        solver=report,
        memory_limit=limit,
        means=means,
        stages=tuple(clock.spent_s.items()),
    )


class _Clock:
    """What time each stage takes, without that of stages inside it."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.spent_s.setdefault(name, 0.0)
        before, start = sum(self.spent_s.values()), time.perf_counter()
        try:
            yield
        finally:
            inside = sum(self.spent_s.values()) - before
            self.spent_s[name] += time.perf_counter() - start - inside


def _solver(solver: Solver | str | None) -> tuple[Solver, str]:
    if solver is None or isinstance(solver, str):
        name = solver or "exact"
        return SOLVERS[name], name
    if not isinstance(solver, Solver):
        raise InputError(
            f"{solver!r} is not a solver",
            fix="pass a name or an object with the method solve of autoshard.solvers.Solver",
        )
    return solver, type(solver).__name__


def _at_least(value: Any, least: float) -> bool:
    """Whether a value from outside is a finite number that is large enough."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= least
