"""From collectives between shardings to the collectives of one device's program.

Shardy writes a collective as the sharding that its result has (``sdy.all_gather`` ...). XLA takes
StableHLO collectives: lists of devices that exchange pieces. Devices are numbered as in the mesh,
row-major, which is how ``jit`` numbers partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.extend.mlir import ir

from autoshard.child import UnsupportedError
from autoshard.local import step_of
from autoshard.shardings import MeshShape, Sharding, local_shape

Value: TypeAlias = "ir.Value[Any]"

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_slice": "slice",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "permute",
}
"""Shardy's ops that move one tensor between shardings, and the step that each must be."""


def replica_groups(mesh: MeshShape, axes: Sequence[str]) -> list[list[int]]:
    """The groups of devices that differ along ``axes`` only, each in the order of ``axes``.

    Examples:
        >>> replica_groups(MeshShape(("x", "y"), (2, 2)), ("x",))
        [[0, 2], [1, 3]]
    """
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    moved = [mesh.names.index(a) for a in axes]
    rest = [d for d in range(len(mesh.sizes)) if d not in moved]
    groups: list[list[int]] = ids.transpose(*rest, *moved).reshape(-1, mesh.size(axes)).tolist()
    return groups


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
        self,
        before: ir.Operation,
        value: Value,
        kind: str,
        source: Sharding,
        target: Sharding,
        whole: Sequence[int],
    ) -> Value:
        """One single step of a reshard; pieces that their axes do not divide are padded.

        Args:
            before: What it is written before.
            value: The device's piece under ``source``.
            kind: What Shardy makes of the step.
            source: Sharding before.
            target: Sharding after.
            whole: Shape of the whole tensor.

        Raises:
            UnsupportedError: The shardings are not one step of that kind apart.
        """
        step, axes, dim = step_of(source, target)
        if step != kind:
            raise UnsupportedError(f"Shardy makes a {kind} of the step {source} -> {target}")
        count = self.mesh.size(axes)
        after = local_shape(tuple(whole), target, self.mesh)
        shape = list(_shape(value))
        if kind == "permute":
            pairs = permutation(self.mesh, source, target)
            attributes = {"source_target_pairs": _integers(pairs)}
            return self._collective(before, "collective_permute", value, shape, attributes)
        if kind != "all_gather":  # ``dim`` grows more axes
            value = self.padded(before, value, dim, after[dim] * count)
        if kind == "slice":
            return self.piece(before, value, {dim: axes})
        shape = list(_shape(value))
        attributes = {"replica_groups": _integers(replica_groups(self.mesh, axes))}
        if kind == "all_gather":
            shape[dim] *= count
            attributes |= {"all_gather_dim": _i64(dim), "use_global_device_ids": ir.UnitAttr.get()}
            made = self._collective(before, "all_gather", value, shape, attributes)
            return self.cropped(before, made, dim, after[dim])
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
        made = self._collective(before, "all_to_all", value, shape, attributes)
        return self.cropped(before, made, shrunk, after[shrunk])

    def reduce(
        self, before: ir.Operation, value: Value, axes: Sequence[str], combiner: str, dim: int = -1
    ) -> Value:
        """Combine partial results over ``axes``; with ``dim``, every device keeps its piece."""
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
        body = (
            cast(ir.Operation, made.owner)
            .regions[0]
            .blocks.append(element, element, arg_locs=[location] * 2)
        )
        with ir.InsertionPoint(body):
            combined = ir.Operation.create(
                combiner, results=[element], operands=list(body.arguments), loc=location
            )
            ir.Operation.create("stablehlo.return", operands=[combined.results[0]], loc=location)
        return made

    def padded(self, before: ir.Operation, value: Value, dim: int, size: int) -> Value:
        """A value with one dimension lengthened to ``size`` by zeros."""
        shape = list(_shape(value))
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
        shape = list(_shape(value))
        if shape[dim] == size:
            return value
        return self.section(before, value, dim, 0, size)

    def section(self, before: ir.Operation, value: Value, dim: int, start: int, stop: int) -> Value:
        """The elements from ``start`` to ``stop`` along one dimension."""
        shape = list(_shape(value))
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
        shape, element = _shape(value), ir.RankedTensorType(value.type).element_type
        i32 = ir.IntegerType.get_signless(32)
        where = {"iota_dimension": _i64(dim)}
        place = self.create(before, "iota", [], shape, i32, where)
        first = self.spread(before, self.offset(before, axes, shape[dim]), shape, ())
        place = self.create(before, "add", [place, first], shape)
        real = self.compare(before, "LT", place, self.constant(before, i32, size, shape))
        filling = self.spread(before, start, shape, ())
        return self.create(before, "select", [real, value, filling], shape, element)

    def piece(self, before: ir.Operation, value: Value, split: dict[int, tuple[str, ...]]) -> Value:
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
        table = ir.Attribute.parse(f"dense<{list(numbers)}> : tensor<{len(numbers)}xi32>")
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
        attributes: Mapping[str, ir.Attribute] | None = None,
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
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> Value:
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


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _i64(number: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def _integers(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    text = f"dense<{[list(row) for row in rows]}> : tensor<{len(rows)}x{len(rows[0])}xi64>"
    return ir.Attribute.parse(text)
