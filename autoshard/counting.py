"""How much an op computes and how often a loop runs, read off the module."""

from __future__ import annotations

import math

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.graph import ALIASES, Rule
from autoshard.program import MATERIALS, REGION_OPS, Value, is_token, shape_of, terminator
from autoshard.ragged import RAGGED_DOT, ragged_flops
from autoshard.rules import stated_flops


def flops_of(operation: ir.Operation, rule: Rule | None) -> float:
    """FLOP of one unsharded execution; a multiply-add counts two, any other element one.

    What the caller states of an op with a rule of theirs goes before that.
    """
    stated = stated_flops(operation)
    if stated is not None:
        return stated
    if operation.name == "stablehlo.dot_general" and rule is not None:
        return 2.0 * math.prod(rule.sizes)
    out = sum(math.prod(shape_of(v)) for v in operation.results if not is_token(v))
    if operation.name == "stablehlo.convolution":
        return _convolution_flops(operation)
    if operation.name == RAGGED_DOT:
        return ragged_flops(operation)
    if operation.name in REGION_OPS or operation.name in ALIASES | MATERIALS:
        return 0.0
    if len(operation.regions) and len(operation.operands):
        return float(math.prod(shape_of(operation.operands[0])))
    return float(out)


def _convolution_flops(operation: ir.Operation) -> float:
    """Products with real elements times two: padding and the holes of dilation cost nothing."""
    lhs, kernel, out = (
        tuple(ir.RankedTensorType(v.type).shape)
        for v in (operation.operands[0], operation.operands[1], operation.results[0])
    )
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    axes = len(numbers.input_spatial_dimensions)
    strides = _numbers(operation, "window_strides", axes, 1)
    low = _numbers(operation, "padding", 2 * axes, 0)[::2]
    holes = _numbers(operation, "lhs_dilation", axes, 1)
    spread = _numbers(operation, "rhs_dilation", axes, 1)
    products = 1
    for axis in range(axes):
        size = lhs[numbers.input_spatial_dimensions[axis]]
        starts = np.arange(out[numbers.output_spatial_dimensions[axis]]) * strides[axis] - low[axis]
        taps = np.arange(kernel[numbers.kernel_spatial_dimensions[axis]]) * spread[axis]
        read = starts[:, None] + taps[None, :]
        real = (read >= 0) & (read <= (size - 1) * holes[axis]) & (read % holes[axis] == 0)
        products *= int(real.sum())
    groups = ir.IntegerAttr(operation.attributes["batch_group_count"]).value
    features = kernel[numbers.kernel_input_feature_dimension]
    features *= kernel[numbers.kernel_output_feature_dimension]
    return 2.0 * products * features * (lhs[numbers.input_batch_dimension] // groups)


def _numbers(operation: ir.Operation, name: str, count: int, default: int) -> list[int]:
    """A list of integers among an op's attributes."""
    if name not in operation.attributes:
        return [default] * count
    attribute = operation.attributes[name]
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        return [int(n) for n in attribute]
    dense = ir.DenseIntElementsAttr(attribute)
    return [int(dense[0])] * count if dense.is_splat else [int(dense[i]) for i in range(count)]


def combiner_of(operation: ir.Operation) -> str:
    """The single op in the body of a reduction or scatter; empty if it is another thing."""
    if operation.name in REGION_OPS or len(operation.regions) != 1:
        return ""
    body = [op.operation for op in operation.regions[0].blocks[0].operations]
    return body[0].name if len(body) == 2 else ""


def _constant(value: Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return None
    attribute = ir.DenseElementsAttr(owner.attributes["value"])
    if not attribute.is_splat:
        return None
    try:
        return int(ir.DenseIntElementsAttr(attribute)[0])
    except (ValueError, TypeError):
        return None


def trip_count(loop: ir.Operation) -> int | None:
    """How often the body of a counting loop runs; None when the module does not say."""
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    test = terminator(condition).operands[0].owner
    if isinstance(test, ir.Block) or test.name != "stablehlo.compare":
        return None
    counter = test.operands[0]
    if not isinstance(counter.owner, ir.Block):
        return None
    position = [a == counter for a in condition.arguments].index(True)
    bound = _loop_invariant(loop, _unconverted(test.operands[1]), condition)
    start = _constant(loop.operands[position])
    step_op = terminator(body).operands[position].owner
    if bound is None or start is None or isinstance(step_op, ir.Block):
        return None
    if step_op.name != "stablehlo.add" or step_op.operands[0] != body.arguments[position]:
        return None
    step = _constant(step_op.operands[1])
    if not step or step < 0 or " LT" not in str(test.attributes["comparison_direction"]):
        return None
    return max(0, math.ceil((bound - start) / step))


def _loop_invariant(loop: ir.Operation, value: Value, condition: ir.Block) -> int | None:
    """A constant, seen by the condition or carried unchanged through the loop."""
    if not isinstance(value.owner, ir.Block):
        return _product(value)
    for position, argument in enumerate(condition.arguments):
        if argument == value:
            body = loop.regions[1].blocks[0]
            if terminator(body).operands[position] == body.arguments[position]:
                return _product(loop.operands[position])
    return None


def _unconverted(value: Value) -> Value:
    """The value before a conversion to its own type: Pallas counts the steps of a grid with one."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.convert":
        return value
    return owner.operands[0] if owner.operands[0].type == value.type else value


def _product(value: Value) -> int | None:
    """A constant, or the product of constants as which Pallas writes the steps of a grid."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.multiply":
        return _constant(value)
    left, right = (_product(operand) for operand in owner.operands)
    if left is None or right is None or abs(left * right) >= 2**31:
        return None  # it may wrap around
    return left * right
