"""Products in few bits: which operands are weights, and how they are rounded.

A weight is rounded symmetrically, with one scale for each of its channels (every dimension that the
product does not sum over): ``q = round(w / s)``, ``s = max|w| / Q`` with Q = 127 for ``int8``. The
product is taken with q, and its result multiplied by s (Jacob et al. 2018, "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 2, without
zero points). Activations are rounded alike, with one scale for each row, when the program runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.passes.contraction import dot_numbers, product
from autoshard.passes.patterns import maker_of
from autoshard.program import Value, main_block, shape_of, terminator

Narrow = Literal["int8", "int4", "float8_e4m3fn"]

LARGEST: dict[Narrow, float] = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
"""The largest magnitude that is used of a type; the integers' ranges are made symmetric."""

BITS: dict[Narrow, int] = {"int8": 8, "int4": 4, "float8_e4m3fn": 8}

_CARRIES_ON = frozenset(
    f"stablehlo.{name}"
    for name in (
        "convert",
        "dynamic_slice",
        "optimization_barrier",
        "reshape",
        "slice",
        "transpose",
    )
)


@dataclass(frozen=True, slots=True)
class WeightedDot:
    """A product with a weight.

    Attributes:
        dot: The product.
        side: Which operand is the weight.
        argument: The number of the argument of ``main`` that it comes from.
    """

    dot: ir.Operation
    side: int
    argument: int


def weighted_dot(module: ir.Module, dot: ir.Operation) -> WeightedDot | None:
    """The product with a weight that an op is, or None.

    A weight comes from an argument of ``main`` by slices, transposes, reshapes and conversions
    alone. Of two such operands the larger argument is the weight, and the right one of equals.
    """
    element = ir.RankedTensorType(dot.results[0].type).element_type
    kinds = [ir.RankedTensorType(v.type).element_type for v in dot.operands]
    if not all(isinstance(k, ir.FloatType) for k in (element, *kinds)) or kinds[0] != kinds[1]:
        return None
    if any(map(_is_rounded, dot.operands)):
        return None
    main = main_block(module)
    found = [argument_of(value, main) for value in dot.operands]
    sides = [s for s, argument in enumerate(found) if argument is not None]
    if not sides:
        return None

    def size(side: int) -> int:
        argument = found[side]
        assert argument is not None
        return math.prod(shape_of(main.arguments[argument]))

    side = max(sides, key=lambda s: (size(s), s))
    argument = found[side]
    assert argument is not None
    return WeightedDot(dot, side, argument)


def _is_rounded(value: Value) -> bool:
    """Whether a value was in few bits before."""
    maker = maker_of(value)
    if maker is None or maker.name != "stablehlo.convert":
        return False
    element = ir.RankedTensorType(maker.operands[0].type).element_type
    return element in map(_element, LARGEST)


def argument_of(value: Value, main: ir.Block) -> int | None:
    """The argument of ``main`` whose elements a value's are; None if it is computed."""
    while True:
        maker = maker_of(value)
        if maker is not None:
            if maker.name not in _CARRIES_ON:
                return None
            value = maker.operands[
                ir.OpResult(value).result_number if len(maker.results) > 1 else 0
            ]
            continue
        block = cast(ir.Block, value.owner)
        number = ir.BlockArgument(value).arg_number
        if block == main:
            return number
        around = block.owner.operation
        if around.name != "stablehlo.while" or block != around.regions[1].blocks[0]:
            return None
        if terminator(block).operands[number] != value:
            return None
        value = around.operands[number]


def quantize_dot(found: WeightedDot, kind: Narrow, *, weights_only: bool) -> Value:
    """Write a product in few bits before a product.

    Args:
        found: The product.
        kind: The type to round to.
        weights_only: Whether the other operand stays as it is.

    Returns:
        What takes the place of the product's result.
    """
    dot, side = found.dot, found.side
    numbers, shape = dot_numbers(dot), list(shape_of(dot.results[0]))
    element = ir.RankedTensorType(dot.results[0].type).element_type
    values, scales = list(dot.operands), []
    with dot.location, ir.InsertionPoint(dot):
        for each in (side,) if weights_only else (side, 1 - side):
            rounded, scale = _rounded(dot.operands[each], numbers[2 + each], kind)
            values[each] = rounded
            scales.append(_in_result(scale, dot, each, shape))
        if weights_only:
            wide = ir.RankedTensorType(dot.operands[side].type)
            values[side] = cast(Value, stablehlo.convert(wide, values[side]))
        whole = not weights_only and kind != "float8_e4m3fn"
        sums = ir.IntegerType.get_signless(32) if whole else ir.F32Type.get()
        made = product(dot, values[0], values[1], numbers, shape, element=sums)
        total = _as(made, ir.F32Type.get())
        for scale in scales:
            total = cast(Value, stablehlo.multiply(total, scale))
        return _as(total, element)


