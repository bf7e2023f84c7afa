"""A network laid out in arrays for compiled kernels; equal matrices stand there once.

Rows of a matrix that are equal are of one kind, and so are columns: entries are held per kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.reduce import classes

Places = NDArray[np.int64]
Whole = TypeVar("Whole", int, Ints)


def scaled(values: Whole, shift: int) -> Whole:
    """Whole numbers times two to the power of ``shift``, rounded down."""
    return values << shift if shift >= 0 else values >> -shift


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes in a fixed order, their links, and the matrices on those.

    Attributes:
        nodes: The order.
        at: Where the states of each node start; ``[N + 1]``.
        link_at: Where the links of each node start; ``[N + 1]``.
        near: Per link, the place of the node at the other end.
        back: Per link, the same edge seen from there.
        message_at: Per link, where the messages at this end start, one per state; ``[L + 1]``.
        matrix: Per link, its matrix as seen from this end.
        core_at: Per matrix, where its entries start in ``cores``, kinds of rows by kinds of
            columns.
        row_at: Per matrix, where the kinds of its rows start in ``kinds``.
        column_at: Per matrix, where the kinds of its columns start in ``kinds``.
        rows: Per matrix, how many kinds of rows it has.
        columns: Per matrix, how many kinds of columns it has.
        cores: Entries, scaled.
        kinds: The kind of each row and column.
        who: Per memory segment, the place of its node.
        first: Per segment, its first row.
        end: Per segment, one past its last row.
        use_at: Per segment, where its usages start in ``uses``, one per state.
        uses: Usages [bytes].
    """

    nodes: tuple[int, ...]
    at: Places
    link_at: Places
    near: Places
    back: Places
    message_at: Places
    matrix: Places
    core_at: Places
    row_at: Places
    column_at: Places
    rows: Places
    columns: Places
    cores: Ints
    kinds: Places
    who: Places
    first: Places
    end: Places
    use_at: Places
    uses: Ints

    @classmethod
    def of(cls, net: Network, shift: int) -> Layout:
        """Lay a network out, its matrices times two to the power of ``shift``, rounded down."""
        nodes = tuple(sorted(net.costs))
        place = {node: k for k, node in enumerate(nodes)}
        matrices = _Matrices(shift)
        sizes = [net.size(node) for node in nodes]
        ends = [(i, j) for i in nodes for j in sorted(net.links[i])]
        number = {pair: k for k, pair in enumerate(ends)}
        parts = [(place[node], part) for node in nodes for part in net.segments.get(node, ())]
        return cls(
            nodes=nodes,
            at=_starts(sizes),
            link_at=_starts([len(net.links[node]) for node in nodes]),
            near=_whole(place[j] for _, j in ends),
            back=_whole(number[j, i] for i, j in ends),
            message_at=_starts([net.size(i) for i, _ in ends]),
            matrix=_whole(matrices.number(net.links[i][j]) for i, j in ends),
            core_at=_starts([core.size for core in matrices.cores]),
            # Contiguous whatever their number: kernels are compiled for one kind of array alone.
            row_at=_starts([len(k) for k in matrices.kinds])[0:-1:2].copy(),
            column_at=_starts([len(k) for k in matrices.kinds])[1::2].copy(),
            rows=_whole(core.shape[0] for core in matrices.cores),
            columns=_whole(core.shape[1] for core in matrices.cores),
            cores=_joined([core.ravel() for core in matrices.cores]),
            kinds=_joined(matrices.kinds),
            who=_whole(k for k, _ in parts),
            first=_whole(part.first for _, part in parts),
            end=_whole(part.end for _, part in parts),
            use_at=_starts([len(part.usage) for _, part in parts]),
            uses=_joined([part.usage for _, part in parts]),
        )

    @property
    def links(self) -> tuple[Places, ...]:
        """The arrays that kernels take, from ``at`` to ``kinds``, in order."""
        return (
            self.at, self.link_at, self.near, self.back, self.message_at, self.matrix,
            self.core_at, self.row_at, self.column_at, self.rows, self.columns, self.cores,
            self.kinds,
        )  # fmt: skip

    def excess(self, states: Places, capacity: Ints) -> Ints:
        """Per memory row, usage above capacity (negative: room) [bytes]."""
        change = np.zeros(len(capacity) + 1, np.int64)
        used = self.uses[self.use_at[:-1] + states[self.who]]
        np.add.at(change, self.first, used)
        np.subtract.at(change, self.end, used)
        over: Ints = np.cumsum(change)[:-1] - capacity
        return over


class _Matrices:
    """Equal matrices, seen from the same end, under one number."""

    def __init__(self, shift: int) -> None:
        self.shift = shift
        self.cores: list[Ints] = []
        self.kinds: list[Places] = []  # of rows, then of columns, of each
        self._by_id: dict[int, tuple[Ints, int]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}

    def number(self, matrix: Ints) -> int:
        known = self._by_id.get(id(matrix))
        if known is None:
            key = (matrix.shape, hashlib.sha256(matrix.tobytes()).digest())
            if key not in self._by_content:
                self._by_content[key] = len(self.cores)
                rows, row_kind = classes(matrix)
                columns, column_kind = classes(matrix.T)
                part = matrix[np.ix_(rows, columns)]
                self.cores.append(np.where(part >= INF, INF, scaled(part, self.shift)))
                self.kinds += [row_kind.astype(np.int64), column_kind.astype(np.int64)]
            known = self._by_id[id(matrix)] = (matrix, self._by_content[key])
        return known[1]


def _starts(sizes: list[int]) -> Places:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _whole(values: Iterable[int]) -> Places:
    return np.fromiter(values, np.int64)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
