"""Nodes tied by forbidden entries become one, before a search looks at single moves.

Where every state of one node leaves a neighbour at most one allowed state, the two move together.
Each group of tied nodes is one node of the contracted problem; its state gives the state of every
member. Memory is untouched: a group has the live intervals of all its members.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem

Places = NDArray[np.int64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MOST_ROUNDS = 8


def starts(counts: Places) -> Places:
    """Where parts of these sizes start that stand one after the other, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def spread(first: Places, counts: Places) -> Places:
    """``first[k], first[k] + 1, ...``, as many as ``counts[k]``, for all k in a row."""
    begin = starts(counts)
    return np.repeat(first - begin[:-1], counts) + np.arange(int(begin[-1]))


class Maps:
    """Different maps from the states of a group to those of a node, each under one number."""

    def __init__(self) -> None:
        self.maps: list[Places] = []
        self._number: dict[bytes, int] = {}

    def number(self, map_: Places) -> int:
        """The number of a map; a new one if there was none like it."""
        known = self._number.setdefault(map_.tobytes(), len(self.maps))
        if known == len(self.maps):
            self.maps.append(map_)
        return known

    def lined_up(self, numbers: Places) -> tuple[Places, Places]:
        """Maps with these numbers in a row, and where each starts (with the end of the last)."""
        sizes = np.array([len(m) for m in self.maps], np.int64)
        flat = np.concatenate([np.zeros(0, np.int64), *self.maps])
        counts = sizes[numbers]
        return flat[spread(starts(sizes)[numbers], counts)], starts(counts)


@dataclass(slots=True)
class Contracted:
    """A problem over groups of nodes.

    Attributes:
        group: Per node, its group, ``[N]``.
        map_of: Per node, the number in ``maps`` of its state for each state of its group, ``[N]``.
        maps: Different maps.
        at: First state of each group, and the end, ``[G + 1]``.
        costs: Per state of each group, what it costs, edges inside included; ``FORBIDDEN`` and more
            is forbidden.
        pairs: Linked groups, each pair once, the lower number first, ``[P, 2]``.
        table_of: Per pair, the number of its costs in ``tables``, ``[P]``.
        tables: Different tables, states of the first group by states of the second.
    """

    group: Places
    map_of: Places
    maps: Maps
    at: Places
    costs: Floats
    pairs: Places
    table_of: Places
    tables: list[Floats]

    @classmethod
    def of(cls, problem: Problem) -> Contracted:
        """Contract a problem until nothing is tied."""
        build = _Build(problem)
        for _ in range(_MOST_ROUNDS):
            now = build.filled()
            if not build.merge(now):
                return now
        return build.filled()


