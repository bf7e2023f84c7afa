"""A plan opened again: its program priced anew, to be solved under other wishes.

Everything comes from the plan's :class:`~autoshard.origin.Origin`, so a plan that was loaded from a
file can be argued with like one that was just made. The plan's own decisions are found again among
the choices of the problem; solving starts from them, which changes nothing about what is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.saved import restore
from autoshard.errors import InputError, PlanMismatchError
from autoshard.extract import extract
from autoshard.graph import Graph
from autoshard.interpret import interpret
from autoshard.origin import pack
from autoshard.plan import Means, Plan
from autoshard.plan_parts import OpPlan
from autoshard.planner import decide
from autoshard.pricing import Node, Priced, price, total_seconds
from autoshard.problem import FORBIDDEN, evaluate
from autoshard.program import main_block, normalize, walk
from autoshard.reshard import layouts
from autoshard.shardings import MeshShape, Sharding
from autoshard.solvers import SOLVERS, Progress, Status

Mask = NDArray[np.bool_]

_SAME = 1e-9
"""Relative difference of two totals that were added up in another order, at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Replanner:
    """A plan with its problem.

    Attributes:
        plan: The plan.
        graph: Its program.
        priced: Its problem.
        means: Cost model and solver.
        choices: What the plan chose, per node of the problem; where wishes have changed and it no
            longer can, any choice.
        progress: Called with signs of life from the solver.
    """

    plan: Plan
    graph: Graph
    priced: Priced
    means: Means
    choices: tuple[int, ...]
    progress: Callable[[Progress], None] | None = None

    @classmethod
    def of(cls, plan: Plan, progress: Callable[[Progress], None] | None = None) -> Replanner:
        """Open a plan.

        Raises:
            InputError: It holds no program, rests on a cost model or solver of the caller's own
                that is gone, or was made by a version that priced otherwise.
        """
        if plan.origin is None:
            raise InputError(
                "the plan does not hold the program it was made from",
                fix="use a plan that autoshard(fn, mesh).plan(...) returned, or a saved one",
            )
        if plan.means is None:
            plan.origin.try_out()
        means = plan.means or _restored(plan)
        graph = _graph(plan)
        _check_rules(plan, graph)
        priced = price(graph, plan.mesh, means.cost_model, plan.memory_limit)
        choices = chosen(plan, graph, priced)
        lost = [
            name
            for name, choice in zip(priced.problem.names, choices, strict=True)
            if choice is None
        ]
        complete = tuple(choice or 0 for choice in choices)
        if not lost:
            again, _ = interpret(graph, priced, plan.mesh, means.cost_model, complete)
            here, there = again.predicted, plan.predicted
            if abs(here.step_s - there.step_s) <= _SAME * there.step_s and (
                here.peak_bytes == there.peak_bytes
            ):
                return cls(plan, graph, priced, means, complete, progress)
        raise InputError(
            "the plan means something else under this version than when it was made"
            + (f": {lost[0]} cannot be decided as it was" if lost else ""),
            fix="plan again with this version",
        )

    def again(
        self,
        allowed: Mapping[int, Mask] | None = None,
        apart: Mapping[int, Mask] | None = None,
    ) -> Plan:
        """The best plan under restrictions, found from this one.

        Args:
            allowed: Per node, which of its choices may be made.
            apart: Per edge, which pairs of choices may be made.

        Raises:
            InfeasibleError: There is none.
        """
        problem = self.priced.problem
        costs, matrices = list(problem.costs), list(problem.edge_costs)
        for node, mask in (allowed or {}).items():
            costs[node] = np.where(mask, costs[node], FORBIDDEN)
        for edge, mask in (apart or {}).items():
            matrices[edge] = np.where(mask, matrices[edge], FORBIDDEN)
        problem = replace(problem, costs=tuple(costs), edge_costs=tuple(matrices))
        assert self.plan.origin is not None
        made = decide(
            self.graph,
            replace(self.priced, problem=problem),
            self.means,
            self.plan.solver.solver,
            limit=self.plan.memory_limit,
            time_limit_s=self.plan.origin.time_limit_s,
            hint=self._near(allowed or {}),
            progress=self.progress,
        )
        return replace(made, origin=self.plan.origin, planning_s=made.solver.seconds)

    def alone(self, node: int, choices: Sequence[int]) -> list[int]:
        """What each choice of a node costs while all others stay as they are."""
        problem = self.priced.problem
        total = problem.costs[node].astype(object)  # exact: forbidden entries do not overflow
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            if i == node:
                total = total + matrix[:, choices[j]]
            elif j == node:
                total = total + matrix[choices[i]]
        return [int(cost) for cost in total]

    def _near(self, allowed: Mapping[int, Mask]) -> tuple[int, ...]:
        """The plan's choices, moved to the nearest that are allowed: where solving starts."""
        choices = list(self.choices)
        for node, mask in allowed.items():
            if mask.any() and not mask[choices[node]]:
                cost = self.alone(node, choices)
                choices[node] = min(np.flatnonzero(mask).tolist(), key=lambda s: cost[s])
        return tuple(choices)

    def of_choices(self, choices: tuple[int, ...]) -> Plan | None:
        """The plan that an optimal choice means; None if it exceeds the memory limit.

        Args:
            choices: A choice that is proved cheapest under some restrictions.
        """
        priced, plan = self.priced, self.plan
        made, memory = interpret(self.graph, priced, plan.mesh, self.means.cost_model, choices)
        if plan.memory_limit is not None and memory.peak_bytes > plan.memory_limit:
            return None
        report = replace(
            plan.solver,
            status=Status.OPTIMAL.value,
            gap=0.0,
            objective_s=total_seconds(evaluate(priced.problem, choices).cost),
        )
        return replace(
            made,
            solver=report,
            memory_limit=plan.memory_limit,
            origin=plan.origin,
            means=self.means,
        )

    def wishing(
        self,
        arguments: Mapping[int, Sharding | None] | None = None,
        results: Mapping[int, Sharding | None] | None = None,
    ) -> Replanner:
        """The same program with some pins changed (None: removed), priced anew.

        Raises:
            InputError: A pin cannot be met.
        """
        origin = self.plan.origin
        assert origin is not None
        taken, given = list(origin.arguments), list(origin.results)
        for rows, pins in ((taken, arguments or {}), (given, results or {})):
            for position, pin in pins.items():
                rows[position] = replace(rows[position], pin=pin)
        origin = replace(origin, arguments=tuple(taken), results=tuple(given))
        return self._about(replace(self.plan, origin=origin))

    def giving(self, ties: tuple[tuple[int, int], ...]) -> Replanner:
        """The same program with further arguments donated, as pairs (argument, result)."""
        origin = self.plan.origin
        assert origin is not None
        taken = list(origin.arguments)
        for argument, _ in ties:
            taken[argument] = replace(taken[argument], donated=True)
        origin = replace(origin, arguments=tuple(taken), ties=(*origin.ties, *ties))
        return self._about(replace(self.plan, origin=origin))

    def without_constraints(self, indices: Sequence[int]) -> Replanner:
        """The program without some of its sharding constraints.

        Args:
            indices: Of the constraints, among the ops.
        """
        origin = self.plan.origin
        assert origin is not None
        module = origin.open()
        every = [operation for _, _, operation in walk(main_block(module))]
        for operation in (every[index] for index in indices):
            assert operation.name == "sdy.sharding_constraint"
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
        normalize(module)
        text, whole = pack(module)
        return self._about(replace(self.plan, origin=replace(origin, module=text, whole=whole)))

    def _about(self, plan: Plan) -> Replanner:
        graph = _graph(plan)
        priced = price(graph, plan.mesh, self.means.cost_model, plan.memory_limit)
        choices = tuple(choice or 0 for choice in chosen(self.plan, graph, priced))
        return replace(self, plan=plan, graph=graph, priced=priced, choices=choices)


