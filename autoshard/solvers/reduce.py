"""Exact reductions: each keeps at least one best choice, and its undo finds it again.

Rules, after Scholz and Eckstein, "Register Allocation for Irregular Architectures" (2002) for the
degree rules, and Larrosa and Schiex, "In the quest of the best form of local consistency for
weighted CSP" (2003) for moving costs: forbidden states go; what an edge charges per row or column
moves to its nodes and empty edges go; states that another never loses to go; a node of degree 0, 1
or 2 is minimised away; a node whose state follows from a neighbour's is merged into it. Nodes with
state-dependent memory are minimised away only where the cheapest state is also the least hungry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.solution import Deadline

_DENSE = 1 << 18
"""Tables up to this many entries are made in one step, larger ones slice by slice."""

_SAMPLE = 16
"""Columns that are looked at before states are compared in full."""

_MOST_STATES = 2000
"""Nodes with more states are not searched for states that another never loses to."""

_MOST_WORK = 4 * 10**8
"""Entries that one elimination may look at."""


def reduce(net: Network, deadline: Deadline) -> None:
    """Apply every rule until none changes anything, or time is up.

    Args:
        net: Shrunk in place.
        deadline: When to stop; the network is a valid one at any time.
    """
    while net.changed and not _over(net, deadline):
        for node in sorted(net.changed):
            if _over(net, deadline):
                return
            if node in net.costs:
                tidy(net, node)
                if len(net.links[node]) > 2 or node in net.segments:
                    drop_dominated(net, node)
        again = _eliminate(net, deadline)
        again |= _merge_tied(net)
        net.changed = again & net.costs.keys()


def _over(net: Network, deadline: Deadline) -> bool:
    return net.impossible or deadline.left_s <= 0


def tidy(net: Network, node: int) -> None:
    """Drop a node's forbidden states and clean its edges, and what that brings about."""
    waiting = [node]
    while waiting and not net.impossible:
        node = waiting.pop()
        for other in list(net.links[node]):
            before = net.costs[other]
            net.normalise(node, other)
            if net.costs[other] is not before and bool((net.costs[other] >= INF).any()):
                waiting.append(other)
        allowed = net.costs[node] < INF
        if not allowed.all():
            waiting.append(node)
            net.restrict(node, allowed)


def drop_dominated(net: Network, node: int) -> None:
    """Drop states that cost no less than another whatever the neighbours do, and use no less."""
    states, links = net.size(node), net.links[node]
    if not 1 < states <= _MOST_STATES or node in net.kept:
        return
    cost = net.costs[node]
    hunger = [part.usage for part in net.segments.get(node, ())]
    key = ("undominated", cost.tobytes(), *(usage.tobytes() for usage in hunger))

    def undominated(*matrices: Ints) -> NDArray[np.bool_]:
        sampled = [net.memo(("sampled",), _sampled_difference, m) for m in matrices]
        distinct = [net.memo(("distinct",), _distinct_columns, m) for m in matrices]
        return _undominated(cost, hunger, distinct, sampled)

    keep = net.memo(key, undominated, *links.values())
    if not keep.all():
        net.restrict(node, keep)


def _undominated(
    cost: Ints, hunger: Sequence[Ints], matrices: Sequence[Ints], sampled: Sequence[Ints]
) -> NDArray[np.bool_]:
    """Which states of a node to keep.

    Args:
        cost: Its costs.
        hunger: What it uses of memory rows.
        matrices: Those of its edges, without repeated columns.
        sampled: Per matrix, how far one row is above another at least.
    """
    keep = np.ones(len(cost), bool)
    above = cost[:, None] - cost[None, :]  # above[s, t]: at least how far s can be above t
    for usage in hunger:
        above = np.where(usage[:, None] <= usage[None, :], above, INF)
    for difference in sampled:
        if not _hopeful(above).any():
            return keep
        above = np.minimum(np.maximum(above + difference, -INF), INF)
    better, worse = np.nonzero(_hopeful(above))
    gain = cost[better] - cost[worse]
    for matrix in matrices:
        better, worse, gain = _never_worse(matrix, better, worse, gain)
    for s, t in zip(better.tolist(), worse.tolist(), strict=True):
        if keep[s]:
            keep[t] = False
    return keep


def _hopeful(above: Ints) -> NDArray[np.bool_]:
    """Pairs of different states of which the first may never lose to the second."""
    hopeful = above <= 0
    np.fill_diagonal(hopeful, False)
    return hopeful


