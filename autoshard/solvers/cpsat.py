"""CP-SAT on what reductions leave, memory rows added only once they are broken.

Each pair matrix becomes flow between the states of its two nodes (the local polytope): its linear
relaxation is the tightest known that stays linear in the size of the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.solution import Deadline

MOST_VARIABLES = 400_000
"""Models with more variables than this are not built: they would not be solved in useful time."""


@dataclass(frozen=True, slots=True)
class CpsatResult:
    """What CP-SAT found for a network.

    Attributes:
        states: The best choice; None if none was found.
        bound: Proved lower bound on the cost, with the network's offset; None if it is proved that
            there is no allowed choice below the given upper bound.
        complete: ``states`` is proved best, or it is proved that there is nothing to find.
    """

    states: dict[int, int] | None
    bound: int | None
    complete: bool


def variables(net: Network) -> int:
    """How many variables a model of the network would have."""
    pairs = sum(
        int((matrix < INF).sum())
        for i, row in net.links.items()
        for j, matrix in row.items()
        if i < j
    )
    return pairs + sum(len(cost) for cost in net.costs.values())


def solve_network(
    net: Network,
    deadline: Deadline,
    *,
    seed: int,
    workers: int,
    most_work: float = float("inf"),
    priced: Sequence[int] = (),
    hint: dict[int, int] | None = None,
    upper: int | None = None,
) -> CpsatResult:
    """Find a cheapest choice that keeps to every memory row.

    Args:
        net: The network.
        deadline: When to stop.
        seed: For the search.
        workers: Threads. One gives the same answer each time; more may end on another of several
            best choices. (OR-Tools 9.15 has a mode that is both, but aborts the process in it when
            given a hint.)
        most_work: Give up after this much work, in CP-SAT's deterministic time, about seconds.
        priced: Memory rows to start with, those that are known to matter.
        hint: States to try first.
        upper: Look for choices below this cost only (the network's offset included).

    Returns:
        The result.
    """
    bound = net.offset
    if variables(net) > MOST_VARIABLES:
        return CpsatResult(None, bound, False)
    model = cp_model.CpModel()
    state = {
        node: [model.new_bool_var("") for _ in range(len(cost))] for node, cost in net.costs.items()
    }
    objective: list[tuple[cp_model.IntVar, int]] = []
    for node, row in state.items():
        model.add_exactly_one(row)
        for var, cost in zip(row, net.costs[node].tolist(), strict=True):
            if cost < INF:
                objective.append((var, cost))
            else:
                model.add(var == 0)
    for i, links in net.links.items():
        for j, matrix in links.items():
            if i < j:
                objective += _add_pair(model, state[i], state[j], matrix)
        if deadline.left_s <= 0:  # building a large model takes a while
            return CpsatResult(None, bound, False)
    objective = [(var, cost) for var, cost in objective if cost]
    total = (
        cp_model.LinearExpr.weighted_sum(*map(list, zip(*objective, strict=True)))
        if (objective)
        else 0
    )
    model.minimize(total)
    if upper is not None:
        if upper - 1 < net.offset:
            return CpsatResult(None, None, True)
        if objective:
            model.add(total <= upper - 1 - net.offset)
    if hint is not None:
        for node, row in state.items():
            for s, var in enumerate(row):
                model.add_hint(var, s == hint[node])
    rows = {row for row in priced if row < len(net.capacity)}
    for row_index in sorted(rows):
        _add_row(model, net, state, row_index)
    best: dict[int, int] | None = None
    while True:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, deadline.left_s)
        solver.parameters.max_deterministic_time = most_work
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = workers
        solver.parameters.linearization_level = 2
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return CpsatResult(best, None, True)
        most_work -= solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CpsatResult(best, bound, False)
        # The solver's bound is a float: step down past its rounding.
        found = solver.best_objective_bound
        bound = max(bound, net.offset + int(np.floor(found - 1 - abs(found) * 1e-12)))
        states = {
            node: next(s for s, var in enumerate(row) if solver.boolean_value(var))
            for node, row in state.items()
        }
        broken = broken_rows(net, states)
        if not len(broken):
            if status == cp_model.OPTIMAL:
                return CpsatResult(states, net.offset + paid(net, states), True)
            return CpsatResult(states, bound, False)
        if deadline.left_s <= 0 or most_work <= 0:
            return CpsatResult(best, bound, False)
        for row_index in _worst_of_runs(broken, states, net):
            if row_index not in rows:
                rows.add(row_index)
                _add_row(model, net, state, row_index)


def paid(net: Network, states: dict[int, int]) -> int:
    """What a choice on a network pays above the network's offset; ``INF`` or more if forbidden."""
    cost = sum(int(net.costs[node][state]) for node, state in states.items())
    for i, links in net.links.items():
        for j, matrix in links.items():
            if i < j:
                cost += int(matrix[states[i], states[j]])
    return cost


def excess(net: Network, states: dict[int, int]) -> Ints:
    """Per memory row, usage above capacity (negative: room) [bytes]."""
    change = np.zeros(len(net.capacity) + 1, np.int64)
    for node, parts in net.segments.items():
        for part in parts:
            used = part.usage[states[node]]
            change[part.first] += used
            change[part.end] -= used
    return np.cumsum(change)[:-1] - net.capacity


def broken_rows(net: Network, states: dict[int, int]) -> list[int]:
    """Memory rows that a choice breaks."""
    return np.flatnonzero(excess(net, states) > 0).tolist()


def _worst_of_runs(broken: list[int], states: dict[int, int], net: Network) -> list[int]:
    """Of each run of neighbouring broken rows, the most broken one."""
    over = excess(net, states)
    chosen: list[int] = []
    for place, row in enumerate(broken):
        if place and broken[place - 1] == row - 1:
            if over[row] > over[chosen[-1]]:
                chosen[-1] = row
        else:
            chosen.append(row)
    return chosen


def _add_row(
    model: cp_model.CpModel, net: Network, state: dict[int, list[cp_model.IntVar]], row: int
) -> None:
    used: list[tuple[cp_model.IntVar, int]] = []
    for node, parts in net.segments.items():
        for part in parts:
            if part.first <= row < part.end:
                used += zip(state[node], part.usage.tolist(), strict=True)
    used = [(var, usage) for var, usage in used if usage]
    model.add(
        cp_model.LinearExpr.weighted_sum(*map(list, zip(*used, strict=True)))
        <= int(net.capacity[row])
    )


def _add_pair(
    model: cp_model.CpModel,
    rows: list[cp_model.IntVar],
    columns: list[cp_model.IntVar],
    matrix: Ints,
) -> list[tuple[cp_model.IntVar, int]]:
    """Flow variables of one pair; returns them with their costs."""
    allowed = matrix < INF
    flow = {
        (int(a), int(b)): model.new_bool_var("") for a, b in zip(*np.nonzero(allowed), strict=True)
    }
    for a, var in enumerate(rows):
        model.add(sum(flow[a, int(b)] for b in np.flatnonzero(allowed[a])) == var)
    for b, var in enumerate(columns):
        model.add(sum(flow[int(a), b] for a in np.flatnonzero(allowed[:, b])) == var)
    return [(var, int(matrix[pair])) for pair, var in flow.items()]