def _restored(plan: Plan) -> Means:
    """Cost model and solver of a plan that was loaded."""
    assert plan.origin is not None
    if not plan.origin.cost_model:
        raise InputError(
            f"the plan was made with the cost model {plan.cost_model!r}, which is the caller's own "
            "and is not saved with a plan",
            fix="ask the plan while it is alive, or plan again with that cost model",
        )
    name = plan.solver.solver
    if name not in SOLVERS:
        raise InputError(
            f"the plan was made with the solver {name!r}, which is the caller's own",
            fix="ask the plan while it is alive, or plan again with that solver",
        )
    return Means(restore(plan.origin.cost_model), SOLVERS[name])


def _check_rules(plan: Plan, graph: Graph) -> None:
    """Refuse a program that reads otherwise than when the plan was made."""
    try:
        plan.check(graph.signature(), plan.mesh)
    except PlanMismatchError as error:
        raise InputError(
            "the program inside the plan reads otherwise than when the plan was made",
            at=error.at,
            fix="register the same rules (autoshard.register_rule), or plan again",
        ) from error


def _graph(plan: Plan) -> Graph:
    origin = plan.origin
    assert origin is not None
    module = origin.open()
    return extract(module, plan.mesh, origin.arguments, origin.results, origin.ties)


def chosen(plan: Plan, graph: Graph, priced: Priced) -> list[int | None]:
    """Which choice of each node a plan means; None where it means none of them."""
    ops = {op.index: op for op in plan.ops}
    found: list[int | None] = []
    for node in priced.nodes:
        if node.kind == "hub":
            found.append(None)
        elif node.kind == "argument":
            position = graph.arguments.index(node.values[0])
            found.append(_row(node, plan.mesh, (plan.arguments[position].sharding,)))
        else:
            op = ops.get(node.op)
            found.append(None if op is None else _op_row(graph, node, plan.mesh, op))
    _decide_hubs(priced, found)
    return found