def _sampled_difference(matrix: Ints) -> Ints:
    """``[s, t]``: the most that row s is above row t in a few of the columns."""
    some = matrix[:, :: -(-matrix.shape[1] // _SAMPLE)]
    base = np.where(some < INF, some, 2 * INF)
    worst: Ints = some[:, 0, None] - base[None, :, 0]
    for s, t in zip(some.T[1:], base.T[1:], strict=True):
        np.maximum(worst, s[:, None] - t[None, :], out=worst)
    # Where all samples of t are forbidden, nothing is known.
    return np.maximum(worst, -INF)


def _distinct_columns(matrix: Ints) -> Ints:
    columns, _ = classes(matrix.T)
    return np.ascontiguousarray(matrix[:, columns]) if len(columns) < matrix.shape[1] else matrix


def _never_worse(
    matrix: Ints, first: NDArray[np.intp], second: NDArray[np.intp], gain: Ints
) -> tuple[NDArray[np.intp], NDArray[np.intp], Ints]:
    """Pairs of rows of which the first, ``gain`` added, is above the second in no column.

    Most pairs fail in some of the first columns, and are looked at no further.

    Returns:
        The pairs that are left, and the most that ``gain`` gets to in any column.
    """
    worst = np.full(len(first), -INF)
    count = matrix.shape[1]
    order = np.argsort(np.arange(count) % -(-count // _SAMPLE), kind="stable")
    start, width = 0, _SAMPLE
    while start < count and len(first):
        some = matrix.T[order[start : start + width]]
        # Where the second is forbidden, nothing is worse: such columns don't count.
        base = np.where(some < INF, some, 2 * INF)
        for one, other in zip(some, base, strict=True):
            np.maximum(worst, one[first] - other[second], out=worst)
        left = gain + worst <= 0
        first, second, gain, worst = first[left], second[left], gain[left], worst[left]
        start, width = start + width, 2 * width
    return first, second, np.minimum(np.maximum(gain + worst, -INF), INF)


def classes(matrix: Ints) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Equal rows of a matrix: one row of each kind, and the kind of each row."""
    weights = np.random.default_rng(0).integers(1, 1 << 62, matrix.shape[1])
    _, first, kind = np.unique(matrix @ weights, return_index=True, return_inverse=True)
    if np.array_equal(matrix[first[kind]], matrix):
        return first, kind
    rows = np.arange(len(matrix))  # two different rows share a hash: treat all as different
    return rows, rows


def _eliminate(net: Network, deadline: Deadline) -> set[int]:
    """Minimise away nodes of degree 0 to 2, the cheapest first; returns who changed."""
    seen: set[int] = set()
    net.changed = set()
    heap = [
        (_work(net, node), node)
        for node, row in net.links.items()
        if len(row) <= 2 and node not in net.kept
    ]
    heapq.heapify(heap)
    while not _over(net, deadline):
        while net.changed:
            node = net.changed.pop()
            seen.add(node)
            if node in net.costs and len(net.links[node]) <= 2 and node not in net.kept:
                heapq.heappush(heap, (_work(net, node), node))
        if not heap:
            break
        work, node = heapq.heappop(heap)
        if node not in net.costs or len(net.links[node]) > 2 or work != _work(net, node):
            continue
        neighbours = sorted(net.links[node])
        if node in net.segments:
            if len(neighbours) == 1:
                _transfer(net, node, neighbours[0])
            elif not neighbours:
                _settle(net, node)
        elif not neighbours:
            _fix(net, node)
        elif len(neighbours) == 1:
            _fold(net, node, neighbours[0])
        elif work <= _MOST_WORK:
            _join(net, node, neighbours[0], neighbours[1])
        for other in neighbours:
            if other in net.costs and bool((net.costs[other] >= INF).any()):
                tidy(net, other)
    return seen


def _work(net: Network, node: int) -> int:
    work = net.size(node)
    for other in net.links[node]:
        work *= net.size(other)
    return work


def _fix(net: Network, node: int) -> None:
    """Degree 0: take the cheapest state."""
    state = int(net.costs[node].argmin())

    def undo(states: dict[int, int]) -> None:
        states[node] = state

    net.remove(node, undo)


def _settle(net: Network, node: int) -> None:
    """Degree 0 with memory: take the cheapest state if it is also the least hungry."""
    free = net.costs[node] == 0
    for part in net.segments[node]:
        free &= part.usage == 0
    if free.any():
        net.restrict(node, np.arange(len(free)) == int(free.argmax()))
        _fix(net, node)


def _fold(net: Network, node: int, other: int) -> None:
    """Degree 1: the neighbour pays the best answer to each of its states."""
    cost = net.costs[node]

    def answers(matrix: Ints) -> tuple[NDArray[np.intp], Ints]:
        total = cost[:, None] + matrix
        return total.argmin(axis=0), np.minimum(total.min(axis=0), INF)

    best, least = net.memo(("answers", cost.tobytes()), answers, net.links[node][other])

    def undo(states: dict[int, int]) -> None:
        states[node] = int(best[states[other]])

    net.remove(node, undo)
    net.add_cost(other, least)


def _join(net: Network, node: int, left: int, right: int) -> None:
    """Degree 2: the two neighbours pay the best answer to each pair of their states."""
    cost, from_left, to_right = net.costs[node], net.links[left][node], net.links[node][right]

    def undo(states: dict[int, int]) -> None:
        total = cost + from_left[states[left]] + to_right[:, states[right]]
        states[node] = int(total.argmin())

    net.remove(node, undo)
    joined = net.memo(
        ("joined", cost.tobytes()), lambda a, b: min_plus(a + cost, b), from_left, to_right
    )
    net.add_link(left, right, joined)
    net.normalise(left, right)


def min_plus(left: Ints, right: Ints) -> Ints:
    """``out[a, b] = min over x of left[a, x] + right[x, b]``, clipped to ``INF``.

    Args:
        left: Int64 ``[A, X]``.
        right: Int64 ``[X, B]``.

    Returns:
        Int64 ``[A, B]``.
    """
    if len(left) * right.size > _DENSE:
        rows, row_kind = classes(left)
        columns, column_kind = classes(right.T)
        if len(rows) * len(columns) < len(left) * right.shape[1]:
            return min_plus(left[rows], right[:, columns])[row_kind][:, column_kind]
    out = np.full((len(left), right.shape[1]), INF, np.int64)
    if len(left) * right.size <= _DENSE:
        np.minimum(out, (left[:, :, None] + right[None, :, :]).min(axis=1), out=out)
        return out
    step = np.empty_like(out)
    right = np.ascontiguousarray(right)
    for x in range(len(right)):
        np.add(left[:, x, None], right[x], out=step)
        np.minimum(out, step, out=out)
    return out


def _transfer(net: Network, node: int, other: int) -> None:
    """Degree 1 with memory: merge if each answer is both the cheapest and the least hungry."""
    total = net.costs[node][:, None] + net.links[node][other]
    hunger = sum(part.usage for part in net.segments[node])
    order = np.argsort(hunger, kind="stable")
    best = order[total[order].argmin(axis=0)]
    possible = total < INF
    for part in net.segments[node]:
        least = np.where(possible, part.usage[:, None], INF).min(axis=0)
        if (part.usage[best] > least).any():
            return
    merge(net, node, other, best)


def merge(net: Network, node: int, other: int, state_of: NDArray[np.intp]) -> None:
    """Remove a node whose state follows from a neighbour's.

    Args:
        net: The network.
        node: To be removed.
        other: The neighbour that takes over its costs, edges and memory.
        state_of: The node's state for each state of the neighbour, ``[S_other]``.
    """
    tie = net.links[other][node]
    cost = np.minimum(net.costs[node][state_of] + tie[np.arange(len(tie)), state_of], INF)
    links = {k: matrix for k, matrix in net.links[node].items() if k != other}
    segments = net.segments.get(node, [])

    def undo(states: dict[int, int]) -> None:
        states[node] = int(state_of[states[other]])

    net.remove(node, undo)
    net.add_cost(other, cost)
    for k, matrix in links.items():
        net.add_link(other, k, net.rows(matrix, state_of))
        net.normalise(other, k)
    for part in segments:
        net.add_segment(other, part.first, part.end, part.usage[state_of])


def _merge_tied(net: Network) -> set[int]:
    """Merge nodes into neighbours that leave them one allowed state each; returns who changed."""
    net.changed = set()
    waiting = sorted(net.costs)
    while waiting and not net.impossible:
        node = waiting.pop()
        if node not in net.costs:
            continue
        for other, matrix in net.links[node].items():
            tied = net.memo(("tied",), _tied, matrix)
            if tied is not None and len(net.links[other]) < len(net.links[node]):
                # Where each follows from the other, the one with fewer edges moves.
                back = net.memo(("tied",), _tied, net.links[other][node])
                if back is not None and other not in net.kept:
                    node, other, tied = other, node, back
            if tied is not None and node not in net.kept:
                near = [*net.links[node]]
                merge(net, node, other, tied)
                for k in near:
                    if bool((net.costs[k] >= INF).any()):
                        tidy(net, k)
                waiting.append(other)
                break
    return net.changed


def _tied(matrix: Ints) -> NDArray[np.intp] | None:
    """The one allowed row of each column; None if a column has another number of them."""
    allowed = matrix < INF
    only: NDArray[np.intp] = allowed.argmax(axis=0)
    return only if (allowed.sum(axis=0) == 1).all() else None
