"""A cost network that exact reductions shrink, with the trail that leads back.

Costs are int64 and never negative: minima move to a running ``offset``. ``INF`` marks what is
forbidden; sums of up to fifteen terms stay within int64, and every stored result is clipped to
``INF``, so a forbidden entry stays forbidden and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.problem import FORBIDDEN, Problem

Ints = NDArray[np.int64]
R = TypeVar("R")

INF = 1 << 59
"""Cost of what is forbidden; above every sum of allowed costs (checked when a network is made)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that depends on a node's state, over a run of memory rows.

    Attributes:
        first: First row.
        end: One past the last row.
        usage: Usage per state above the least [bytes].
    """

    first: int
    end: int
    usage: Ints


Undo = Callable[[dict[int, int]], None]
"""Completes a choice: reads the states of nodes that are left, writes that of one removed."""


@dataclass(slots=True)
class Network:
    """Nodes with cost vectors, at most one cost matrix per pair, memory rows with capacities.

    Attributes:
        costs: Cost per state of each node that is left.
        links: ``links[i][j]`` is the matrix of pair (i, j), states of i by states of j; the same
            data stands in ``links[j][i]``, transposed.
        offset: What any choice pays on top.
        capacity: What the nodes' segments may add up to, per memory row [bytes].
        segments: State-dependent memory of each node; nodes without are missing.
        impossible: Some node has no state left, or a row has no room.
        kept: Nodes that no rule takes out and whose allowed states no rule drops.
        changed: Nodes that changed since a rule last looked at them.
        trail: How to complete a choice, oldest first.
        origin: Per node that is left, the index each state has in the problem.
    """

    costs: dict[int, Ints] = field(default_factory=dict)
    links: dict[int, dict[int, Ints]] = field(default_factory=dict)
    offset: int = 0
    capacity: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    impossible: bool = False
    kept: frozenset[int] = frozenset()
    changed: set[int] = field(default_factory=set)
    trail: list[Undo] = field(default_factory=list)
    origin: dict[int, NDArray[np.intp]] = field(default_factory=dict)
    _shared: set[int] = field(default_factory=set)
    _memo: dict[tuple[object, ...], tuple[object, object]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, *, again: bool = False) -> Network:
        """The network of a problem, without its memory limit.

        Args:
            problem: The problem.
            again: Copies of it will be reduced more than once: what is made of its matrices is kept
                for all of them.

        Raises:
            InputError: Costs are so large that their sum could not be told from ``INF``.
        """
        net = cls()
        spread = 0
        for node, cost in enumerate(problem.costs):
            low, high, vector = _clean(cost)
            net.impossible |= bool((vector >= INF).all())
            net.offset += low
            spread += high
            net.costs[node], net.links[node] = vector, {}
            net.origin[node] = np.arange(len(vector))
        cleaned: dict[int, tuple[int, int, Ints]] = {}
        uses: dict[int, int] = {}
        for matrix in problem.edge_costs:
            uses[id(matrix)] = uses.get(id(matrix), 0) + 1
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            if id(matrix) not in cleaned:
                cleaned[id(matrix)] = _clean(matrix)
                if again or uses[id(matrix)] > 1:
                    net._share(cleaned[id(matrix)][2])
            low, high, clean = cleaned[id(matrix)]
            net.offset += low
            spread += high
            if i == j:
                net.add_cost(i, np.ascontiguousarray(clean.diagonal()))
            else:
                net.add_link(i, j, clean)
        if spread >= INF:
            raise InputError(
                f"costs span {spread}, more than can be summed exactly ({INF - 1})",
                fix="count costs in a larger unit (whole microseconds, not picoseconds)",
            )
        net.changed.update(net.costs)
        return net

    def copy(self, *, apart: bool = False) -> Network:
        """The same, to be changed by itself.

        Args:
            apart: What will be made of matrices goes with the copy; else both know it from then on.
        """
        return Network(
            costs=dict(self.costs),
            links={node: dict(row) for node, row in self.links.items()},
            offset=self.offset,
            capacity=self.capacity.copy(),
            segments={node: list(parts) for node, parts in self.segments.items()},
            impossible=self.impossible,
            kept=self.kept,
            changed=set(self.changed),
            trail=list(self.trail),
            origin=dict(self.origin),
            _shared=set(self._shared) if apart else self._shared,
            _memo=dict(self._memo) if apart else self._memo,
        )

    def complete(self, states: dict[int, int]) -> dict[int, int]:
        """Follow the trail back: states of all nodes from states of those that are left."""
        full = dict(states)
        for undo in reversed(self.trail):
            undo(full)
        return full

    def choices(self, states: dict[int, int]) -> tuple[int, ...]:
        """One strategy per node of the problem, from states of those that are left."""
        full = self.complete(states)
        return tuple(full[node] for node in range(len(full)))

    def locate(self, choices: Sequence[int]) -> dict[int, int]:
        """The states nearest to a choice of the problem: its own where they are left."""
        states = {}
        for node, origin in self.origin.items():
            found = np.flatnonzero(origin == choices[node])
            states[node] = int(found[0]) if len(found) else int(self.costs[node].argmin())
        return states

    def size(self, node: int) -> int:
        """How many states a node has left."""
        return len(self.costs[node])

    def add_cost(self, node: int, cost: Ints) -> None:
        """Add to a node's costs; what all states share moves to the offset."""
        total = np.minimum(self.costs[node] + cost, INF)
        low = int(total.min())
        if low >= INF:
            self.impossible = True
        elif low:
            self.offset += low
            total = np.where(total < INF, total - low, INF)
        self.costs[node] = total
        self.changed.add(node)

    def add_link(self, i: int, j: int, matrix: Ints) -> None:
        """Add a matrix to the pair (i, j)."""
        if j in self.links[i]:
            matrix = self.memo(("sum",), _sum, self.links[i][j], matrix)
        self.set_link(i, j, matrix)

    def set_link(self, i: int, j: int, matrix: Ints) -> None:
        """Replace the matrix of the pair (i, j)."""
        self.links[i][j], self.links[j][i] = matrix, self._transposed(matrix)
        self.changed.update((i, j))

    def drop_link(self, i: int, j: int) -> None:
        """Remove the pair (i, j)."""
        del self.links[i][j], self.links[j][i]
        self.changed.update((i, j))

    def remove(self, node: int, undo: Undo) -> None:
        """Take a node out; its costs must have been handed on."""
        for other in list(self.links[node]):
            self.drop_link(node, other)
        del self.costs[node], self.links[node], self.origin[node]
        self.segments.pop(node, None)
        self.changed.discard(node)
        self.trail.append(undo)

    def restrict(self, node: int, keep: NDArray[np.bool_]) -> None:
        """Keep some states of a node only."""
        kept = np.flatnonzero(keep)
        if not len(kept):
            self.impossible = True
            return

        def undo(states: dict[int, int]) -> None:
            states[node] = int(kept[states[node]])

        self.trail.append(undo)
        self.origin[node] = self.origin[node][kept]
        self.costs[node] = self.costs[node][kept]
        self.add_cost(node, np.zeros(len(kept), np.int64))
        for other, matrix in list(self.links[node].items()):
            self.set_link(node, other, self.rows(matrix, kept))
        if node in self.segments:
            parts = self.segments.pop(node)
            for part in parts:
                self.add_segment(node, part.first, part.end, part.usage[kept])

    def add_segment(self, node: int, first: int, end: int, usage: Ints) -> None:
        """Let a node use memory over rows ``first`` to ``end``; what all states share is taken."""
        low = int(usage.min())
        if low:
            self.capacity[first:end] -= low
            self.impossible |= bool((self.capacity[first:end] < 0).any())
            usage = usage - low
        if not usage.any():
            return
        parts = self.segments.setdefault(node, [])
        for index, part in enumerate(parts):
            if (part.first, part.end) == (first, end):
                del parts[index]
                if not parts:
                    del self.segments[node]
                self.add_segment(node, first, end, part.usage + usage)
                return
        parts.append(Segment(first, end, usage))

    def rows(self, matrix: Ints, chosen: NDArray[np.intp]) -> Ints:
        """Some rows of a matrix."""
        return self.memo(
            ("rows", chosen.tobytes()), lambda m: np.ascontiguousarray(m[chosen]), matrix
        )

    def normalise(self, i: int, j: int) -> None:
        """Move what an edge charges whole rows and columns to its nodes; drop it if empty."""
        matrix = self.links[i][j]
        rows, columns, rest = self.memo(("normal",), self._normal, matrix)
        if rest is None:
            self.drop_link(i, j)
        elif rest is not matrix:
            self.set_link(i, j, rest)
        if rows is not None:
            self.add_cost(i, rows)
        if columns is not None:
            self.add_cost(j, columns)

    def memo(self, key: tuple[object, ...], make: Callable[..., R], *matrices: Ints) -> R:
        """``make(*matrices)``, made once for matrices that many edges share.

        What is made of shared matrices is shared itself, so that what repeated layers have in
        common stays one object however often it was changed, and is changed once.

        Args:
            key: All that the outcome depends on besides the matrices.
            make: Makes it.
            *matrices: What it is made of.
        """
        ids = tuple(map(id, matrices))
        if not self._shared.issuperset(ids):
            return make(*matrices)
        full = key + ids
        known = self._memo.get(full)
        if known is None:
            made = make(*matrices)
            for part in made if isinstance(made, tuple) else (made,):
                if isinstance(part, np.ndarray) and part.ndim == 2:
                    self._share(part)
            known = self._memo[full] = (matrices, made)
        result: R = known[1]  # type: ignore[assignment]
        return result

    def _share(self, matrix: Ints) -> None:
        """Note that a matrix stands on many edges (and keep it, so its id stays its own)."""
        self._shared.add(id(matrix))
        self._memo.setdefault(("kept", id(matrix)), ((matrix,), None))

    def _transposed(self, matrix: Ints) -> Ints:
        if id(matrix) not in self._shared:
            return matrix.T
        turned: Ints = self.memo(("transposed",), np.transpose, matrix)
        self._memo.setdefault(("transposed", id(turned)), ((turned,), matrix))
        return turned

    @staticmethod
    def _normal(matrix: Ints) -> tuple[Ints | None, Ints | None, Ints | None]:
        """What rows and columns charge, and the rest; None for what is all zero."""
        rows: Ints | None = matrix.min(axis=1)
        rest = matrix
        if rows is not None and rows.any():
            rest = np.where(rest < INF, rest - rows[:, None], INF)
        else:
            rows = None
        columns: Ints | None = rest.min(axis=0)
        # A column is INF where every row that has a way out forbids it, or no row has one.
        if columns is not None and columns.any():
            rest = np.where(rest < INF, rest - columns, INF)
        else:
            columns = None
        return rows, columns, rest if rest.any() else None


def _sum(first: Ints, second: Ints) -> Ints:
    total: Ints = np.minimum(first + second, INF)
    return total


def _clean(values: Ints) -> tuple[int, int, Ints]:
    """The least allowed cost, how far the largest is above it, and all costs above it."""
    low, high = int(values.min()), int(values.max())
    if high < FORBIDDEN:
        return low, high - low, values - low
    allowed = values < FORBIDDEN
    if not allowed.any():
        return 0, 0, np.full_like(values, INF)
    low = int(values[allowed].min())
    high = int(values[allowed].max()) - low
    return low, high, np.where(allowed, values - low, INF)
