"""Memory rows of a network: the few time points at which the limit can bind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem, usage_over_time
from autoshard.solvers.memory import least_usages
from autoshard.solvers.network import INF, Ints, Network, Segment


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time points of a problem at which its usage can change, and who lives at each.

    Attributes:
        problem: A problem with a usage limit.
        least: Per node, its smallest usage over allowed strategies [bytes].
        capacity: Per time point, what is left of the limit when every node uses its least [bytes].
        first: Per node, the first time point at which it lives.
        end: Per node, one past the last.
    """

    problem: Problem
    least: Ints
    capacity: Ints
    first: NDArray[np.intp]
    end: NDArray[np.intp]

    @classmethod
    def of(cls, problem: Problem) -> Timeline:
        """The time points of a problem with a usage limit."""
        assert problem.usage_limit is not None
        least = least_usages(problem)
        times, usage = usage_over_time(problem, least.tolist())
        return cls(
            problem=problem,
            least=least,
            capacity=problem.usage_limit - usage,
            first=np.searchsorted(times, problem.intervals[:, 0]),
            end=np.searchsorted(times, problem.intervals[:, 1]),
        )

    def excess(self, choices: Sequence[int]) -> Ints:
        """Per time point, usage above the limit (negative: room) [bytes]."""
        change = np.zeros(len(self.capacity) + 1, np.int64)
        used = [int(use[choice]) for use, choice in zip(self.problem.usages, choices, strict=True)]
        above = np.where(self.first < self.end, np.array(used, np.int64) - self.least, 0)
        np.add.at(change, self.first, above)
        np.subtract.at(change, self.end, above)
        over: Ints = np.cumsum(change)[:-1] - self.capacity
        return over

    def broken(self, choices: Sequence[int], most: int, *, room: int = 0) -> tuple[int, ...]:
        """Time points at which a choice uses too much, the worst first, none near another.

        Args:
            choices: One strategy per node.
            most: How many to name at most.
            room: Name those too at which less than this is free [bytes].
        """
        over = self.excess(choices) + room
        apart = len(over) // (8 * most)
        found: list[int] = []
        while len(found) < most and int(over.max(initial=0)) > 0:
            worst = int(over.argmax())
            found.append(worst)
            over[max(0, worst - apart) : worst + apart + 1] = 0
        return tuple(found)

    def give(self, net: Network, points: Sequence[int]) -> None:
        """Give a network that no rule has touched yet memory rows for some time points.

        Choices on the network with only some of the rows cost no more than those with all.

        Args:
            net: Fresh from ``Network.of``.
            points: Time points, ascending.
        """
        net.capacity = self.capacity[np.array(points, np.intp)]
        net.impossible |= bool((net.capacity < 0).any())
        first, end = np.searchsorted(points, self.first), np.searchsorted(points, self.end)
        for node in np.flatnonzero(first < end).tolist():
            allowed = self.problem.costs[node] < FORBIDDEN
            above = np.where(allowed, self.problem.usages[node] - self.least[node], 0)
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
