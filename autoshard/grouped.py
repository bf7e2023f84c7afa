"""Convolutions with groups, as one device runs them on its pieces.

XLA's partitioner gathers the operands of such a convolution, or computes other values, so it is run
piecewise (see :mod:`autoshard.piecewise`). Batch groups become feature groups on the way: output
features of group *g* see the images of group *g*, which is the same as images that have the
features of every group. XLA:CPU would convolve each group's images with all features and throw most
of the result away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.program import Value, shape_of


def is_grouped(operation: ir.Operation) -> bool:
    """Whether an op is a convolution with more than one group."""
    return operation.name == "stablehlo.convolution" and max(_groups(operation)) > 1


def _groups(operation: ir.Operation) -> tuple[int, int]:
    """How many feature groups and batch groups."""
    feature, batch = (
        ir.IntegerAttr(operation.attributes[f"{kind}_group_count"]).value
        for kind in ("feature", "batch")
    )
    return feature, batch


def regroup(operation: ir.Operation, whole: Sequence[int]) -> ir.Operation:
    """Replace a grouped convolution by one of the groups that its operand still has.

    Args:
        operation: The convolution, of a whole operand or of a device's piece. It is erased.
        whole: Shape of the whole first operand.

    Returns:
        A convolution with feature groups alone.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    batch, feature = numbers.input_batch_dimension, numbers.input_feature_dimension
    by_batch = _groups(operation)[1] > 1
    grouped = batch if by_batch else feature
    lhs, kernel = operation.operands
    # Groups are the major part of their dimension: they are split before what is in them.
    count = max(1, max(_groups(operation)) * shape_of(lhs)[grouped] // whole[grouped])
    one, many = (ir.IntegerAttr.get(ir.IntegerType.get_signless(64), n) for n in (1, count))
    with ir.InsertionPoint(operation), operation.location:
        made = ir.Operation.create(
            operation.name,
            results=[operation.results[0].type],
            operands=[_into_features(lhs, batch, feature, count) if by_batch else lhs, kernel],
            attributes={name: operation.attributes[name] for name in operation.attributes}
            | {"feature_group_count": many, "batch_group_count": one},
        )
    operation.results[0].replace_all_uses_with(made.results[0])
    operation.erase()
    return made


def _into_features(lhs: Value, batch: int, feature: int, groups: int) -> Value:
    """Make the groups, which are major in the batch dimension, major in the feature dimension."""
    whole, kind = shape_of(lhs), ir.RankedTensorType(lhs.type).element_type
    split = [*whole[:batch], groups, whole[batch] // groups, *whole[batch + 1 :]]
    order = [d for d in range(len(split)) if d != batch]
    order.insert(order.index(feature + (feature > batch)), batch)
    merged = list(whole)
    merged[batch] //= groups
    merged[feature] *= groups
    cut = stablehlo.reshape(ir.RankedTensorType.get(split, kind), lhs)
    turned = stablehlo.transpose(cut, ir.DenseI64ArrayAttr.get(order))
    return cast(Value, stablehlo.reshape(ir.RankedTensorType.get(merged, kind), turned))
