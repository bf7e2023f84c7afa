"""The ways to run one op on a mesh: which mesh axes split which factor of its sharding rule.

A strategy fixes the sharding every operand must have and the sharding each result then has by
itself (its *natural* result); axes on reduction factors leave partial results, which an all-reduce
completes. Factors are split evenly, or with padding where :mod:`autoshard.padding` allows it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.graph import Graph, Op, Rule
from autoshard.kinds import ELEMENTWISE
from autoshard.padding import may_pad
from autoshard.reshard import FREE_AXES, layouts
from autoshard.shardings import MeshShape, Sharding, pads, replicated, to_partition_spec
from autoshard.traps import UNSPLIT, is_trap

REDUCING = frozenset(
    {
        "stablehlo.dot_general",
        "stablehlo.convolution",
        "stablehlo.reduce",
        "stablehlo.gather",
        "stablehlo.scatter",
    }
)
"""Ops whose partial results XLA combines over the axes of a reduction factor."""

COMBINERS = frozenset(
    {"stablehlo.add", "stablehlo.maximum", "stablehlo.minimum", "stablehlo.and", "stablehlo.or"}
)
"""Reduction bodies that an all-reduce can carry out."""

_LOGICAL = frozenset({"stablehlo.and", "stablehlo.or"})
"""Those of them that it can carry out on truth values alone: XLA's CPU and GPU backends refuse a
bitwise all-reduce of integers."""

MAX_STRATEGIES = 512
"""Above this many strategies of one op, the ones that split its work least are left out."""


@dataclass(frozen=True, slots=True)
class Strategies:
    """All strategies of one op; arrays have one entry per strategy ``[S]``.

    Attributes:
        factor_axes: Per strategy, per factor, the mesh axes that split it.
        operands: Per operand, the layout id each strategy requires, ``[S]``; see
            ``reshard.layouts``.
        results: Per result, the layout id it comes out with, ``[S]``.
        splits: By how much one device does less than the whole work of the op, padding counted as
            work, ``[S]``.
        reduced: Per strategy, the axes that hold partial results, one group per reduction factor:
            XLA combines the results of each factor by an all-reduce of its own.
        scattered: Per strategy, whether the reduction ends scattered (a reduce-scatter).
    """

    factor_axes: tuple[tuple[tuple[str, ...], ...], ...]
    operands: tuple[NDArray[np.int64], ...]
    results: tuple[NDArray[np.int64], ...]
    splits: NDArray[np.float64]
    reduced: tuple[tuple[tuple[str, ...], ...], ...]
    scattered: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.splits)


class Enumerator:
    """Strategies of every op of a graph, built once per rule and shared."""

    def __init__(
        self, graph: Graph, mesh: MeshShape, scatter_reductions: bool, usual: bool = False
    ) -> None:
        self.graph, self.mesh, self.scatter, self.usual = graph, mesh, scatter_reductions, usual
        self._known: dict[object, Strategies] = {}
        self._sizes: dict[tuple[str, ...], int] = {}

    def of(self, op: Op) -> Strategies:
        """The strategies of ``op``; the first one runs it whole on every device."""
        shapes = tuple(self.graph.values[v].shape for v in (*op.operands, *op.results))
        # Whatever works element by element has the same ones.
        name = "" if op.kind in ELEMENTWISE else op.name
        bits = op.combiner in _LOGICAL and self.graph.values[op.results[0]].dtype != "i1"
        key = (name, op.rule, op.combiner, bits, op.fixed, op.piecewise, op.on_one_device, shapes)
        if key not in self._known:
            self._known[key] = self._build(op)
        return self._known[key]

    def _build(self, op: Op) -> Strategies:
        values = self.graph.values
        operand_shapes = [values[v].shape for v in op.operands]
        result_shapes = [values[v].shape for v in op.results]
        if op.fixed is not None:
            return self._single(op.fixed[0], op.fixed[1])
        if op.on_one_device:
            return self._sent_around(op)
        rule = op.rule
        if (
            rule is None
            or (op.name in UNSPLIT and not op.piecewise)
            or any(0 in shape for shape in (*operand_shapes, *result_shapes))
            or not _same_ranks(rule, operand_shapes, result_shapes)
        ):
            return self._single(
                tuple(replicated(len(s)) for s in operand_shapes),
                tuple(replicated(len(s)) for s in result_shapes),
            )
        rows = self._rows(op, rule, operand_shapes, result_shapes)
        if len(rows) > MAX_STRATEGIES:
            rows = [rows[0], *sorted(rows[1:], key=lambda r: -r[3])[: MAX_STRATEGIES - 1]]
        return Strategies(
            factor_axes=tuple(r[0] for r in rows),
            operands=tuple(
                np.array([self._id(r[1][k]) for r in rows], np.int64)
                for k in range(len(operand_shapes))
            ),
            results=tuple(
                np.array([self._id(r[2][k]) for r in rows], np.int64)
                for k in range(len(result_shapes))
            ),
            splits=np.array([r[3] for r in rows], np.float64),
            reduced=tuple(r[4] for r in rows),
            scattered=np.array([r[5] for r in rows], np.bool_),
        )

    def _single(self, operands: tuple[Sharding, ...], results: tuple[Sharding, ...]) -> Strategies:
        return Strategies(
            factor_axes=((),),
            operands=tuple(np.array([self._id(s)], np.int64) for s in operands),
            results=tuple(np.array([self._id(s)], np.int64) for s in results),
            splits=np.ones(1),
            reduced=((),),
            scattered=np.zeros(1, np.bool_),
        )

    def _sent_around(self, op: Op) -> Strategies:
        """One device runs the op; XLA sums its results with the zeros of all the others."""
        shapes = [self.graph.values[v].shape for v in (*op.operands, *op.results)]
        whole = tuple(replicated(len(shape)) for shape in shapes)
        alone = self._single(whole[: len(op.operands)], whole[len(op.operands) :])
        axes = tuple(a for a, s in zip(self.mesh.names, self.mesh.sizes, strict=True) if s > 1)
        return replace(alone, reduced=((axes,) if axes and op.results else (),))

    def _size(self, axes: tuple[str, ...]) -> int:
        """Product of the axes' sizes, looked up because it is asked for each factor of each row."""
        if axes not in self._sizes:
            self._sizes[axes] = self.mesh.size(axes)
        return self._sizes[axes]

    def _id(self, sharding: Sharding) -> int:
        index = layouts(len(sharding), self.mesh).index
        if sharding not in index:
            raise InputError(
                f"the function prescribes {to_partition_spec(sharding)}, which splits a dimension "
                f"by axes in another order than that of the mesh ({self.mesh})",
                fix="name the axes of each dimension in the order of the mesh",
            )
        return index[sharding]

    def _rows(
        self,
        op: Op,
        rule: Rule,
        operand_shapes: list[tuple[int, ...]],
        result_shapes: list[tuple[int, ...]],
    ) -> list[
        tuple[
            tuple[tuple[str, ...], ...],
            tuple[Sharding, ...],
            tuple[Sharding, ...],
            float,
            tuple[tuple[str, ...], ...],
            bool,
        ]
    ]:
        axes = [a for a, s in zip(self.mesh.names, self.mesh.sizes, strict=True) if s > 1]
        usable = [f for f in range(len(rule.sizes)) if self._may_split(op, rule, f)]
        padded = frozenset(f for f in usable if may_pad(op, f, operand_shapes, result_shapes))
        rows = []
        for choice in itertools.product((-1, *usable), repeat=len(axes)):
            if self.usual and len(axes) > FREE_AXES and not _in_runs(choice):
                continue
            factor_axes = tuple(
                tuple(a for a, c in zip(axes, choice, strict=True) if c == f)
                for f in range(len(rule.sizes))
            )
            counts = [self._size(axes) for axes in factor_axes]
            if any(
                size % count and not (f in padded and pads(size, count))
                for f, (size, count) in enumerate(zip(rule.sizes, counts, strict=True))
            ):
                continue
            if is_trap(op.name, rule, counts, factor_axes, axes):
                continue
            sides = []
            for tensors, shapes in ((rule.operands, operand_shapes), (rule.results, result_shapes)):
                sides.append(
                    [
                        self._sharding(rule, tensor, shape, factor_axes, counts)
                        for tensor, shape in zip(tensors, shapes, strict=True)
                    ]
                )
            operands, results = sides
            if any(s is None or not self._may_have(s) for s in operands + results):
                continue
            whole_operands = tuple(s for s in operands if s is not None)
            whole_results = tuple(s for s in results if s is not None)
            reduced = tuple(
                a
                for a, kind in zip(factor_axes, rule.kinds, strict=True)
                if a and kind == "reduction"
            )
            split = math.prod(
                size / -(-size // count) for size, count in zip(rule.sizes, counts, strict=True)
            )
            rows.append((factor_axes, whole_operands, whole_results, split, reduced, False))
            if len(reduced) == 1 and self.scatter and len(result_shapes) == 1:
                for dim in range(len(result_shapes[0])):
                    scattered = tuple(
                        (*s, *reduced[0]) if d == dim else s for d, s in enumerate(whole_results[0])
                    )
                    even = result_shapes[0][dim] % self.mesh.size(scattered[dim]) == 0
                    if even and self._may_have(scattered):
                        rows.append(
                            (factor_axes, whole_operands, (scattered,), split, reduced, True)
                        )
        return rows

    def _may_have(self, sharding: Sharding) -> bool:
        """Whether a tensor may have a sharding while the program runs."""
        table = layouts(len(sharding), self.mesh)
        number = table.index.get(sharding)
        return number is not None and (not self.usual or bool(table.usual[number]))

    def _may_split(self, op: Op, rule: Rule, factor: int) -> bool:
        if rule.sizes[factor] <= 1:
            return False
        kind = rule.kinds[factor]
        if kind == "reduction" and not op.piecewise:
            one_input = op.name != "stablehlo.reduce" or len(op.results) == 1
            body = op.name in ("stablehlo.reduce", "stablehlo.scatter")
            combines = op.combiner in COMBINERS and (
                op.combiner not in _LOGICAL or self.graph.values[op.results[0]].dtype == "i1"
            )
            return op.name in REDUCING and one_input and (not body or combines)
        return kind == "pass" or (kind == "reduction" and op.piecewise)

    def _sharding(
        self,
        rule: Rule,
        tensor: tuple[tuple[int, ...], ...],
        shape: tuple[int, ...],
        factor_axes: tuple[tuple[str, ...], ...],
        counts: list[int],
    ) -> Sharding | None:
        """What the factors' axes mean for one tensor; None if its dimensions cannot say it."""
        dims = []
        for factors, size in zip(tensor, shape, strict=True):
            axes: tuple[str, ...] = ()
            whole = True  # every more major factor is split all the way down
            for f in factors:
                if factor_axes[f]:
                    if not whole:
                        return None
                    axes += factor_axes[f]
                whole = whole and counts[f] == rule.sizes[f]
            alone = len(factors) == 1 and rule.sizes[factors[0]] == size
            if not alone and size % self._size(axes):
                return None
            dims.append(axes)
        return tuple(dims)


def _in_runs(choice: tuple[int, ...]) -> bool:
    """Whether the axes of each factor are neighbours: no factor comes back after another.

    Examples:
        >>> _in_runs((2, 2, -1, 0)), _in_runs((2, -1, 2, 0))
        (True, False)
    """
    begun = [k for k, factor in enumerate(choice) if k == 0 or choice[k - 1] != factor]
    runs = [choice[k] for k in begun if choice[k] >= 0]
    return len(runs) == len(set(runs))


def _same_ranks(
    rule: Rule, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]
) -> bool:
    mapped = [len(t) for t in (*rule.operands, *rule.results)]
    return mapped == [len(s) for s in (*operands, *results)]
