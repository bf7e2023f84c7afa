"""Memory of groups of nodes: the rows in which the limit can bind, and what each state uses there.

A row is a time point. Rows that can't bind, that a neighbouring row implies, or in which every
group uses the same as in another row with less room are left out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import Problem, usage_over_time
from autoshard.solvers.contract import Contracted, spread, starts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Holds:
    """Usage that depends on the states of groups.

    Attributes:
        group: Per hold, its group, ascending, ``[H]``; those of one group don't overlap.
        first: Per hold, its first row, ``[H]``.
        end: Per hold, its last row plus one, ``[H]``.
        use_at: Per hold, where the usages of its group's states start in ``uses``, ``[H + 1]``.
        uses: What they use above the least of them [bytes].
        capacity: What each row has room for above the least of all nodes [bytes], ``[R]``.
    """

    group: Ints
    first: Ints
    end: Ints
    use_at: Ints
    uses: Ints
    capacity: Ints


def holds_of(problem: Problem, group: Ints, tied: Contracted) -> Holds:
    """The holds of a problem's groups.

    Args:
        problem: The problem.
        group: Per node, its group; -1 if it has no choice.
        tied: The problem over groups: gives each node's state for each state of its group.
    """
    if problem.usage_limit is None or not len(group):
        nothing = np.zeros(0, np.int64)
        return Holds(nothing, nothing, nothing, np.zeros(1, np.int64), nothing, nothing)
    of_node, begin = tied.maps.lined_up(tied.map_of)
    at = starts(np.array([len(usage) for usage in problem.usages], np.int64))[:-1]
    mine = np.concatenate(problem.usages)[np.repeat(at, np.diff(begin)) + of_node]
    least = np.minimum.reduceat(mine, begin[:-1])
    above = mine - np.repeat(least, np.diff(begin))
    start, stop = problem.intervals.T
    some = np.flatnonzero(
        (group >= 0) & (start < stop) & np.maximum.reduceat(above, begin[:-1]).astype(bool)
    )
    times, usage = usage_over_time(problem, least.tolist())
    capacity = problem.usage_limit - usage
    held, use_at, uses = _summed(
        np.stack(
            [group[some], np.searchsorted(times, start[some]), np.searchsorted(times, stop[some])],
            axis=1,
        ),
        np.diff(begin)[some],
        above[spread(begin[some], np.diff(begin)[some])],
    )
    owner, first, end = held.T
    most = np.maximum.reduceat(uses, use_at[:-1]) if len(uses) else uses
    keep = _binding(first, end, most, capacity)
    place = starts(keep.astype(np.int64))
    first, end, capacity = place[first], place[end], capacity[keep]
    keep = _different(owner, first, end, use_at, uses, capacity)
    place = starts(keep.astype(np.int64))
    return _apart(owner, place[first], place[end], use_at, uses, capacity[keep])


def _summed(keys: Ints, sizes: Ints, uses: Ints) -> tuple[Ints, Ints, Ints]:
    """Equal rows of ``keys`` once, ascending, and the sums of their usages, lined up."""
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    kind = np.empty(len(keys), np.int64)
    kind[order] = np.cumsum(fresh) - 1
    once = order[fresh]
    use_at = starts(sizes[once])
    out = np.zeros(int(use_at[-1]), np.int64)
    np.add.at(out, spread(use_at[kind], sizes), uses)
    return keys[once], use_at, out


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
    group: Ints, first: Ints, end: Ints, use_at: Ints, uses: Ints, capacity: Ints
) -> NDArray[np.bool_]:
    """Of rows in which every state of every group uses the same, the one with the least room.

    Rows are told apart by sums of usages with random weights, modulo 2**64.
    """
    rows, sizes = len(capacity), np.diff(use_at)
    widest = int(sizes.max(initial=0))
    weight = np.random.default_rng(0).integers(1, 1 << 62, (int(group.max(initial=-1)) + 1, widest))
    weighted = uses * weight[np.repeat(group, sizes), spread(np.zeros(len(sizes), np.int64), sizes)]
    sums = np.add.reduceat(weighted, use_at[:-1]) if len(uses) else weighted
    change = np.zeros(rows + 1, np.int64)
    np.add.at(change, first, sums)
    np.subtract.at(change, end, sums)
    look = np.cumsum(change)[:rows]
    order = np.lexsort((capacity, look))
    keep = np.zeros(rows, bool)
    keep[order[np.concatenate([[True], np.diff(look[order]) != 0])] if rows else order] = True
    return keep


def _apart(group: Ints, first: Ints, end: Ints, use_at: Ints, uses: Ints, capacity: Ints) -> Holds:
    """Sum up what overlaps, so that each group has one hold at most in any row."""
    some = np.flatnonzero(first < end)
    crowd = np.bincount(group[some], minlength=1) > 1
    alone = some[np.logical_not(crowd[group[some]])]
    keys = [np.stack([group[alone], first[alone], end[alone]], axis=1)]
    parts = [uses[spread(use_at[alone], np.diff(use_at)[alone])]]
    sizes = [np.diff(use_at)[alone]]
    some = some[crowd[group[some]]]
    bounds = np.flatnonzero(np.diff(group[some], prepend=-1, append=-1)).tolist()
    for a, b in itertools.pairwise(bounds):
        here = some[a:b]
        g, size = int(group[here[0]]), int(use_at[here[0] + 1] - use_at[here[0]])
        edges = np.unique(np.concatenate([first[here], end[here]]))
        change = np.zeros((len(edges), size), np.int64)
        mine = uses[use_at[here][:, None] + np.arange(size)]
        np.add.at(change, np.searchsorted(edges, first[here]), mine)
        np.subtract.at(change, np.searchsorted(edges, end[here]), mine)
        used = np.cumsum(change, axis=0)
        change[0] = 1  # the first is always a change, as is every one that changes something
        fresh = np.flatnonzero(change.any(axis=1))
        held = used[fresh[:-1]].any(axis=1)
        from_, to = edges[fresh[:-1]][held], edges[fresh[1:]][held]
        keys.append(np.stack([np.full(len(from_), g), from_, to], axis=1))
        parts.append(used[fresh[:-1]][held].ravel())
        sizes.append(np.full(len(from_), size))
    key, length = np.concatenate(keys), np.concatenate(sizes)
    order = np.lexsort(key.T[::-1])
    key, lengths = key[order], length[order]
    flat = np.concatenate(parts)[spread(starts(length)[order], lengths)]
    return Holds(key[:, 0], key[:, 1], key[:, 2], starts(lengths), flat, capacity)
