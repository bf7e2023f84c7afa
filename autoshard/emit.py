"""Writes the ops of one device's program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.extend.mlir import ir

from autoshard.program import shape_of
from autoshard.shardings import MeshShape

Value: TypeAlias = "ir.Value[Any]"


def position(mesh: MeshShape, device: int, axes: Sequence[str]) -> int:
    """Number of a device among those along ``axes``, the first of which is the major one."""
    place = np.unravel_index(device, mesh.sizes)
    number = 0
    for axis in axes:
        k = mesh.names.index(axis)
        number = number * mesh.sizes[k] + int(place[k])
    return number


def i64(number: int) -> ir.Attribute:
    """An integer attribute as StableHLO writes dimensions."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


class Emitter:
    """Writes ops of one device's program before a given op.

    Args:
        mesh: The mesh.
        channel: A channel id that nothing in the program uses; the following ones are free too.
    """

    def __init__(self, mesh: MeshShape, channel: int) -> None:
        self.mesh = mesh
        self.channels = itertools.count(channel)

    def piece(self, before: ir.Operation, value: Value, split: dict[int, tuple[str, ...]]) -> Value:
        """The device's piece of a value: per dimension, the axes that split it."""
        shape = list(shape_of(value))
        starts = []
        for dim, size in enumerate(shape):
            axes = split.get(dim, ())
            shape[dim] = size // self.mesh.size(axes)
            starts.append(self.offset(before, axes, shape[dim]))
        return self.create(
            before,
            "dynamic_slice",
            [value, *starts],
            shape,
            attributes={"slice_sizes": ir.DenseI64ArrayAttr.get(shape)},
        )

    def padded(self, before: ir.Operation, value: Value, dim: int, size: int) -> Value:
        """A value with one dimension lengthened to ``size`` by zeros."""
        shape = list(shape_of(value))
        if shape[dim] == size:
            return value
        more = [size - n if d == dim else 0 for d, n in enumerate(shape)]
        shape[dim] = size
        zero = self.constant(before, ir.RankedTensorType(value.type).element_type, 0)
        none = ir.DenseI64ArrayAttr.get([0] * len(shape))
        attributes = {
            "edge_padding_low": none,
            "edge_padding_high": ir.DenseI64ArrayAttr.get(more),
            "interior_padding": none,
        }
        return self.create(before, "pad", [value, zero], shape, attributes=attributes)

    def cropped(self, before: ir.Operation, value: Value, dim: int, size: int) -> Value:
        """The first ``size`` elements along one dimension."""
        shape = list(shape_of(value))
        if shape[dim] == size:
            return value
        return self.section(before, value, dim, 0, size)

    def section(self, before: ir.Operation, value: Value, dim: int, start: int, stop: int) -> Value:
        """The elements from ``start`` to ``stop`` along one dimension."""
        shape = list(shape_of(value))
        low = [start if d == dim else 0 for d in range(len(shape))]
        high = [stop if d == dim else n for d, n in enumerate(shape)]
        shape[dim] = stop - start
        bounds = {"start_indices": low, "limit_indices": high, "strides": [1] * len(shape)}
        attributes = {name: ir.DenseI64ArrayAttr.get(n) for name, n in bounds.items()}
        return self.create(before, "slice", [value], shape, attributes=attributes)

    def masked(
        self, before: ir.Operation, value: Value, start: Value, dim: int, axes: Sequence[str],
        size: int,
    ) -> Value:  # fmt: skip
        """A device's piece with its padding along one dimension replaced by the scalar ``start``.

        Args:
            before: What it is written before.
            value: The piece.
            start: What to put there.
            dim: The dimension.
            axes: The axes that split it.
            size: Its true size in the whole tensor.
        """
        shape, element = shape_of(value), ir.RankedTensorType(value.type).element_type
        i32 = ir.IntegerType.get_signless(32)
        where = {"iota_dimension": i64(dim)}
        place = self.create(before, "iota", [], shape, i32, where)
        first = self.spread(before, self.offset(before, axes, shape[dim]), shape, ())
        place = self.create(before, "add", [place, first], shape)
        real = self.compare(before, "LT", place, self.constant(before, i32, size, shape))
        filling = self.spread(before, start, shape, ())
        return self.create(before, "select", [real, value, filling], shape, element)

    def offset(self, before: ir.Operation, axes: Sequence[str], size: int) -> Value:
        """Where the device's piece of ``size`` starts in a dimension split by ``axes``: ``i32``."""
        positions = [position(self.mesh, d, axes) * size for d in range(self.mesh.devices)]
        return self.per_device(before, positions)

    def per_device(self, before: ir.Operation, numbers: Sequence[int]) -> Value:
        """A scalar ``i32`` that is another number on each device."""
        i32 = ir.IntegerType.get_signless(32)
        if len(set(numbers)) == 1:
            return self.constant(before, i32, numbers[0])
        table = ir.Attribute.parse(f"dense<{list(numbers)}> : tensor<{len(numbers)}xi32>")
        listed = self.op(before, "constant", [], [len(numbers)], i32, attributes={"value": table})
        here = self.op(before, "partition_id", [], [], ir.IntegerType.get_unsigned(32))
        entry = self.op(
            before,
            "dynamic_slice",
            [listed, here],
            [1],
            i32,
            attributes={"slice_sizes": ir.DenseI64ArrayAttr.get([1])},
        )
        return self.create(before, "reshape", [entry], [])

    def constant(
        self, before: ir.Operation, element: ir.Type, number: int, shape: Sequence[int] = ()
    ) -> Value:
        """A constant of some shape, all of whose elements are ``number``."""
        if isinstance(element, ir.FloatType):
            scalar: ir.Attribute = ir.FloatAttr.get(element, float(number))
        elif isinstance(element, ir.ComplexType):
            text = f"dense<({number}.0, {number}.0)> : tensor<{element}>"
            zero = self.op(
                before, "constant", [], [], element, attributes={"value": ir.Attribute.parse(text)}
            )
            return self.spread(before, zero, shape, ()) if shape else zero
        else:
            scalar = ir.IntegerAttr.get(element, number)
        type_ = ir.RankedTensorType.get(list(shape), element)
        value = ir.DenseElementsAttr.get_splat(type_, scalar)
        return self.op(before, "constant", [], shape, element, attributes={"value": value})

    def spread(
        self, before: ir.Operation, value: Value, shape: Sequence[int], dims: Sequence[int]
    ) -> Value:
        """A value broadcast to ``shape``, its dimensions becoming ``dims``."""
        where = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(list(dims))}
        return self.create(before, "broadcast_in_dim", [value], shape, attributes=where)

    def compare(self, before: ir.Operation, how: str, lhs: Value, rhs: Value) -> Value:
        """An elementwise comparison of signed or unsigned integers."""
        element = ir.IntegerType(ir.RankedTensorType(lhs.type).element_type)
        kind = "UNSIGNED" if element.is_unsigned or element.width == 1 else "SIGNED"
        attributes = {
            "comparison_direction": ir.Attribute.parse(f"#stablehlo<comparison_direction {how}>"),
            "compare_type": ir.Attribute.parse(f"#stablehlo<comparison_type {kind}>"),
        }
        truth = ir.IntegerType.get_signless(1)
        return self.op(before, "compare", [lhs, rhs], shape_of(lhs), truth, attributes)

    def create(
        self,
        before: ir.Operation,
        name: str,
        operands: Sequence[Value],
        shape: Sequence[int],
        element: ir.Type | None = None,
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> Value:
        """A StableHLO op with one result, of the element type of its first operand if not given."""
        made = element or ir.RankedTensorType(operands[0].type).element_type
        return self.op(before, name, operands, shape, made, attributes)

    def op(
        self,
        before: ir.Operation,
        name: str,
        operands: Sequence[Value],
        shape: Sequence[int],
        element: ir.Type,
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> Value:
        """A StableHLO op with one result of a given shape and element type."""
        made = ir.Operation.create(
            f"stablehlo.{name}",
            results=[ir.RankedTensorType.get(list(shape), element)],
            operands=list(operands),
            attributes=dict(attributes or {}),
            regions=regions,
            loc=before.location,
            ip=ir.InsertionPoint(before),
        )
        return cast(Value, made.results[0])
