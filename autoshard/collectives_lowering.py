"""From collectives between shardings to the collectives of one device's program.

Shardy writes a collective as the sharding that its result has (``sdy.all_gather`` ...). XLA takes
StableHLO collectives: lists of devices that exchange pieces. Devices are numbered as in the mesh,
row-major, which is how ``jit`` numbers partitions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.extend.mlir import ir

from autoshard.local import step_of
from autoshard.shardings import MeshShape, Sharding

Value: TypeAlias = "ir.Value[Any]"

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_slice": "slice",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "permute",
}
"""Shardy's ops that move one tensor between shardings, and the step that each must be."""


class UnsupportedError(Exception):
    """A program that cannot be partitioned here; says what stands in the way."""


def replica_groups(mesh: MeshShape, axes: Sequence[str]) -> list[list[int]]:
    """The groups of devices that differ along ``axes`` only, each in the order of ``axes``.

    Examples:
        >>> replica_groups(MeshShape(("x", "y"), (2, 2)), ("x",))
        [[0, 2], [1, 3]]
    """
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    moved = [mesh.names.index(a) for a in axes]
    rest = [d for d in range(len(mesh.sizes)) if d not in moved]
    groups = ids.transpose(*rest, *moved).reshape(-1, mesh.size(axes))
    return cast("list[list[int]]", groups.tolist())