def _rounded(value: Value, summed: Sequence[int], kind: Narrow) -> tuple[Value, Value]:
    """A value in few bits, and its scales: one for each place in the dimensions not summed over."""
    shape, top = list(shape_of(value)), LARGEST[kind]
    f32 = ir.F32Type.get()
    wide = _as(value, f32)
    kept = [d for d in range(len(shape)) if d not in summed]
    greatest = _maximum(cast(Value, stablehlo.abs(wide)), summed, [shape[d] for d in kept])
    zero = _filled(greatest, 0.0)
    empty = stablehlo.compare(
        greatest, zero, ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
    )
    scale = stablehlo.select(
        empty, _filled(greatest, 1.0), stablehlo.divide(greatest, _filled(greatest, top))
    )
    whole = ir.RankedTensorType.get(shape, f32)
    spread = stablehlo.broadcast_in_dim(whole, scale, ir.DenseI64ArrayAttr.get(kept))
    number = cast(Value, stablehlo.divide(wide, spread))
    if kind != "float8_e4m3fn":
        number = cast(Value, stablehlo.round_nearest_even(number))
    number = cast(Value, stablehlo.clamp(_filled(number, -top), number, _filled(number, top)))
    return _as(number, _element(kind)), cast(Value, scale)


def _in_result(scale: Value, dot: ir.Operation, side: int, shape: Sequence[int]) -> Value:
    """The scales of an operand, spread over the result of its product."""
    numbers = dot_numbers(dot)
    ranks = [len(shape_of(value)) for value in dot.operands]
    batch = len(numbers[0])
    kept = [d for d in range(ranks[side]) if d not in numbers[2 + side]]
    free = [d for d in kept if d not in numbers[side]]
    first = batch + (ranks[0] - batch - len(numbers[2]) if side else 0)
    places = [numbers[side].index(d) if d in numbers[side] else first + free.index(d) for d in kept]
    # A broadcast wants its dimensions in order, those of the result.
    order = sorted(range(len(places)), key=places.__getitem__)
    if order != list(range(len(places))):
        scale = cast(Value, stablehlo.transpose(scale, order))
    whole = ir.RankedTensorType.get(list(shape), ir.F32Type.get())
    dims = ir.DenseI64ArrayAttr.get(sorted(places))
    return cast(Value, stablehlo.broadcast_in_dim(whole, scale, dims))


def _maximum(value: Value, dims: Sequence[int], shape: Sequence[int]) -> Value:
    """The largest element over some dimensions."""
    f32 = ir.F32Type.get()
    scalar = ir.RankedTensorType.get([], f32)
    start = stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(f32, 0.0)))
    made = ir.Operation.create(
        "stablehlo.reduce",
        results=[ir.RankedTensorType.get(list(shape), f32)],
        operands=[value, start],
        attributes={"dimensions": ir.DenseI64ArrayAttr.get(sorted(dims))},
        regions=1,
    )
    location = made.location
    body = made.regions[0].blocks.append(scalar, scalar, arg_locs=[location] * 2)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.maximum(body.arguments[0], body.arguments[1])])
    return cast(Value, made.results[0])


def _filled(like: Value, number: float) -> Value:
    kind = ir.RankedTensorType(like.type)
    attribute = ir.FloatAttr.get(kind.element_type, number)
    return cast(Value, stablehlo.constant(ir.DenseElementsAttr.get_splat(kind, attribute)))


def _as(value: Value, element: ir.Type) -> Value:
    kind = ir.RankedTensorType(value.type)
    if kind.element_type == element:
        return value
    return cast(Value, stablehlo.convert(ir.RankedTensorType.get(list(kind.shape), element), value))


def _element(kind: Narrow) -> ir.Type:
    if kind == "float8_e4m3fn":
        return ir.Float8E4M3FNType.get()
    return ir.IntegerType.get_signless(BITS[kind])
