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

_MOST_ROUNDS = 8


@dataclass(slots=True)
class Contracted:
    """A problem over groups of nodes.

    Attributes:
        group: Per node, its group, ``[N]``.
        maps: Per node, its state for each state of its group.
        costs: Per group, what each state costs, edges inside included; ``FORBIDDEN`` and more is
            forbidden.
        pairs: Linked groups, each pair once, the lower number first.
        tables: Per pair, its costs; equal ones are one object.
    """

    group: Places
    maps: list[Places]
    costs: list[Floats]
    pairs: list[tuple[int, int]]
    tables: list[Floats]

    @classmethod
    def of(cls, problem: Problem) -> Contracted:
        """Contract a problem until nothing is tied."""
        count = len(problem.costs)
        build = _Build(problem)
        now = cls(np.arange(count), [build.straight(len(c)) for c in problem.costs], [], [], [])
        build.fill(now)
        for _ in range(_MOST_ROUNDS):
            if not build.merge(now):
                break
            build.fill(now)
        return now


class _Build:
    """Shared work: every distinct matrix, map and combination of them is handled once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.matrices = {id(m): m.astype(np.float64) for m in problem.edge_costs}
        self.edges = [
            (i, j, id(m))
            for (i, j), m in zip(problem.edges.tolist(), problem.edge_costs, strict=True)
        ]
        self._straight: dict[int, Places] = {}
        self._maps: dict[bytes, Places] = {}
        self._tables: dict[tuple[tuple[int, int, int, bool], ...], Floats] = {}
        self._ties: dict[int, tuple[Floats, tuple[Places | None, Places | None]]] = {}

    def straight(self, size: int) -> Places:
        if size not in self._straight:
            self._straight[size] = self.shared(np.arange(size))
        return self._straight[size]

    def shared(self, map_: Places) -> Places:
        return self._maps.setdefault(map_.tobytes(), map_)

    def fill(self, now: Contracted) -> None:
        """Sum up costs and tables of the groups."""
        problem = self.problem
        groups = int(now.group.max(initial=-1)) + 1
        costs: list[Floats | None] = [None] * groups
        for cost, g, map_ in zip(problem.costs, now.group.tolist(), now.maps, strict=True):
            mine = cost[map_].astype(np.float64)
            old = costs[g]
            costs[g] = mine if old is None else old + mine
        now.costs = [c for c in costs if c is not None]
        kinds: dict[tuple[int, int], tuple[tuple[int, int, int, bool], ...]] = {}
        where = now.group.tolist()
        maps = now.maps
        by_id = {id(m): m for m in maps}
        for i, j, matrix in self.edges:
            g, h = where[i], where[j]
            if g == h:
                now.costs[g] += self.matrices[matrix][maps[i], maps[j]]
                continue
            if g < h:
                kind, pair = (matrix, id(maps[i]), id(maps[j]), False), (g, h)
            else:
                kind, pair = (matrix, id(maps[i]), id(maps[j]), True), (h, g)
            old_kinds = kinds.get(pair)
            kinds[pair] = (kind,) if old_kinds is None else (*old_kinds, kind)
        now.pairs, now.tables = list(kinds), []
        for key in kinds.values():
            table = self._tables.get(key)
            if table is None:
                table = np.zeros((1, 1))
                for matrix, own, other, turned in key:
                    part = self.matrices[matrix][by_id[own]][:, by_id[other]]
                    table = table + (part.T if turned else part)
                self._tables[key] = table
            now.tables.append(table)

    def ties(self, table: Floats) -> tuple[Places | None, Places | None]:
        """The row each column leaves, if at most one each; the same for rows."""
        known = self._ties.get(id(table))
        if known is None:
            allowed = table < FORBIDDEN
            found = []
            for seen in (allowed, allowed.T):
                tied = bool((seen.sum(axis=0) <= 1).all()) and seen.shape[0] > 1
                found.append(seen.argmax(axis=0) if tied else None)
            known = self._ties[id(table)] = (table, (found[0], found[1]))
        return known[1]

    def merge(self, now: Contracted) -> bool:
        """Merge tied groups and drop forbidden states; says whether anything changed."""
        keep = [np.flatnonzero(c < FORBIDDEN) for c in now.costs]
        dead: dict[int, tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]] = {}
        for (g, h), table in zip(now.pairs, now.tables, strict=True):
            if id(table) not in dead:
                allowed = table < FORBIDDEN
                dead[id(table)] = (
                    table,
                    np.logical_not(allowed.any(axis=1)),
                    np.logical_not(allowed.any(axis=0)),
                )
            _, no_row, no_column = dead[id(table)]
            if no_row.any():
                keep[g] = keep[g][~no_row[keep[g]]]
            if no_column.any():
                keep[h] = keep[h][~no_column[keep[h]]]
        keep = [k if len(k) else np.zeros(1, np.int64) for k in keep]
        changed = any(len(k) < len(c) for k, c in zip(keep, now.costs, strict=True))
        # Each group follows ``lead``, in the state ``follow`` of the lead's state.
        lead = list(range(len(now.costs)))
        follow: dict[int, Places] = {}
        moved: set[int] = set()
        for (g, h), table in zip(now.pairs, now.tables, strict=True):
            rows, columns = self.ties(table)
            for node, other, tied in ((g, h, rows), (h, g, columns)):
                if tied is None or lead[node] != node or node in moved:
                    continue
                # ``node`` follows ``other``, which may itself follow; nobody may follow ``node``.
                top = lead[other]
                if top == node:
                    continue
                lead[node], follow[node] = top, tied if top == other else tied[follow[other]]
                moved.add(top)
                changed = True
                break
        if not changed:
            return False
        number = {g: k for k, g in enumerate(k for k in range(len(lead)) if lead[k] == k)}
        for n, g in enumerate(now.group.tolist()):
            top = lead[g]
            map_ = now.maps[n]
            if top != g:
                map_ = map_[follow[g]]
            if len(keep[top]) < len(now.costs[top]):
                map_ = map_[keep[top]]
            now.maps[n] = self.shared(map_)
            now.group[n] = number[top]
        return True
