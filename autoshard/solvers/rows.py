"""Memory rows of a network: the few time points at which the limit can bind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem, usage_over_time
from autoshard.solvers.memory import least_usages
from autoshard.solvers.network import INF, Network, Segment


def add_memory(net: Network, problem: Problem) -> None:
    """Give a network that no rule has touched yet the memory rows of its problem.

    Args:
        net: Fresh from ``Network.of``.
        problem: A problem with a usage limit.
    """
    assert problem.usage_limit is not None
    least = least_usages(problem)
    times, usage = usage_over_time(problem, least.tolist())
    net.capacity = problem.usage_limit - usage
    net.impossible |= bool((net.capacity < 0).any())
    first = np.searchsorted(times, problem.intervals[:, 0])
    end = np.searchsorted(times, problem.intervals[:, 1])
    for node, (cost, used) in enumerate(zip(problem.costs, problem.usages, strict=True)):
        if first[node] < end[node]:
            above = np.where(cost < FORBIDDEN, used - least[node], 0)
            net.add_segment(node, int(first[node]), int(end[node]), above)
    compact(net)


def compact(net: Network) -> NDArray[np.intp]:
    """Drop rows that can't bind or that another implies, and states that fit no row.

    A row can't bind if the most that its nodes can use fits. A row whose live nodes all live in a
    neighbouring row of no more capacity is implied by that one.

    Returns:
        Which rows are left, by their former positions.
    """
    count = len(net.capacity)
    if not count or net.impossible:
        return np.arange(count)
    most, starts, ends = np.zeros((3, count + 1), np.int64)
    for parts in net.segments.values():
        for part in parts:
            largest = part.usage.max()
            most[part.first] += largest
            most[part.end] -= largest
            starts[part.first] += 1
            ends[part.end] += 1
    keep = np.cumsum(most)[:-1] > net.capacity
    # One way a row is implied by the last row kept before it: nothing has started since.
    for order, opens in ((range(count), starts), (range(count - 1, -1, -1), ends[1:])):
        last, opened = -1, False
        for row in order:
            opened |= bool(opens[row])
            if not keep[row]:
                continue
            if last >= 0 and not opened and net.capacity[row] >= net.capacity[last]:
                keep[row] = False
            else:
                last, opened = row, False
    place = np.concatenate([[0], np.cumsum(keep)])
    net.capacity = net.capacity[keep]
    old, net.segments = net.segments, {}
    for node, parts in old.items():
        moved = [Segment(int(place[p.first]), int(place[p.end]), p.usage) for p in parts]
        net.changed.add(node)
        for part in moved:
            if part.first < part.end:
                net.add_segment(node, part.first, part.end, part.usage)
    for node in list(net.segments):
        too_much = _too_much(net, node)
        if too_much.any():
            net.add_cost(node, np.where(too_much, INF, 0))
    return np.flatnonzero(keep)


def _too_much(net: Network, node: int) -> NDArray[np.bool_]:
    """Which states of a node use more than some row's capacity by themselves."""
    parts = net.segments[node]
    over = np.zeros(net.size(node), bool)
    for part in parts:
        over |= part.usage > net.capacity[part.first : part.end].min()
    return over