class _Build:
    """Shared work: every distinct matrix, map and combination of them is handled once."""

    def __init__(self, problem: Problem) -> None:
        sizes = np.array([len(cost) for cost in problem.costs], np.int64)
        self.node_at = starts(sizes)
        self.costs = np.concatenate([np.zeros(0), *problem.costs])
        place: dict[int, int] = {}
        which = [place.setdefault(id(m), len(place)) for m in problem.edge_costs]
        by_id = {id(m): m for m in problem.edge_costs}
        self.matrices = [by_id[key].astype(np.float64) for key in place]
        self.matrix = np.array(which, np.int64)
        self.edges = problem.edges.reshape(-1, 2)
        self.maps = Maps()
        straight = {size: self.maps.number(np.arange(size)) for size in np.unique(sizes).tolist()}
        self.map_of = np.array([straight[size] for size in sizes.tolist()], np.int64)
        self.group = np.arange(len(sizes))
        self._tables: dict[tuple[tuple[int, int, int, int], ...], Floats] = {}
        self._ties: dict[int, tuple[Floats, _Ties]] = {}

    def filled(self) -> Contracted:
        """Costs and tables of the groups as they are now."""
        group = self.group
        of_node, begin = self.maps.lined_up(self.map_of)
        counts = np.diff(begin)
        sizes = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
        sizes[group] = counts
        at = starts(sizes)
        mine = self.costs[np.repeat(self.node_at[:-1], counts) + of_node]
        costs: Floats = np.zeros(int(at[-1]))
        np.add.at(costs, spread(at[group], counts), mine)
        i, j = self.edges.T
        inside = group[i] == group[j]
        costs += self._inside(np.flatnonzero(inside), at)
        between = np.flatnonzero(np.logical_not(inside))
        pairs, table_of, tables = self._between(between)
        return Contracted(group, self.map_of, self.maps, at, costs, pairs, table_of, tables)

    def _between(self, edges: Places) -> tuple[Places, Places, list[Floats]]:
        """Pairs of groups that some edges link, and the sum of the matrices on each."""
        i, j = self.edges[edges].T
        g, h = self.group[i], self.group[j]
        turned = g > h
        kinds = np.stack([self.matrix[edges], self.map_of[i], self.map_of[j], turned], axis=1)
        _, first, kind = np.unique(_hashes(kinds), return_index=True, return_inverse=True)
        keys = [tuple(key) for key in kinds[first].tolist()]
        low, high = np.minimum(g, h), np.maximum(g, h)
        _, one, pair = np.unique(
            low * (int(high.max(initial=0)) + 1) + high, return_index=True, return_inverse=True
        )
        order = np.argsort(one)  # pairs in the order in which they were met
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        pair, one = rank[pair], one[order]
        table_of = np.empty(len(one), np.int64)
        tables: list[Floats] = []
        number: dict[tuple[int, ...], int] = {}

        def numbered(together: tuple[int, ...]) -> int:
            if together not in number:
                number[together] = len(tables)
                tables.append(self._table(tuple(keys[k] for k in together)))
            return number[together]

        single = np.bincount(pair, minlength=len(one)) == 1
        alone = single[pair]
        of_kind = np.zeros(len(keys), np.int64)
        for k in np.unique(kind[alone]).tolist():
            of_kind[k] = numbered((k,))
        table_of[pair[alone]] = of_kind[kind[alone]]
        several: dict[int, tuple[int, ...]] = {}
        crowded = np.flatnonzero(np.logical_not(alone))
        for p, k in zip(pair[crowded].tolist(), kind[crowded].tolist(), strict=True):
            several[p] = (*several.get(p, ()), k)
        for p, together in several.items():
            table_of[p] = numbered(together)
        return np.stack([low[one], high[one]], axis=1), table_of, tables

    def _table(self, keys: tuple[tuple[int, int, int, int], ...]) -> Floats:
        known = self._tables.get(keys)
        if known is None:
            parts = []
            for matrix, own, other, turned in keys:
                rows, columns = self.maps.maps[own], self.maps.maps[other]
                part = self.matrices[matrix][rows][:, columns]
                parts.append(part.T if turned else part)
            known = parts[0]
            for part in parts[1:]:
                known = known + part
            self._tables[keys] = known
        return known

    def _inside(self, edges: Places, at: Places) -> Floats:
        """Per state of each group, what edges inside groups cost."""
        out: Floats = np.zeros(int(at[-1]))
        if not len(edges):
            return out
        i, j = self.edges[edges].T
        kinds = np.stack([self.matrix[edges], self.map_of[i], self.map_of[j]], axis=1)
        _, first, kind = np.unique(_hashes(kinds), return_index=True, return_inverse=True)
        maps = self.maps.maps
        paid = [self.matrices[m][maps[own], maps[other]] for m, own, other in kinds[first].tolist()]
        sizes = np.array([len(part) for part in paid], np.int64)
        values = np.concatenate(paid)[spread(starts(sizes)[kind], sizes[kind])]
        np.add.at(out, spread(at[self.group[i]], sizes[kind]), values)
        return out

    def ties(self, table: Floats) -> _Ties:
        """What a table forbids and ties."""
        known = self._ties.get(id(table))
        if known is None:
            known = self._ties[id(table)] = (table, _Ties.of(table < FORBIDDEN))
        return known[1]

    def merge(self, now: Contracted) -> bool:
        """Merge tied groups and drop forbidden states; says whether anything changed."""
        groups, sizes = len(now.at) - 1, np.diff(now.at)
        ties = [self.ties(table) for table in now.tables]
        keep = now.costs < FORBIDDEN
        for side in (0, 1):
            idle = np.array([tie.dead[side] is not None for tie in ties], np.bool_)
            some = np.flatnonzero(idle[now.table_of]) if len(ties) else now.table_of
            for p in some.tolist():
                dead = ties[int(now.table_of[p])].dead[side]
                assert dead is not None
                keep[int(now.at[now.pairs[p, side]]) + dead] = False
        kept = np.add.reduceat(keep, now.at[:-1], dtype=np.int64) if groups else sizes
        keep[now.at[:-1][kept == 0]] = True
        fewer = (kept < sizes) & (sizes > 1)
        # Each group follows ``lead``, in the state ``follow`` of the lead's state.
        lead, follow = self._led(now, ties)
        if not follow and not fewer.any():
            return False
        top = np.array(lead, np.int64)
        leads = top == np.arange(groups)
        rank = np.cumsum(leads) - 1
        followed = np.full(groups, -1, np.int64)  # number of the map by which it follows
        for g, map_ in follow.items():
            followed[g] = self.maps.number(map_)
        left = np.full(groups, -1, np.int64)  # number of the map from kept states to all
        for g in np.flatnonzero(fewer & leads).tolist():
            left[g] = self.maps.number(np.flatnonzero(keep[now.at[g] : now.at[g + 1]]))
        group = self.group
        kinds = np.stack([self.map_of, followed[group], left[top[group]]], axis=1)
        _, first, kind = np.unique(_hashes(kinds), return_index=True, return_inverse=True)
        maps = self.maps.maps
        numbers = []
        for own, by, some_left in kinds[first].tolist():
            map_ = maps[own]
            map_ = map_ if by < 0 else map_[maps[by]]
            numbers.append(self.maps.number(map_ if some_left < 0 else map_[maps[some_left]]))
        self.map_of = np.array(numbers, np.int64)[kind]
        self.group = rank[top[group]]
        return True

    def _led(self, now: Contracted, ties: list[_Ties]) -> tuple[list[int], dict[int, Places]]:
        """Per group, whom it follows; the state of each that follows another, for those of it."""
        lead = list(range(len(now.at) - 1))
        follow: dict[int, Places] = {}
        moved: set[int] = set()
        tied_at_all = np.array([tie.rows is not None or tie.columns is not None for tie in ties])
        some = np.flatnonzero(tied_at_all[now.table_of]) if len(ties) else now.table_of
        pairs, tables = now.pairs[some].tolist(), now.table_of[some].tolist()
        for (g, h), table in zip(pairs, tables, strict=True):
            for node, other, tied in ((g, h, ties[table].rows), (h, g, ties[table].columns)):
                if tied is None or lead[node] != node or node in moved:
                    continue
                # ``node`` follows ``other``, which may itself follow; nobody may follow ``node``.
                top = lead[other]
                if top == node:
                    continue
                lead[node], follow[node] = top, tied if top == other else tied[follow[other]]
                moved.add(top)
                break
        return lead, follow


