"""A problem as flat arrays, for searches that touch it millions of times a second.

Tied nodes are one, nodes without a choice are folded into the rest, and what nodes use at least
moves to the memory limit. Costs are float64: exact below 2**53, and a forbidden entry stays so
whatever is added to it; answers of a search are checked against the problem itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import Problem
from autoshard.solvers.contract import Contracted, spread, starts
from autoshard.solvers.holds import holds_of

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Flat:
    """A problem in arrays: G groups of tied nodes that have more than one state.

    Group g has the states ``at[g]`` to ``at[g + 1]``, the links ``link_at[g]`` to
    ``link_at[g + 1]``, one per neighbour, and the holds ``hold_at[g]`` to ``hold_at[g + 1]``, one
    per span of memory rows in which its usage depends on its state.

    Attributes:
        group: Per node, its group; -1 if it has no choice, ``[N]``.
        map_at: Per node, where its states for each state of its group start in ``maps``, ``[N]``.
        maps: Those states; equal ones stand there once.
        offset: What nodes and edges without a choice cost.
        at: First state of each group, ``[G + 1]``.
        costs: Per state, ``[X]``.
        link_at: First link of each group, ``[G + 1]``.
        owner: Per link, the group that it is a link of, ``[L]``.
        near: Per link, the neighbour, ``[L]``.
        own: Per link, where its matrix starts in ``tables``, one row per state of this group,
            ``[L]``.
        far: The same with one row per state of the neighbour, ``[L]``.
        tables: Entries of all different matrices.
        hold_at: First hold of each group, ``[G + 1]``.
        holder: Per hold, the group that it is a hold of, ``[H]``.
        first: Per hold, its first memory row, ``[H]``.
        end: Per hold, its last memory row plus one, ``[H]``.
        use_at: Per hold, where the usages of its group's states start in ``uses``, ``[H + 1]``.
        uses: What they use above the least of them [bytes].
        capacity: What each memory row has room for above the least of all nodes [bytes], ``[R]``.
    """

    group: Places
    map_at: Places
    maps: Places
    offset: float
    at: Places
    costs: Floats
    link_at: Places
    owner: Places
    near: Places
    own: Places
    far: Places
    tables: Floats
    hold_at: Places
    holder: Places
    first: Places
    end: Places
    use_at: Places
    uses: Floats
    capacity: Floats

    @classmethod
    def of(cls, problem: Problem) -> Flat:
        """Flatten a problem that ``validate_problem`` accepts."""
        tied = Contracted.of(problem)
        size = np.diff(tied.at)
        number = np.where(size > 1, np.cumsum(size > 1) - 1, -1)
        costs, offset, pairs, used = _fold(tied, number)
        sizes = size[size > 1]
        table_at, flat_tables = _pack(tied.tables, used)
        ends = pairs.ravel()
        order = np.argsort(ends, kind="stable")
        group = number[tied.group] if len(number) else np.zeros(0, np.int64)
        holds = holds_of(problem, group, tied)
        each = starts(np.array([len(map_) for map_ in tied.maps.maps], np.int64))
        return cls(
            group=group,
            map_at=each[tied.map_of],
            maps=np.concatenate([np.zeros(0, np.int64), *tied.maps.maps]),
            offset=offset,
            at=starts(sizes),
            costs=costs,
            link_at=starts(np.bincount(ends, minlength=len(sizes))),
            owner=ends[order],
            near=pairs[:, ::-1].ravel()[order],
            own=table_at.ravel()[order],
            far=table_at[:, ::-1].ravel()[order],
            tables=flat_tables,
            hold_at=starts(np.bincount(holds.group, minlength=len(sizes))),
            holder=holds.group,
            first=holds.first,
            end=holds.end,
            use_at=holds.use_at,
            uses=holds.uses.astype(np.float64),
            capacity=holds.capacity.astype(np.float64),
        )

    def expand(self, states: Places) -> tuple[int, ...]:
        """The choice of every node that groups in these states stand for."""
        of_group = np.append(states, 0)  # the last one for nodes without a choice
        return tuple(self.maps[self.map_at + of_group[self.group]].tolist())

    def locate(self, choices: Sequence[int]) -> Places:
        """The state of each group that agrees best with a choice of every node."""
        sizes = np.diff(self.at)
        nodes = np.flatnonzero(self.group >= 0)
        counts = sizes[self.group[nodes]]
        same = self.maps[spread(self.map_at[nodes], counts)] == np.repeat(
            np.array(choices, np.int64)[nodes], counts
        )
        agree = np.bincount(spread(self.at[self.group[nodes]], counts), same, len(self.costs))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        best = np.maximum.reduceat(agree, self.at[:-1]) if len(sizes) else agree
        hits = np.flatnonzero(agree == best[owner])
        _, one = np.unique(owner[hits], return_index=True)
        states: Places = hits[one] - self.at[:-1]
        return states

    def cost(self, states: Places) -> float:
        """What groups in these states cost, nodes without a choice included."""
        once = self.owner < self.near
        g, u = self.owner[once], self.near[once]
        links = self.tables[self.own[once] + states[g] * np.diff(self.at)[u] + states[u]]
        return self.offset + float(self.costs[self.at[:-1] + states].sum() + links.sum())

    def usage(self, states: Places) -> Floats:
        """Use of each memory row, above the least of all nodes [bytes], ``[R]``."""
        used = self.uses[self.use_at[:-1] + states[self.holder]]
        rows = len(self.capacity)
        change = np.bincount(self.first, used, rows + 1) - np.bincount(self.end, used, rows + 1)
        return np.cumsum(change)[:rows]


def _fold(tied: Contracted, number: Places) -> tuple[Floats, float, Places, Places]:
    """Costs of groups with a choice, cost of the rest, links between the former, their tables."""
    costs, sizes = tied.costs.copy(), np.diff(tied.at)
    free = number[tied.pairs] >= 0
    both = free.all(axis=1)
    for end in (0, 1):  # the one whose costs take up the table
        there = np.logical_not(both) & (free[:, 0] if end == 0 else np.logical_not(free[:, 0]))
        for k in np.unique(tied.table_of[there]).tolist():
            charge = tied.tables[k][0] if end else tied.tables[k][:, 0]
            at = tied.at[tied.pairs[there & (tied.table_of == k), end]]
            place = at[:, None] + np.arange(len(charge))
            costs += np.bincount(place.ravel(), np.tile(charge, len(at)), len(costs))
    useful = np.array([bool(table.any()) for table in tied.tables], np.bool_)
    some = np.flatnonzero(both)
    some = some[useful[tied.table_of[some]]]
    lone = number < 0
    offset = float(costs[tied.at[:-1][lone]].sum())
    kept = costs[np.repeat(np.logical_not(lone), sizes)]
    return kept, offset, number[tied.pairs[some]].reshape(-1, 2), tied.table_of[some]


def _pack(tables: Sequence[Floats], used: Places) -> tuple[Places, Floats]:
    """Where each table used starts seen from either end, ``[P, 2]``, and the entries of all."""
    place = np.zeros((len(tables), 2), np.int64)
    parts: list[Floats] = []
    size = 0
    for k in np.unique(used).tolist():
        parts += [tables[k].ravel(), tables[k].T.ravel()]
        place[k] = size, size + tables[k].size
        size += 2 * tables[k].size
    return place[used], np.concatenate([*parts, np.zeros(0)])
