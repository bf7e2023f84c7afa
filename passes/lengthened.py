"""Makes dimensions that run together longer, in place; arguments and results keep their shapes."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.counting import combiner_of
from autoshard.passes.contraction import DOT
from autoshard.passes.loop_exchanges import following
from autoshard.passes.patterns import maker_of
from autoshard.passes.running_dims import Component, Use
from autoshard.program import Value, shape_of


def can_lengthen(component: Component) -> bool:
    """Whether every op that reads one of the dimensions takes all of a value's, or none."""
    wanted = _by_value(component)
    taken: dict[tuple[ir.Operation, int], set[int]] = defaultdict(set)
    for op, k, d in _uses(component):
        taken[op, k].add(d)
    return all(dims == wanted[op.operands[k]] for (op, k), dims in taken.items())


def lengthen(component: Component, size: int) -> None:
    """Pad dimensions that run together up to a size.

    Args:
        component: The dimensions, see :func:`can_lengthen`.
        size: Their new size.
    """
    wanted = _by_value(component)
    made = {value for link in component.links for value, _ in link.made}
    inside = {(op, k) for op, k, _ in _uses(component)}
    # Asked before anything is changed: the hash of an op is one of what it reads and makes.
    readers = {value: [(op, k, (op, k) in inside) for op, k in _readers(value)] for value in wanted}
    padded: set[Value] = set()
    for value, dims in wanted.items():
        whole = [size if d in dims else n for d, n in enumerate(shape_of(value))]
        before = list(shape_of(value))
        if value in made:
            outside = [(op, k) for op, k, is_inside in readers[value] if not is_inside]
            element = ir.RankedTensorType(value.type).element_type
            value.set_type(ir.RankedTensorType.get(whole, element))
            if outside:
                cut = _cut(value, before)
                for op, k in outside:
                    op.operands[k] = cut
        else:
            longer = _padded(value, whole)
            padded.add(longer)
            for op, k, is_inside in readers[value]:
                if is_inside:
                    op.operands[k] = longer
    for link in component.links:
        _adapt(link.op)
    for link in component.links:
        for use in link.uses if link.kind == "sum" else ():
            _mask(use, component.size, padded)
        if link.kind == "index":
            _clamp(link.op, component.size)


def _by_value(component: Component) -> dict[Value, set[int]]:
    found: dict[Value, set[int]] = defaultdict(set)
    for value, d in component.dims:
        found[value].add(d)
    return found


def _uses(component: Component) -> list[Use]:
    return [use for link in component.links for use in link.uses]


def _readers(value: Value) -> list[tuple[ir.Operation, int]]:
    return [(use.owner.operation, use.operand_number) for use in value.uses]


def _after(value: Value) -> ir.Operation:
    """The op before which something can be made of a value at the earliest."""
    maker = maker_of(value)
    if maker is not None:
        return following(maker)
    return cast(ir.Operation, cast(ir.Block, value.owner).operations[0]).operation


def _padded(value: Value, whole: list[int]) -> Value:
    """A value with zeros behind it."""
    before, more = _after(value), [n - m for n, m in zip(whole, shape_of(value), strict=True)]
    element = ir.RankedTensorType(value.type).element_type
    with before.location, ir.InsertionPoint(before):
        zero = stablehlo.constant(_splat(ir.RankedTensorType.get([], element), 0))
        none = [0] * len(more)
        return cast(Value, stablehlo.pad(value, zero, none, more, none))


def _cut(value: Value, shape: list[int]) -> Value:
    before = _after(value)
    with before.location, ir.InsertionPoint(before):
        return cast(Value, stablehlo.slice(value, [0] * len(shape), shape, [1] * len(shape)))


def _adapt(op: ir.Operation) -> None:
    """Bring what an op's attributes say of sizes up to date."""
    shapes = [shape_of(value) for value in op.operands]
    if op.name == "stablehlo.slice":
        before = list(ir.DenseI64ArrayAttr(op.attributes["limit_indices"]))
        starts = list(ir.DenseI64ArrayAttr(op.attributes["start_indices"]))
        strides = list(ir.DenseI64ArrayAttr(op.attributes["strides"]))
        after = shape_of(op.results[0])
        limits = [
            s + n if stride == 1 else limit
            for s, n, stride, limit in zip(starts, after, strides, before, strict=True)
        ]
        op.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)
    elif op.name == "stablehlo.dynamic_slice":
        op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(list(shape_of(op.results[0])))
    elif op.name == "stablehlo.constant":
        scalar = ir.DenseElementsAttr(op.attributes["value"]).get_splat_value()
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(op.results[0].type, scalar)
    elif op.name == "stablehlo.gather":
        numbers: Any = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        window = [d for d in range(len(shapes[0])) if d not in gone]
        for d, out in zip(window, numbers.offset_dims, strict=True):
            sizes[d] = shape_of(op.results[0])[out]
        op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)


def _mask(use: Use, size: int, padded: set[Value]) -> None:
    """Replace the padding of what is summed over by what changes no sum."""
    op, k, d = use
    value = op.operands[k]
    combiner = "stablehlo.add" if op.name == DOT else combiner_of(op)
    if value in padded and combiner in ("stablehlo.add", "stablehlo.or"):
        return  # by zeros already
    shape, element = shape_of(value), ir.RankedTensorType(value.type).element_type
    i32 = ir.IntegerType.get_signless(32)
    with op.location, ir.InsertionPoint(op):
        places = ir.RankedTensorType.get(list(shape), i32)
        place = stablehlo.iota(places, ir.IntegerAttr.get(ir.IntegerType.get_signless(64), d))
        end = stablehlo.constant(_splat(places, size))
        less = ir.Attribute.parse("#stablehlo<comparison_direction LT>")
        neutral = stablehlo.constant(_neutral(value.type, element, combiner))
        real = stablehlo.compare(place, end, less)
        op.operands[k] = stablehlo.select(real, value, neutral)


def _neutral(kind: ir.Type, element: ir.Type, combiner: str) -> ir.Attribute:
    """A constant that changes nothing when it is combined."""
    name = combiner.removeprefix("stablehlo.")
    if name in ("add", "or"):
        return _splat(kind, 0)
    if name == "multiply":
        return _splat(kind, 1)
    if isinstance(element, ir.FloatType):
        return _splat(kind, -math.inf if name == "maximum" else math.inf)
    bits = ir.IntegerType(element).width
    if name == "and":
        return _splat(kind, 1 if bits == 1 else -1)
    unsigned = bits == 1 or ir.IntegerType(element).is_unsigned
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return _splat(kind, low if name == "maximum" else high)


def _splat(kind: ir.Type, number: float) -> ir.Attribute:
    element = ir.RankedTensorType(kind).element_type
    if isinstance(element, ir.ComplexType):
        return ir.Attribute.parse(f"dense<({float(number)}, 0.0)> : {kind}")
    if isinstance(element, ir.FloatType):
        return ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(element, float(number)))
    if ir.IntegerType(element).width == 1:
        return ir.Attribute.parse(f"dense<{'true' if number else 'false'}> : {kind}")
    return ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(element, int(number)))


def _clamp(op: ir.Operation, size: int) -> None:
    """Keep an index where it was clamped to before: a gather clamps to the operand it has."""
    indices = op.operands[1]
    element = ir.RankedTensorType(indices.type).element_type
    scalar = ir.RankedTensorType.get([], element)
    with op.location, ir.InsertionPoint(op):
        low, high = (stablehlo.constant(_splat(scalar, n)) for n in (0, size - 1))
        op.operands[1] = stablehlo.clamp(low, indices, high)