def _row(node: Node, mesh: MeshShape, shardings: tuple[Sharding, ...]) -> int | None:
    """The choice that gives a node's values these shardings."""
    rows = _rows(node.layouts, mesh, shardings)
    return int(rows[0]) if len(rows) else None


def _rows(
    columns: tuple[NDArray[np.int64], ...], mesh: MeshShape, shardings: tuple[Sharding, ...]
) -> NDArray[np.int64]:
    if len(columns) != len(shardings):
        return np.zeros(0, np.int64)
    fits = np.ones(len(columns[0]) if columns else 1, np.bool_)
    for ids, sharding in zip(columns, shardings, strict=True):
        fits &= ids == layouts(len(sharding), mesh).index.get(sharding, -1)
    return np.flatnonzero(fits)


def _op_row(graph: Graph, node: Node, mesh: MeshShape, op: OpPlan) -> int | None:
    strategies = node.strategies
    if strategies is None:  # a value that a loop carries
        value = node.values[0]
        results = graph.ops[node.op].results
        position = results.index(value)
        if position >= len(op.results):
            return None
        return _row(node, mesh, (op.results[position],))
    columns = (*strategies.operands, *strategies.results)
    axes = tuple(axes for _, axes in op.factors)
    for row in _rows(columns, mesh, (*op.operands, *op.results)).tolist():
        if (
            tuple(a for a in strategies.factor_axes[row] if a) == axes
            and strategies.reduced[row] == op.reduced
            and bool(strategies.scattered[row]) == (op.partial is not None)
        ):
            return int(row)
    return None


def _decide_hubs(priced: Priced, found: list[int | None]) -> None:
    """Give each hub the choice that is cheapest between its neighbours, which are decided."""
    hubs = {n for n, node in enumerate(priced.nodes) if node.kind == "hub"}
    cost = {n: priced.problem.costs[n].astype(np.float64) for n in hubs}
    for (i, j), matrix in zip(
        priced.problem.edges.tolist(), priced.problem.edge_costs, strict=True
    ):
        if i in hubs:
            cost[i] += matrix[:, found[j] or 0]
        if j in hubs:
            cost[j] += matrix[found[i] or 0]
    for n in hubs:
        found[n] = int(cost[n].argmin())
