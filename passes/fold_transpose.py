"""``fold-transpose``: transposes that another op can do itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.passes.context import PassContext
from autoshard.passes.driver import apply_patterns
from autoshard.passes.patterns import Builder, Match, op, pattern
from autoshard.passes.registry import register_pass

Value: TypeAlias = "ir.Value[Any]"

_DOT = "stablehlo.dot_general"


def permutation_of(transpose: ir.Operation) -> tuple[int, ...]:
    """Which dimension of its operand each dimension of a transpose's result is."""
    return tuple(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))


def _is_identity(operation: ir.Operation) -> bool:
    permutation = permutation_of(operation)
    return permutation == tuple(range(len(permutation)))


def _is_splat(constant: ir.Operation) -> bool:
    return ir.DenseElementsAttr(constant.attributes["value"]).is_splat


_TRANSPOSE = op("stablehlo.transpose", bind="transpose")


@pattern("identity", op("stablehlo.transpose", where=_is_identity))
def _identity(match: Match, builder: Builder) -> Sequence[Value]:
    return [match.root.operands[0]]


@pattern("transpose-of-transpose", op("stablehlo.transpose", operands=[_TRANSPOSE]))
def _twice(match: Match, builder: Builder) -> Sequence[Value]:
    inner = permutation_of(match["transpose"])
    composed = [inner[d] for d in permutation_of(match.root)]
    return [stablehlo.transpose(match["transpose"].operands[0], composed)]


@pattern("broadcast-of-transpose", op("stablehlo.broadcast_in_dim", operands=[_TRANSPOSE]))
def _broadcast(match: Match, builder: Builder) -> Sequence[Value]:
    permutation = permutation_of(match["transpose"])
    dims = tuple(ir.DenseI64ArrayAttr(match.root.attributes["broadcast_dimensions"]))
    back = [dims[permutation.index(d)] for d in range(len(permutation))]
    made = builder.like(
        match.root,
        [match["transpose"].operands[0]],
        {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(back)},
    )
    return [made.results[0]]


@pattern(
    "transpose-of-broadcast",
    op("stablehlo.transpose", operands=[op("stablehlo.broadcast_in_dim", bind="broadcast")]),
)
def _of_broadcast(match: Match, builder: Builder) -> Sequence[Value]:
    permutation = permutation_of(match.root)
    dims = ir.DenseI64ArrayAttr(match["broadcast"].attributes["broadcast_dimensions"])
    moved = [permutation.index(d) for d in dims]
    made = builder.make(
        "stablehlo.broadcast_in_dim",
        [match["broadcast"].operands[0]],
        [match.root.results[0].type],
        {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(moved)},
    )
    return [made.results[0]]


@pattern(
    "transpose-of-splat",
    op("stablehlo.transpose", operands=[op("stablehlo.constant", where=_is_splat, bind="splat")]),
)
def _splat(match: Match, builder: Builder) -> Sequence[Value]:
    value = ir.DenseElementsAttr(match["splat"].attributes["value"])
    splat = ir.DenseElementsAttr.get_splat(match.root.results[0].type, value.get_splat_value())
    return [stablehlo.constant(splat)]


def _dims(dot: ir.Operation, side: int) -> tuple[list[int], list[int]]:
    """Batch and contracting dimensions of an operand of a ``dot_general``."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    if side == 0:
        return (
            list(numbers.lhs_batching_dimensions),
            list(numbers.lhs_contracting_dimensions),
        )
    return list(numbers.rhs_batching_dimensions), list(numbers.rhs_contracting_dimensions)


def _keeps_order(match: Match, side: int) -> bool:
    """Whether the free dimensions of the operand stay in order without its transpose."""
    batch, contracting = _dims(match.root, side)
    permutation = permutation_of(match["transpose"])
    free = [d for d in range(len(permutation)) if d not in (*batch, *contracting)]
    origin = [permutation[d] for d in free]
    return origin == sorted(origin)


def _without_transpose(match: Match, builder: Builder, side: int) -> Sequence[Value]:
    permutation = permutation_of(match["transpose"])
    sides = [_dims(match.root, 0), _dims(match.root, 1)]
    batch, contracting = sides[side]
    sides[side] = [permutation[d] for d in batch], [permutation[d] for d in contracting]
    numbers = stablehlo.DotDimensionNumbers.get(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
    operands = list(match.root.operands)
    operands[side] = match["transpose"].operands[0]
    made = builder.like(match.root, operands, {"dot_dimension_numbers": numbers})
    return [made.results[0]]


@pattern("dot-of-transpose-left", op(_DOT, operands=[_TRANSPOSE, None]),
         where=lambda match: _keeps_order(match, 0))  # fmt: skip
def _left(match: Match, builder: Builder) -> Sequence[Value]:
    return _without_transpose(match, builder, 0)


@pattern("dot-of-transpose-right", op(_DOT, operands=[None, _TRANSPOSE]),
         where=lambda match: _keeps_order(match, 1))  # fmt: skip
def _right(match: Match, builder: Builder) -> Sequence[Value]:
    return _without_transpose(match, builder, 1)


PATTERNS = (_identity, _twice, _splat, _of_broadcast, _broadcast, _left, _right)


@register_pass(
    "fold-transpose",
    summary="Removes transposes that a dot, a broadcast or another transpose can do itself",
    preserves=("numerics", "boundary", "effects"),
)
def fold_transpose(module: ir.Module, context: PassContext) -> None:
    """Apply :data:`PATTERNS` until none is found."""
    apply_patterns(module, PATTERNS, context)
