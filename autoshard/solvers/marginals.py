"""What each state of one node costs at best: one exact reduction instead of a solve per state.

The node is kept while all others are reduced away around it, so what is left of its costs are the
least costs of whole choices that contain each of its states.
"""

from __future__ import annotations

import numpy as np

from autoshard.problem import Problem, validate_problem
from autoshard.solvers.eliminate import Elimination, plan_elimination
from autoshard.solvers.network import INF, Network
from autoshard.solvers.reduce import reduce
from autoshard.solvers.solution import Deadline


def marginals(
    problem: Problem, node: int, *, time_limit_s: float
) -> dict[int, tuple[int, ...]] | None:
    """A cheapest choice for each state of a node, whatever the memory limit.

    Args:
        problem: The problem; its usage limit is left out of account.
        node: The node.
        time_limit_s: Time to stop after [s].

    Returns:
        Per state that is allowed at all, a choice that contains it and than which no other such
        choice is cheaper; None if the problem is too hard for reductions, or time ran out.
    """
    validate_problem(problem)
    deadline = Deadline.after(time_limit_s)
    net = Network.of(problem)
    net.kept = frozenset({node})
    reduce(net, deadline)
    if net.impossible:
        return {}
    if deadline.left_s <= 0:
        return None
    buckets = plan_elimination(net)
    if buckets is None:
        return None
    found: dict[int, tuple[int, ...]] = {}
    for position, state in enumerate(net.origin[node].tolist()):
        only = np.where(np.arange(net.size(node)) == position, net.costs[node], INF)
        ran = Elimination.run(net, buckets, deadline, {**net.costs, node: only})
        if ran is None:
            return None
        value, run = ran
        if value < INF:
            found[state] = net.choices(run.best())
    return found
