"""Memory over time: what each node needs at least, and where the limit can bind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem, usage_over_time
from autoshard.solvers.solution import Shortage


def least_usages(problem: Problem) -> NDArray[np.int64]:
    """Per node, its smallest usage over strategies that are not forbidden by themselves [bytes]."""
    least = [
        int(usage[allowed].min()) if (allowed := cost < FORBIDDEN).any() else int(usage.min())
        for cost, usage in zip(problem.costs, problem.usages, strict=True)
    ]
    return np.array(least, np.int64)


def least_usage_limit(problem: Problem) -> int:
    """A proved lower bound on any usage limit that can be met [bytes].

    The largest sum, over time points, of the least usage of the nodes that live then.
    """
    return int(usage_over_time(problem, least_usages(problem).tolist())[1].max())


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
