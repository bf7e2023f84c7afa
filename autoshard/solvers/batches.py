"""Nodes of a network that look alike, side by side in arrays, so that one visit serves them all.

Repeated layers of a program give nodes with equal matrices on their edges. Such nodes, where none
is linked to another, make a batch: visiting them together is visiting them one after another, since
none sees what another moved. How many batches there are does not depend on how often a layer is
repeated. Edges keep their matrices as they are and have a message at each end instead; matrices
with equal rows or columns are held once per kind of row and column.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.reduce import classes

FORBIDDEN_FROM = INF >> 1
"""Sums of a forbidden entry and messages are at least this, all others less."""

_CHUNK = 1 << 18  # entries that one step looks at
_TERMS = 8  # sums of this many terms of up to INF stay far from the end of int64


Whole = TypeVar("Whole", int, Ints)


def scaled(values: Whole, shift: int) -> Whole:
    """Whole numbers times two to the power of ``shift``, rounded down."""
    return values << shift if shift >= 0 else values >> -shift


class _Kinds(NamedTuple):
    """Columns in order of their kind, and where each kind starts."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A cost matrix as seen from one end of an edge, one row and column of each kind.

    Attributes:
        core: Scaled costs, kinds of columns by kinds of rows ``[C, R]``.
        row_kind: Kind of each row; None: each is of its own kind, in order.
        column_kind: Kind of each column.
        columns: Where columns of each kind are; None: each is of its own kind, in order.
    """

    core: Ints
    row_kind: NDArray[np.intp] | None
    column_kind: NDArray[np.intp]
    columns: _Kinds | None

    @classmethod
    def of(cls, matrix: Ints, shift: int) -> Matrix:
        """Find the kinds of rows and columns."""
        rows, row_kind = classes(matrix)
        columns, column_kind = classes(matrix.T)
        part = matrix[np.ix_(rows, columns)]
        core = np.ascontiguousarray(np.where(part >= INF, INF, scaled(part, shift)).T)
        same = _in_order(row_kind)
        if same:
            core = np.ascontiguousarray(core[:, row_kind])
        if _in_order(column_kind):
            core = np.ascontiguousarray(core[column_kind])
            return cls(core, None if same else row_kind, np.arange(len(core)), None)
        order = np.argsort(column_kind, kind="stable")
        starts = np.searchsorted(column_kind[order], np.arange(len(columns)))
        return cls(core, None if same else row_kind, column_kind, _Kinds(order, starts))

    def least(self, theirs: Ints) -> Ints:
        """Per row, the least entry when each column charges something on top.

        Args:
            theirs: What columns charge at the other end of each of n edges, ``[n, T]``.

        Returns:
            ``[n, S]``.
        """
        if self.columns is not None:
            theirs = np.minimum.reduceat(theirs[:, self.columns.order], self.columns.starts, axis=1)
        count, kinds = len(theirs), self.core.shape[1]
        step = max(1, _CHUNK // max(1, count * kinds))
        charged = np.ascontiguousarray(theirs.T)
        low: Ints | None = None
        for first in range(0, len(self.core), step):
            some = slice(first, first + step)
            part = (self.core[some, None, :] + charged[some, :, None]).min(axis=0)
            low = part if low is None else np.minimum(low, part, out=low)
        assert low is not None
        return low if self.row_kind is None else low[:, self.row_kind]

    def column(self, states: NDArray[np.int64]) -> Ints:
        """The columns of the states at the other end of each of n edges, ``[n, S]``."""
        found = self.core[self.column_kind[states]]
        return found if self.row_kind is None else found[:, self.row_kind]


@dataclass(frozen=True, slots=True)
class Link:
    """The n edges in one place of all the nodes of a batch.

    Attributes:
        matrix: Their costs.
        own: Messages at this end, ``[n, S]``; a view.
        far: Places of the messages at the other ends among all messages, ``[n, T]``.
        who: Places of the nodes at the other ends in the order of the sweeps, ``[n]``.
        ahead: Whether those come later in that order, ``[n]``.
    """

    matrix: Matrix
    own: Ints
    far: NDArray[np.int64]
    who: NDArray[np.int64]
    ahead: NDArray[np.bool_]

    def lows(self, messages: Ints) -> Ints:
        """Per state, the least that the edges charge, ``[n, S]``."""
        low = self.matrix.least(messages[self.far])
        low = low + self.own
        low[low >= FORBIDDEN_FROM] = INF
        return low

    def at(self, messages: Ints, chosen: NDArray[np.int64]) -> Ints:
        """Per state, what the edges charge with the other ends as chosen, ``[n, S]``."""
        states = chosen[self.who]
        theirs = messages[self.far[np.arange(len(states)), states]]
        charged = self.matrix.column(states) + self.own + theirs[:, None]
        charged[charged >= FORBIDDEN_FROM] = INF
        return charged


@dataclass(frozen=True, slots=True)
class Batch:
    """Nodes that look alike.

    Attributes:
        nodes: Their numbers in the network.
        start: Place of the first of them in the order of the sweeps.
        costs: What they charge, ``[n, S]``.
        floors: Per node and state, the best bound on choices with that state, ``[n, S]``.
        links: Their edges.
        others: Per link, the nodes at the other ends.
    """

    nodes: tuple[int, ...]
    start: int
    costs: Ints
    floors: Ints
    links: tuple[Link, ...]
    others: tuple[tuple[int, ...], ...]

    def sum_of(self, charges: list[Ints]) -> Ints:
        """What nodes charge, and their edges; forbidden where one of them forbids it."""
        total = self.costs.copy()
        for count, charge in enumerate(charges, 1):
            total += charge
            if count % _TERMS == 0:
                np.minimum(total, INF, out=total)
        return np.minimum(total, INF, out=total)

    def shares(self, forward: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Into how many shares each node divides what it charges, and how many it gives away."""
        ahead = np.zeros(len(self.nodes), np.int64)
        for link in self.links:
            ahead += link.ahead
        behind = len(self.links) - ahead
        return np.maximum(np.maximum(ahead, behind), 1), ahead if forward else behind

    def level(self, messages: Ints) -> None:
        """Move what all messages of one end have in common to the other end of the edge."""
        for link in self.links:
            alive = link.own < FORBIDDEN_FROM
            low = np.where(alive, link.own, INF).min(axis=1)
            low[(low >= FORBIDDEN_FROM) | ~link.ahead] = 0
            link.own[:] = np.where(alive, link.own - low[:, None], link.own)
            theirs = messages[link.far]
            messages[link.far] = np.where(theirs < FORBIDDEN_FROM, theirs + low[:, None], theirs)