@dataclass(frozen=True, slots=True)
class _Ties:
    """What the forbidden entries of a table say.

    Attributes:
        rows: The row that each column leaves, if at most one each and there is a choice of rows.
        columns: The column that each row leaves, likewise.
        dead: Rows, and columns, without an allowed entry; None if there is none.
    """

    rows: Places | None
    columns: Places | None
    dead: tuple[Places | None, Places | None]

    @classmethod
    def of(cls, allowed: Mask) -> _Ties:
        per_column, per_row = allowed.sum(axis=0), allowed.sum(axis=1)
        rows, columns = allowed.shape
        dead = [
            np.flatnonzero(per == 0) if (per == 0).any() else None for per in (per_row, per_column)
        ]
        return cls(
            rows=allowed.argmax(axis=0) if rows > 1 and (per_column <= 1).all() else None,
            columns=allowed.argmax(axis=1) if columns > 1 and (per_row <= 1).all() else None,
            dead=(dead[0], dead[1]),
        )


def _hashes(rows: Places) -> Places:
    """One number per row of small whole numbers, equal for equal rows alone."""
    out = np.zeros(len(rows), np.int64)
    for column in rows.T:
        low = int(column.min(initial=0))
        _, out = np.unique(
            out * (int(column.max(initial=0)) - low + 1) + column - low, return_inverse=True
        )
    return out
