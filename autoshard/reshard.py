"""Moving one tensor from one sharding to another in single steps that a compiler cannot misread.

A step is one collective (or a local slice): gather the minor axes of a dimension, slice by an axis,
send axes from one dimension to another (all-to-all), or renumber the devices (permute). XLA's
partitioner makes exactly one collective of each; asked for several at once it may replicate the
tensor. The price of a reshard is the cheapest chain of steps, and that chain is what a rewritten
program asks for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from autoshard.cost_models.protocol import CollectiveKind, CostModel, MeshAxis, Work
from autoshard.shardings import MAX_PADDING, MeshShape, Sharding

StepKind = Literal["all_gather", "all_to_all", "permute", "slice"]

FREE_AXES = 3
"""Up to this many mesh axes a dimension may be split by them in any order; with more axes only in
mesh order, since the orders of four axes would make thousands of layouts per tensor."""

_LEAST_S = 1e-18
"""Price of a step that costs nothing [s]."""

_FEW_SPLIT = 2
"""With more mesh axes, dimensions of a tensor that usual layouts split.

On the scanned Llama 8B step on a (2,2,2,2) mesh three lose more than they gain: a product then has
more strategies than are kept, and the plan costs 15.60 s instead of 15.19 s (v5p prices)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a reshard.

    Attributes:
        kind: The collective, or ``slice``, which moves nothing between devices.
        axes: Mesh axes it runs over, major to minor.
        source: Sharding before.
        target: Sharding after.
        nbytes: Bytes on one device of the larger side (see ``CostModel.collective_s``).
        seconds: Price of one execution [s].
    """

    kind: StepKind
    axes: tuple[str, ...]
    source: Sharding
    target: Sharding
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Layouts:
    """Every way to shard a tensor of some rank over a mesh, and the single steps between them.

    Attributes:
        shardings: All of them; ``index[shardings[i]] == i``; the replicated one is first.
        index: The inverse.
        splits: Pieces along each dimension, ``[L, rank]``.
        usual: Those to choose from where nothing asks for others, ``[L]``: all of them on up to
            three mesh axes; on more, those that split at most two dimensions, each by axes that
            are neighbours in the mesh.
        steps: ``(kind, axes) -> (source ids, target ids)``.
    """

    shardings: tuple[Sharding, ...]
    index: dict[Sharding, int]
    splits: NDArray[np.int64]
    usual: NDArray[np.bool_]
    steps: dict[tuple[StepKind, tuple[str, ...]], tuple[NDArray[np.int64], NDArray[np.int64]]]

    def dividing(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which layouts split every dimension of ``shape`` evenly, ``[L]``."""
        sizes = np.asarray(shape, np.int64).reshape(1, len(shape))
        even: NDArray[np.bool_] = ((sizes % self.splits) == 0).all(axis=1) & (
            (sizes >= self.splits) | (self.splits == 1)
        ).all(axis=1)
        return even

    def fitting(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which layouts a tensor of ``shape`` may have while the program runs, ``[L]``.

        Those that divide it, and those that pad a dimension little.
        """
        fit = np.ones(len(self.shardings), np.bool_)
        for size, splits in zip(shape, self.splits.T, strict=True):
            part = -(-size // splits)
            small = (size >= 2 * splits) & (part * splits <= (1 + MAX_PADDING) * size)
            fit &= (splits == 1) | ((size % splits == 0) & (size > 0)) | small
        return fit

    def local(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Sizes of the piece that one device holds, padding included, ``[L, rank]``."""
        return -(-np.asarray(shape, np.int64).reshape(1, len(shape)) // self.splits)

    def nested(
        self, shape: tuple[int, ...], sources: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether the pieces of one side are made of whole pieces of the other, ``[N]``.

        A padded dimension that is split further would move every boundary between its pieces.
        """
        padded = self.local(shape) * self.splits
        same = padded[sources] == padded[targets]
        whole = (self.splits[sources] == 1) | (self.splits[targets] == 1)
        return np.asarray((same | whole).all(axis=1), np.bool_)

    def local_bytes(self, shape: tuple[int, ...], nbytes: int) -> NDArray[np.float64]:
        """Size of the piece that one device holds, padding included [bytes], ``[L]``."""
        elements = self.local(shape).prod(axis=1)
        return np.asarray(nbytes * (elements / max(1, math.prod(shape))), np.float64)


@lru_cache(maxsize=64)
def layouts(rank: int, mesh: MeshShape) -> Layouts:
    """The layouts of a tensor with ``rank`` dimensions on ``mesh``."""
    axes = [a for a, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1]
    found = sorted(
        {s for s in _placements(rank, axes) if len(axes) <= FREE_AXES or _in_mesh_order(s, mesh)},
        key=lambda s: (sum(map(len, s)), s),
    )
    index = {s: i for i, s in enumerate(found)}
    splits = np.array([[mesh.size(d) for d in s] for s in found], np.int64).reshape(
        len(found), rank
    )
    pairs: dict[tuple[StepKind, tuple[str, ...]], list[tuple[int, int]]] = {}
    for source in found:
        for kind, moved, target in _steps_from(source, axes):
            if target not in index:
                continue
            pairs.setdefault((kind, moved), []).append((index[source], index[target]))
    for here, there in _permutes(found, splits):
        changed = {
            a for x, y in zip(found[here], found[there], strict=True) if x != y for a in x + y
        }
        moved = tuple(a for a in mesh.names if a in changed)
        pairs.setdefault(("permute", moved), []).append((here, there))
    steps = {
        key: (np.array([p[0] for p in ps]), np.array([p[1] for p in ps]))
        for key, ps in pairs.items()
    }
    usual = np.array([len(axes) <= FREE_AXES or _is_usual(s, axes) for s in found], np.bool_)
    return Layouts(tuple(found), index, splits, usual, steps)


def _is_usual(sharding: Sharding, axes: list[str]) -> bool:
    """Whether few dimensions are split, each by axes that are neighbours, in order."""
    runs = [[axes.index(a) for a in dim] for dim in sharding if dim]
    neighbours = all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    return len(runs) <= _FEW_SPLIT and neighbours


def _in_mesh_order(sharding: Sharding, mesh: MeshShape) -> bool:
    return all(tuple(sorted(dim, key=mesh.names.index)) == dim for dim in sharding)


def _placements(rank: int, axes: list[str]) -> Iterator[Sharding]:
    """Ordered lists of distinct axes in ``rank`` bins."""
    yield ((),) * rank
    for count in range(1, len(axes) + 1 if rank else 0):
        for chosen in itertools.permutations(axes, count):
            for dims in itertools.combinations_with_replacement(range(rank), count):
                bins: list[tuple[str, ...]] = [()] * rank
                for axis, dim in zip(chosen, dims, strict=True):
                    bins[dim] = (*bins[dim], axis)
                yield tuple(bins)


def _steps_from(
    source: Sharding, axes: list[str]
) -> Iterator[tuple[StepKind, tuple[str, ...], Sharding]]:
    used = {a for dim in source for a in dim}

    def with_dims(changes: dict[int, tuple[str, ...]]) -> Sharding:
        return tuple(changes.get(d, dim) for d, dim in enumerate(source))

    for d, dim in enumerate(source):
        for axis in axes:
            if axis not in used:
                yield "slice", (axis,), with_dims({d: (*dim, axis)})
        # Padded pieces of pieces seldom nest, so a whole dimension may be cut by several at once.
        unused = [a for a in axes if a not in used] if not dim else []
        for count in range(2, len(unused) + 1):
            for cut in itertools.permutations(unused, count):
                yield "slice", cut, with_dims({d: cut})
        for count in range(1, len(dim) + 1):
            kept, moved = dim[:-count], dim[-count:]
            yield "all_gather", moved, with_dims({d: kept})
            for e, other in enumerate(source):
                if e != d:
                    yield "all_to_all", moved, with_dims({d: kept, e: (*other, *moved)})


def _permutes(found: list[Sharding], splits: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Pairs whose pieces have the same shape, so that whole pieces only change places."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(splits.tolist()):
        if max(row, default=1) > 1:
            groups.setdefault(tuple(row), []).append(i)
    for members in groups.values():
        for i, j in itertools.permutations(members, 2):
            if {a for d in found[i] for a in d} == {a for d in found[j] for a in d}:
                yield i, j


def sent_bytes(nbytes: int, dtype: str, compiler: str, *, halved: bool = False) -> int:
    """Size of a whole tensor as collectives move it [bytes].

    Args:
        nbytes: Its size.
        dtype: Its element type.
        compiler: Who compiles the program.
        halved: Whether its reader takes half of each element (:mod:`autoshard.narrowing`).

    XLA:CPU moves bf16 as f32 and 8-bit floats as f16 (seen in programs that jax 0.10.2 compiles,
    whatever the collective; its pass is called ``FloatNormalization``), and 4-bit integers as 8-bit
    ones.
    """
    if halved:
        return nbytes // 2
    widened = dtype.startswith(("bf16", "f8")) or dtype in ("i4", "ui4")
    return 2 * nbytes if compiler == "cpu" and widened else nbytes


@dataclass(frozen=True, slots=True)
class _Table:
    """All reshards of one type of tensor, between the layouts that it may have.

    Attributes:
        place: Per layout, its row in the table; -1 where it has none, ``[L]``.
        ids: The layouts that have one, ``[R]``.
        seconds: Price of the cheapest chain [s], ``[R, R]``.
        before: The row before the last one of that chain, ``[R, R]``; negative where there is none.
    """

    place: NDArray[np.int64]
    ids: NDArray[np.int64]
    seconds: NDArray[np.float64]
    before: NDArray[np.int32]


class Resharder:
    """Prices of all reshards on one mesh under one cost model, computed once per tensor type.

    Args:
        mesh: The mesh.
        model: The cost model.
        usual: Whether chains lead through usual layouts alone (see :class:`Layouts`).
    """

    def __init__(self, mesh: MeshShape, model: CostModel, usual: bool = False) -> None:
        self.mesh, self.model, self.usual = mesh, model, usual
        self._tables: dict[tuple[tuple[int, ...], int], _Table] = {}

    def seconds(self, shape: tuple[int, ...], nbytes: int) -> NDArray[np.float64]:
        """Price of every reshard of a tensor [s], ``[L, L]``; infinite where pieces do not fit."""
        every = np.arange(len(layouts(len(shape), self.mesh).shardings))
        return self.between(shape, nbytes, every, every)

    def between(
        self,
        shape: tuple[int, ...],
        nbytes: int,
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Price of the reshards from some layouts to others [s], ``[sources, targets]``."""
        table = self._table(shape, nbytes)
        rows, columns = table.place[sources], table.place[targets]
        found = table.seconds[np.ix_(rows, columns)]
        found[np.ix_(rows < 0, columns >= 0)] = np.inf
        found[:, columns < 0] = np.inf
        found[sources[:, None] == targets[None, :]] = 0.0
        return found

    def path(
        self, shape: tuple[int, ...], nbytes: int, source: Sharding, target: Sharding
    ) -> tuple[Step, ...]:
        """The cheapest chain of steps; empty if ``source`` is ``target``."""
        index = layouts(len(shape), self.mesh).index
        if source == target:
            return ()
        table = self._table(shape, nbytes)
        start, row = int(table.place[index[source]]), int(table.place[index[target]])
        rows = [row]
        while row != start:
            row = int(table.before[start, row])
            rows.append(row)
        steps = []
        for row, following in itertools.pairwise(reversed(rows)):
            here, there = int(table.ids[row]), int(table.ids[following])
            seconds = float(table.seconds[row, following])
            steps.append(self._step(shape, here, there, nbytes, seconds))
        return tuple(steps)

    def doubled(self, step: Step) -> Step:
        """The step for a tensor of elements twice as large."""
        if step.kind == "slice":
            return replace(step, nbytes=2 * step.nbytes, seconds=2 * step.seconds)
        size = np.array([2 * step.nbytes])
        seconds = float(self._price(step.kind, step.axes, size, size)[0])
        return replace(step, nbytes=2 * step.nbytes, seconds=seconds)

    def _table(self, shape: tuple[int, ...], nbytes: int) -> _Table:
        key = (shape, nbytes)
        if key not in self._tables:
            self._tables[key] = self._build(shape, nbytes)
        return self._tables[key]

    def _build(self, shape: tuple[int, ...], nbytes: int) -> _Table:
        table = layouts(len(shape), self.mesh)
        fits, even = table.fitting(shape), table.dividing(shape)
        if self.usual:
            fits &= table.usual
        ids = np.flatnonzero(fits)
        place = np.full(len(fits), -1)
        place[ids] = np.arange(len(ids))
        pieces = table.local_bytes(shape, nbytes)
        cost = np.full((len(ids), len(ids)), np.inf)
        for (kind, axes), (sources, targets) in table.steps.items():
            keep = fits[sources] & fits[targets]
            sources, targets = sources[keep], targets[keep]
            keep = table.nested(shape, sources, targets)
            if kind == "slice" and len(axes) > 1:
                keep &= ~even[targets]  # a chain of even cuts does as well
            if not keep.any():
                continue
            src, dst = sources[keep], targets[keep]
            size = self._moved(shape, nbytes, kind, axes, src, dst)
            rows, columns = place[src], place[dst]
            price = self._price(kind, axes, size, pieces[dst])
            cost[rows, columns] = np.minimum(cost[rows, columns], price)
        # In a sparse matrix zero would mean that there is no such step.
        direct = csr_matrix(np.where(np.isfinite(cost), np.maximum(cost, _LEAST_S), 0.0))
        seconds, before = dijkstra(direct, return_predecessors=True)
        return _Table(place, ids, np.asarray(seconds, np.float64), np.asarray(before, np.int32))

    def _price(
        self,
        kind: StepKind,
        axes: tuple[str, ...],
        size: NDArray[np.float64],
        result: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        if kind == "slice":
            zeros = np.zeros_like(result)
            return self.model.hbm_s(Work("slice", "", zeros, 2 * result)) + 1e-12
        named = tuple(MeshAxis(a, self.mesh.size((a,))) for a in axes)
        collective: CollectiveKind = kind
        return self.model.collective_s(collective, size, named)

    def _moved(
        self,
        shape: tuple[int, ...],
        nbytes: int,
        kind: StepKind,
        axes: tuple[str, ...],
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Bytes on one device of a step's larger side, padding included.

        What an all-gather gathers and an all-to-all exchanges are padded pieces.
        """
        table = layouts(len(shape), self.mesh)
        pieces = table.local(shape)
        if kind == "slice":
            elements = np.maximum(pieces[sources].prod(axis=1), pieces[targets].prod(axis=1))
        else:
            elements = np.minimum(pieces[sources], pieces[targets]).prod(axis=1)
            if kind != "permute":
                elements = elements * self.mesh.size(axes)
        return np.asarray(nbytes * (elements / max(1, math.prod(shape))), np.float64)

    def _step(
        self, shape: tuple[int, ...], here: int, there: int, nbytes: int, seconds: float
    ) -> Step:
        table = layouts(len(shape), self.mesh)
        moved = []
        for (kind, axes), (s, t) in table.steps.items():
            if ((s == here) & (t == there)).any():
                ends = np.array([here]), np.array([there])
                size = self._moved(shape, nbytes, kind, axes, *ends)
                moved.append((float(self._price(kind, axes, size, size)[0]), kind, axes, size))
        _, kind, axes, size = min(moved, key=lambda m: m[0])
        source, target = table.shardings[here], table.shardings[there]
        return Step(kind, axes, source, target, float(size[0]), seconds)
