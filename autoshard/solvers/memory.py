"""What costs and uses least: bounds that need no search, and where the limit can bind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem, usage_over_time
from autoshard.solvers.solution import Shortage


def least_usages(problem: Problem) -> NDArray[np.int64]:
    """Per node, its smallest usage over strategies that are not forbidden by themselves [bytes]."""
    if not problem.costs:
        return np.zeros(0, np.int64)
    starts = np.cumsum([0, *map(len, problem.costs[:-1])])
    allowed = np.concatenate(problem.costs) < FORBIDDEN
    usages = np.concatenate(problem.usages)
    least = np.minimum.reduceat(np.where(allowed, usages, np.iinfo(np.int64).max), starts)
    some = np.logical_or.reduceat(allowed, starts)
    return np.where(some, least, np.minimum.reduceat(usages, starts))


def least_usage_limit(problem: Problem) -> int:
    """A proved lower bound on any usage limit that can be met [bytes].

    The largest sum, over time points, of the least usage of the nodes that live then.
    """
    return int(usage_over_time(problem, least_usages(problem).tolist())[1].max())


def least_cost(problem: Problem) -> int:
    """A bound on the cost of every choice: the least entries, added up."""
    smallest = {id(matrix): int(matrix.min()) for matrix in problem.edge_costs}
    total = sum(int(cost.min()) for cost in problem.costs)
    return min(FORBIDDEN, total + sum(smallest[id(matrix)] for matrix in problem.edge_costs))


def shortage(problem: Problem, most: int = 10) -> Shortage | None:
    """Where memory is tightest when every node uses as little as it can.

    Args:
        problem: A problem.
        most: How many nodes to name at most.

    Returns:
        The tightest point; None for a problem without a limit.
    """
    if problem.usage_limit is None:
        return None
    least = least_usages(problem)
    times, usage = usage_over_time(problem, least.tolist())
    peak = int(usage.argmax())
    time = int(times[peak])
    live = (problem.intervals[:, 0] <= time) & (time < problem.intervals[:, 1])
    held = np.where(live, least, 0)
    order = [int(n) for n in np.argsort(-held, kind="stable")[:most] if held[n] > 0]
    return Shortage(
        time=time,
        missing=max(0, int(usage[peak]) - problem.usage_limit),
        nodes=tuple(order),
        usages=tuple(int(held[n]) for n in order),
    )