def batches_of(net: Network, shift: int) -> tuple[tuple[Batch, ...], Ints]:
    """Sort the nodes of a network into batches.

    Args:
        net: The network.
        shift: Costs are multiplied by two to this power; rounded down if it is negative.

    Returns:
        The batches, in the order of their first nodes, and the messages of all edges, zero.
    """
    kinds = _Interned(shift)
    looks: dict[int, tuple[tuple[int, int], ...]] = {}  # (kind of matrix, neighbour), in order
    for node, row in net.links.items():
        looks[node] = tuple(sorted((kinds.number(m), other) for other, m in row.items()))
    groups = _groups(net, looks)
    place: dict[int, int] = {}
    message_at: dict[tuple[int, int], int] = {}  # (node, neighbour) -> first of its messages
    size = 0
    for group in groups:
        states = net.size(group[0])
        for node in group:
            place[node] = len(place)
        for position in range(len(looks[group[0]])):
            for node in group:
                message_at[node, looks[node][position][1]] = size
                size += states
    messages = np.zeros(size, np.int64)
    batches = []
    for group in groups:
        costs = np.stack([net.costs[n] for n in group])
        costs = np.where(costs < INF, scaled(costs, shift), INF)
        links, ends = [], []
        for position, (kind, first) in enumerate(looks[group[0]]):
            others = [looks[n][position][1] for n in group]
            ends.append(tuple(others))
            begin = message_at[group[0], first]
            far = np.array([message_at[o, n] for n, o in zip(group, others, strict=True)])
            who = np.array([place[o] for o in others])
            links.append(
                Link(
                    matrix=kinds.matrices[kind],
                    own=messages[begin : begin + costs.size].reshape(costs.shape),
                    far=far[:, None] + np.arange(net.size(first)),
                    who=who,
                    ahead=who > place[group[0]],
                )
            )
        floors = np.full(costs.shape, -INF)
        batches.append(
            Batch(tuple(group), place[group[0]], costs, floors, tuple(links), tuple(ends))
        )
    return tuple(batches), messages


def _groups(net: Network, looks: dict[int, tuple[tuple[int, int], ...]]) -> list[list[int]]:
    """Nodes that look alike and are not linked to each other, by their first nodes."""
    groups: dict[tuple[object, int], list[int]] = {}
    round_of: dict[int, tuple[object, int]] = {}
    for node in sorted(net.costs):
        look = (net.size(node), tuple(kind for kind, _ in looks[node]))
        taken = {round_of[k] for k in net.links[node] if k in round_of}
        number = 0
        while (look, number) in taken:
            number += 1
        round_of[node] = (look, number)
        groups.setdefault((look, number), []).append(node)
    return sorted(groups.values(), key=lambda group: group[0])


class _Interned:
    """Equal matrices, seen from the same end, under one number."""

    def __init__(self, shift: int) -> None:
        self.shift = shift
        self.matrices: list[Matrix] = []
        self._by_id: dict[int, tuple[Ints, int]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}

    def number(self, matrix: Ints) -> int:
        known = self._by_id.get(id(matrix))
        if known is None:
            digest = hashlib.sha256(matrix.tobytes()).digest()
            key = (matrix.shape, digest)
            if key not in self._by_content:
                self._by_content[key] = len(self.matrices)
                self.matrices.append(Matrix.of(matrix, self.shift))
            known = self._by_id[id(matrix)] = (matrix, self._by_content[key])
        return known[1]


def _in_order(kind: NDArray[np.intp]) -> bool:
    return int(kind.max()) == len(kind) - 1
