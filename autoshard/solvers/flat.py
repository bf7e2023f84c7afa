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
from autoshard.solvers.contract import Contracted
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
        maps: Per node, its state for each state of its group.
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
    maps: tuple[Places, ...]
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
        size = np.array([len(cost) for cost in tied.costs], np.int64)
        number = np.where(size > 1, np.cumsum(size > 1) - 1, -1)
        costs, offset, pairs, tables = _fold(tied, number)
        sizes = size[size > 1]
        table_at, flat_tables = _pack(tables)
        ends = pairs.ravel()
        order = np.argsort(ends, kind="stable")
        group = number[tied.group] if len(number) else np.zeros(0, np.int64)
        holds = holds_of(problem, group, tied.maps)
        return cls(
            group=group,
            maps=tuple(tied.maps),
            offset=offset,
            at=_starts(sizes),
            costs=np.concatenate([*costs, np.zeros(0)]),
            link_at=_starts(np.bincount(ends, minlength=len(sizes))),
            owner=ends[order],
            near=pairs[:, ::-1].ravel()[order],
            own=table_at.ravel()[order],
            far=table_at[:, ::-1].ravel()[order],
            tables=flat_tables,
            hold_at=_starts(np.bincount(holds.group, minlength=len(sizes))),
            holder=holds.group,
            first=holds.first,
            end=holds.end,
            use_at=_starts(np.array([len(use) for use in holds.uses], np.int64)),
            uses=np.concatenate([*holds.uses, np.zeros(0)]).astype(np.float64),
            capacity=holds.capacity.astype(np.float64),
        )

    def expand(self, states: Places) -> tuple[int, ...]:
        """The choice of every node that groups in these states stand for."""
        of_group = [*states.tolist(), 0]  # the last one for nodes without a choice
        return tuple(
            int(map_[of_group[g]]) for g, map_ in zip(self.group.tolist(), self.maps, strict=True)
        )

    def locate(self, choices: Sequence[int]) -> Places:
        """The state of each group that agrees best with a choice of every node."""
        agree = np.zeros(len(self.costs), np.int64)
        for g, map_, choice in zip(self.group.tolist(), self.maps, choices, strict=True):
            if g >= 0:
                agree[self.at[g] : self.at[g + 1]] += map_ == choice
        return np.array(
            [int(agree[a:b].argmax()) for a, b in zip(self.at[:-1], self.at[1:], strict=True)],
            np.int64,
        )

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


def _starts(counts: Places) -> Places:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _fold(tied: Contracted, number: Places) -> tuple[list[Floats], float, Places, list[Floats]]:
    """Costs of groups with a choice, cost of the rest, and the links between the former."""
    costs = [cost.copy() for cost in tied.costs]
    offset = 0.0
    pairs, tables = [], []
    for (g, h), table in zip(tied.pairs, tied.tables, strict=True):
        if number[g] >= 0 and number[h] >= 0:
            if table.any():
                pairs.append((number[g], number[h]))
                tables.append(table)
        elif number[g] >= 0:
            costs[g] += table[:, 0]
        else:
            costs[h] += table[0]
    offset = float(sum(cost[0] for cost, k in zip(costs, number, strict=True) if k < 0))
    kept = [cost for cost, k in zip(costs, number, strict=True) if k >= 0]
    return kept, offset, np.array(pairs, np.int64).reshape(-1, 2), tables


def _pack(tables: list[Floats]) -> tuple[Places, Floats]:
    """Where each table starts seen from either end, ``[P, 2]``, and the entries of all."""
    place: dict[int, tuple[int, int]] = {}
    parts: list[Floats] = []
    size = 0
    at = np.empty((len(tables), 2), np.int64)
    for k, table in enumerate(tables):
        if id(table) not in place:
            parts += [table.ravel(), table.T.ravel()]
            place[id(table)] = (size, size + table.size)
            size += 2 * table.size
        at[k] = place[id(table)]
    return at, np.concatenate([*parts, np.zeros(0)])
