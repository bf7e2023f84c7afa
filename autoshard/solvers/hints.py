"""A choice for one problem as the start for another: a pin, the mesh or the limit has changed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from autoshard.errors import InputError
from autoshard.problem import Problem


def adapted(problem: Problem, choices: Sequence[int], names: Sequence[str] = ()) -> tuple[int, ...]:
    """One strategy per node of a problem, as near to a choice for another as can be.

    Nodes are matched by name where both problems have names, in order where a name is there more
    than once; else by position. A node without a match, or whose strategy does not exist here, gets
    what is cheapest beside those of its neighbours that have one. Nothing says that the result is
    feasible; a solver starts from it.

    Args:
        problem: The problem to start on.
        choices: A strategy index per node of the other problem.
        names: The other problem's node names; empty if it has none.

    Raises:
        InputError: Nodes can be matched neither by name nor by position.
    """
    wanted: list[int | None]
    if names and problem.names:
        if len(names) != len(choices):
            raise InputError(
                f"{len(choices)} choices with {len(names)} names", fix="give one name per choice"
            )
        queues: dict[str, deque[int]] = defaultdict(deque)
        for name, choice in zip(names, choices, strict=True):
            queues[name].append(choice)
        wanted = [queues[name].popleft() if queues[name] else None for name in problem.names]
    elif len(choices) != len(problem.costs):
        raise InputError(
            f"the hint has {len(choices)} choices for {len(problem.costs)} nodes",
            fix="give the choices of a problem with the same nodes, or of one whose nodes have the "
            "same names",
        )
    else:
        wanted = list(choices)
    for node, found in enumerate(wanted):
        if found is not None and not 0 <= found < len(problem.costs[node]):
            wanted[node] = None
    _fill(problem, wanted)
    return tuple(choice or 0 for choice in wanted)


def _fill(problem: Problem, wanted: list[int | None]) -> None:
    """Give each node that has none a strategy, cheapest first beside its decided neighbours."""
    missing = [node for node, choice in enumerate(wanted) if choice is None]
    if not missing:
        return
    beside: dict[int, list[tuple[int, int, bool]]] = {node: [] for node in missing}
    for number, (i, j) in enumerate(problem.edges.tolist()):
        if i in beside:
            beside[i].append((number, j, False))
        if j in beside and i != j:
            beside[j].append((number, i, True))
    for node in missing:
        total = problem.costs[node].astype(np.float64)
        for number, other, turned in beside[node]:
            matrix = problem.edge_costs[number]
            if other == node:
                total += np.diagonal(matrix)
                continue
            choice = wanted[other]
            if choice is not None:
                total += matrix[choice] if turned else matrix[:, choice]
        wanted[node] = int(total.argmin())