def permutation(mesh: MeshShape, source: Sharding, target: Sharding) -> list[tuple[int, int]]:
    """Pairs (sender, receiver) after which every device has its piece under ``target``.

    A device that has its piece already keeps it.

    Examples:
        >>> permutation(MeshShape(("x", "y"), (2, 2)), (("x",),), (("y",),))
        [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    have, want = _pieces(mesh, source), _pieces(mesh, target)
    pairs = {d: d for d in range(mesh.devices) if have[d] == want[d]}
    senders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, piece in enumerate(have):
        if device not in pairs:
            senders[piece].append(device)
    for device, piece in enumerate(want):
        if device not in pairs:
            pairs[device] = senders[piece].pop(0)
    return [(pairs[d], d) for d in range(mesh.devices)]


def _pieces(mesh: MeshShape, sharding: Sharding) -> list[tuple[int, ...]]:
    """Per device, which piece along each dimension it holds."""
    return [
        tuple(_position(mesh, device, axes) for axes in sharding) for device in range(mesh.devices)
    ]


def _position(mesh: MeshShape, device: int, axes: Sequence[str]) -> int:
    """Number of a device among those along ``axes``."""
    place = np.unravel_index(device, mesh.sizes)
    position = 0
    for axis in axes:
        k = mesh.names.index(axis)
        position = position * mesh.sizes[k] + int(place[k])
    return position


class Emitter:
    """Writes ops of one device's program before a given op.

    Args:
        mesh: The mesh.
        channel: A channel id that nothing in the program uses; the following ones are free too.
    """

    def __init__(self, mesh: MeshShape, channel: int) -> None:
        self.mesh = mesh
        self.channel = channel

    def step(
        self, before: ir.Operation, value: Value, kind: str, source: Sharding, target: Sharding
    ) -> Value:
        """One single step of a reshard.

        Raises:
            UnsupportedError: The shardings are not one step of that kind apart.
        """
        step, axes, dim = step_of(source, target)
        if step != kind:
            raise UnsupportedError(f"Shardy makes a {kind} of the step {source} -> {target}")
        if kind == "slice":
            return self.piece(before, value, {dim: axes})
        shape = list(_shape(value))
        count = self.mesh.size(axes)
        if kind == "permute":
            pairs = permutation(self.mesh, source, target)
            attributes = {"source_target_pairs": _integers(pairs)}
            return self._collective(before, "collective_permute", value, shape, attributes)
        attributes = {"replica_groups": _integers(replica_groups(self.mesh, axes))}
        if kind == "all_gather":
            shape[dim] *= count
            attributes |= {"all_gather_dim": _i64(dim), "use_global_device_ids": ir.UnitAttr.get()}
            return self._collective(before, "all_gather", value, shape, attributes)
        (shrunk,) = (
            d for d, (s, t) in enumerate(zip(source, target, strict=True)) if len(t) < len(s)
        )
        shape[shrunk] *= count
        shape[dim] //= count
        attributes |= {
            "split_dimension": _i64(dim),
            "concat_dimension": _i64(shrunk),
            "split_count": _i64(count),
        }
        return self._collective(before, "all_to_all", value, shape, attributes)

    def reduce(
        self, before: ir.Operation, value: Value, axes: Sequence[str], combiner: str, dim: int = -1
    ) -> Value:
        """Combine partial results over ``axes``; with ``dim``, each device keeps its piece of it."""
        shape = list(_shape(value))
        attributes: dict[str, ir.Attribute] = {
            "replica_groups": _integers(replica_groups(self.mesh, axes)),
            "use_global_device_ids": ir.UnitAttr.get(),
        }
        name = "all_reduce"
        if dim >= 0:
            name = "reduce_scatter"
            shape[dim] //= self.mesh.size(axes)
            attributes["scatter_dimension"] = _i64(dim)
        made = self._collective(before, name, value, shape, attributes, regions=1)
        element = ir.RankedTensorType.get([], ir.RankedTensorType(value.type).element_type)
        location = before.location
        body = made.owner.regions[0].blocks.append(element, element, arg_locs=[location] * 2)
        with ir.InsertionPoint(body):
            combined = ir.Operation.create(
                combiner, results=[element], operands=list(body.arguments), loc=location
            )
            ir.Operation.create("stablehlo.return", operands=[combined.results[0]], loc=location)
        return made

    def piece(
        self, before: ir.Operation, value: Value, split: dict[int, tuple[str, ...]]
    ) -> Value:
        """The device's piece of a value: per dimension, the axes that split it."""
        shape = list(_shape(value))
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

    def offset(self, before: ir.Operation, axes: Sequence[str], size: int) -> Value:
        """Where the device's piece of ``size`` starts in a dimension split by ``axes``: ``i32``."""
        positions = [_position(self.mesh, d, axes) * size for d in range(self.mesh.devices)]
        return self.per_device(before, positions)

    def per_device(self, before: ir.Operation, numbers: Sequence[int]) -> Value:
        """A scalar ``i32`` that is another number on each device."""
        i32 = ir.IntegerType.get_signless(32)
        if len(set(numbers)) == 1:
            return self.constant(before, i32, numbers[0])
        table = ir.DenseElementsAttr.get(np.array(numbers, np.int32))
        listed = self._create(
            before, "constant", [], [len(numbers)], i32, attributes={"value": table}
        )
        here = self._create(before, "partition_id", [], [], ir.IntegerType.get_unsigned(32))
        entry = self._create(
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
            zero = self._create(
                before, "constant", [], [], element, attributes={"value": ir.Attribute.parse(text)}
            )
            return self.spread(before, zero, shape, ()) if shape else zero
        else:
            scalar = ir.IntegerAttr.get(element, number)
        type_ = ir.RankedTensorType.get(list(shape), element)
        value = ir.DenseElementsAttr.get_splat(type_, scalar)
        return self._create(before, "constant", [], shape, element, attributes={"value": value})

    def spread(
        self, before: ir.Operation, value: Value, shape: Sequence[int], dims: Sequence[int]
    ) -> Value:
        """A value broadcast to ``shape``, its dimensions becoming ``dims``."""
        where = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(list(dims))}
        return self.create(before, "broadcast_in_dim", [value], shape, attributes=where)

    def create(
        self,
        before: ir.Operation,
        name: str,
        operands: Sequence[Value],
        shape: Sequence[int],
        element: ir.Type | None = None,
        attributes: dict[str, ir.Attribute] | None = None,
    ) -> Value:
        """A StableHLO op with one result, of the element type of its first operand if not given."""
        made = element or ir.RankedTensorType(operands[0].type).element_type
        return self._create(before, name, operands, shape, made, attributes)

    def compare(self, before: ir.Operation, how: str, lhs: Value, rhs: Value) -> Value:
        """An elementwise comparison of signed or unsigned integers."""
        element = ir.IntegerType(ir.RankedTensorType(lhs.type).element_type)
        kind = "UNSIGNED" if element.is_unsigned or element.width == 1 else "SIGNED"
        attributes = {
            "comparison_direction": ir.Attribute.parse(f"#stablehlo<comparison_direction {how}>"),
            "compare_type": ir.Attribute.parse(f"#stablehlo<comparison_type {kind}>"),
        }
        truth = ir.IntegerType.get_signless(1)
        return self._create(before, "compare", [lhs, rhs], _shape(lhs), truth, attributes)

    def _collective(
        self,
        before: ir.Operation,
        name: str,
        value: Value,
        shape: Sequence[int],
        attributes: dict[str, ir.Attribute],
        regions: int = 0,
    ) -> Value:
        handle = f"#stablehlo.channel_handle<handle = {self.channel}, type = 1>"
        self.channel += 1
        attributes["channel_handle"] = ir.Attribute.parse(handle)
        element = ir.RankedTensorType(value.type).element_type
        return self._create(before, name, [value], shape, element, attributes, regions)

    def _create(
        self,
        before: ir.Operation,
        name: str,
        operands: Sequence[Value],
        shape: Sequence[int],
        element: ir.Type,
        attributes: dict[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> Value:
        made = ir.Operation.create(
            f"stablehlo.{name}",
            results=[ir.RankedTensorType.get(list(shape), element)],
            operands=list(operands),
            attributes=attributes or {},
            regions=regions,
            loc=before.location,
            ip=ir.InsertionPoint(before),
        )
        return cast(Value, made.results[0])


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _i64(number: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def _integers(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    return ir.DenseElementsAttr.get(np.array(rows, np.int64).reshape(len(rows), -1))
