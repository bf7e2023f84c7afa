"""Memory of groups of nodes: the rows in which the limit can bind, and what each state uses there.

A row is a time point. Rows that can't bind, that a neighbouring row implies, or in which every
group uses the same as in another row with less room are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import Problem, usage_over_time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Holds:
    """Usage that depends on the states of groups.

    Attributes:
        group: Per hold, its group, ascending, ``[H]``; those of one group don't overlap.
        first: Per hold, its first row, ``[H]``.
        end: Per hold, its last row plus one, ``[H]``.
        uses: Per hold, what each state uses above the least [bytes].
        capacity: What each row has room for above the least of all nodes [bytes], ``[R]``.
    """

    group: Ints
    first: Ints
    end: Ints
    uses: list[Ints]
    capacity: Ints


def holds_of(problem: Problem, group: Ints, maps: Sequence[Ints]) -> Holds:
    """The holds of a problem's groups.

    Args:
        problem: The problem.
        group: Per node, its group; -1 if it has no choice.
        maps: Per node, its state for each state of its group.
    """
    if problem.usage_limit is None or not len(group):
        nothing = np.zeros(0, np.int64)
        return Holds(nothing, nothing, nothing, [], nothing)
    summed: dict[tuple[int, int, int], Ints] = {}
    spans = problem.intervals.tolist()
    least = np.zeros(len(group), np.int64)
    for n, (g, map_, usage) in enumerate(zip(group.tolist(), maps, problem.usages, strict=True)):
        mine = usage[map_]
        least[n] = mine.min()
        start, stop = spans[n]
        if g >= 0 and start < stop:
            above = mine - least[n]
            if above.any():
                key = (g, start, stop)
                summed[key] = summed[key] + above if key in summed else above
    times, usage = usage_over_time(problem, least.tolist())
    capacity = problem.usage_limit - usage
    keys = sorted(summed)
    held = np.array(keys, np.int64).reshape(-1, 3)
    first, end = np.searchsorted(times, held[:, 1]), np.searchsorted(times, held[:, 2])
    uses = [summed[key] for key in keys]
    keep = _binding(first, end, np.array([use.max() for use in uses], np.int64), capacity)
    place = np.concatenate([[0], np.cumsum(keep)])
    first, end, capacity = place[first], place[end], capacity[keep]
    keep = _different(held[:, 0], first, end, uses, capacity)
    place = np.concatenate([[0], np.cumsum(keep)])
    return _apart(held[:, 0], place[first], place[end], uses, capacity[keep])


def _binding(first: Ints, end: Ints, most: Ints, capacity: Ints) -> NDArray[np.bool_]:
    """Which rows can bind and are not implied by a neighbouring one.

    A row is implied by one that all its holds are in too and that has no more room.
    """
    rows = len(capacity)
    rise = np.zeros(rows + 1, np.int64)
    np.add.at(rise, first, most)
    np.subtract.at(rise, end, most)
    keep = (np.cumsum(rise)[:-1] > capacity) | (capacity < 0)
    starts = (np.bincount(first, minlength=rows + 1) > 0).tolist()
    ends = (np.bincount(end, minlength=rows + 1) > 0).tolist()
    room = capacity.tolist()
    for order, opens in ((range(rows), starts), (range(rows - 1, -1, -1), ends[1:])):
        last, opened = -1, False
        for row in order:
            opened |= opens[row]
            if keep[row]:
                if last >= 0 and not opened and room[row] >= room[last]:
                    keep[row] = False
                else:
                    last, opened = row, False
    return keep


def _different(
    group: Ints, first: Ints, end: Ints, uses: Sequence[Ints], capacity: Ints
) -> NDArray[np.bool_]:
    """Of rows in which every state of every group uses the same, the one with the least room.

    Rows are told apart by sums of usages with random weights, modulo 2**64.
    """
    rows = len(capacity)
    sizes = np.array([len(use) for use in uses], np.int64)
    widest = int(sizes.max(initial=0))
    weight = np.random.default_rng(0).integers(1, 1 << 62, (int(group.max(initial=0)) + 1, widest))
    sums = np.zeros(len(uses), np.int64)
    for size in np.unique(sizes).tolist():
        some = np.flatnonzero(sizes == size)
        table = np.stack([uses[k] for k in some.tolist()])
        sums[some] = (table * weight[group[some], :size]).sum(axis=1)
    change = np.zeros(rows + 1, np.int64)
    np.add.at(change, first, sums)
    np.subtract.at(change, end, sums)
    look = np.cumsum(change)[:rows]
    order = np.lexsort((capacity, look))
    keep = np.zeros(rows, bool)
    keep[order[np.concatenate([[True], np.diff(look[order]) != 0])] if rows else order] = True
    return keep


def _apart(group: Ints, first: Ints, end: Ints, uses: Sequence[Ints], capacity: Ints) -> Holds:
    """Sum up what overlaps, so that each group has one hold at most in any row."""
    out: list[tuple[int, int, int, Ints]] = []
    bounds = np.searchsorted(group, np.arange(int(group.max(initial=-1)) + 2)).tolist()
    starts, stops = first.tolist(), end.tolist()
    for g, (a, b) in enumerate(itertools.pairwise(bounds)):
        here = [k for k in range(a, b) if starts[k] < stops[k]]
        if not here:
            continue
        if len(here) == 1:
            out.append((g, starts[here[0]], stops[here[0]], uses[here[0]]))
            continue
        edges = sorted({starts[k] for k in here} | {stops[k] for k in here})
        place = {edge: k for k, edge in enumerate(edges)}
        change = np.zeros((len(edges), len(uses[here[0]])), np.int64)
        for k in here:
            change[place[starts[k]]] += uses[k]
            change[place[stops[k]]] -= uses[k]
        used = np.cumsum(change, axis=0)
        change[0] = 1  # the first is always a change, as is every one that changes something
        fresh = np.flatnonzero(change.any(axis=1)).tolist()
        for k, following in itertools.pairwise(fresh):
            if used[k].any():
                out.append((g, edges[k], edges[following], used[k]))
    found = np.array([row[:3] for row in out], np.int64).reshape(-1, 3)
    return Holds(found[:, 0], found[:, 1], found[:, 2], [row[3] for row in out], capacity)
