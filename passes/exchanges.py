"""Collectives in one device's program: who exchanges what with whom, and how often.

Devices are numbered as partitions. Only collectives over groups of partitions are read, which is
what a program of one device holds; any other is none of these passes' business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from numpy.typing import NDArray

from autoshard.collectives_lowering import replica_groups
from autoshard.cost_models.protocol import CollectiveKind, wire_bytes
from autoshard.passes.contraction import executions
from autoshard.program import Value, main_block, operations, shape_of
from autoshard.shardings import MeshShape
from autoshard.written import integers

Groups = tuple[tuple[int, ...], ...]

KINDS: dict[str, CollectiveKind] = {
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "permute",
}

_CHANNEL = re.compile(r"handle = (\d+)")
_MESH = re.compile(r"mesh = @([\w.$-]+)")
_AXIS = re.compile(r'name = "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective.

    Attributes:
        op: The op.
        kind: What it does.
        groups: The devices of each group, in their order; of a permute, sender and receiver.
        dim: The dimension that is gathered or scattered; -1 for the others.
    """

    op: ir.Operation
    kind: CollectiveKind
    groups: Groups
    dim: int = -1

    @property
    def value(self) -> Value:
        """What is exchanged."""
        return cast(Value, self.op.operands[0])

    @property
    def result(self) -> Value:
        """What comes out."""
        return cast(Value, self.op.results[0])

    @property
    def devices(self) -> int:
        """Devices in each group."""
        return len(self.groups[0])

    @property
    def total(self) -> int:
        """Devices in all groups."""
        return sum(map(len, self.groups))

    @property
    def combiner(self) -> str:
        """The op that combines two values in a reduction; empty where there is another body."""
        if not len(self.op.regions):
            return ""
        body = [o.operation for o in self.op.regions[0].blocks[0].operations]
        if len(body) != 2 or list(body[1].operands) != list(body[0].results):
            return ""
        arguments = list(self.op.regions[0].blocks[0].arguments)
        return body[0].name if set(body[0].operands) == set(arguments) else ""

    @property
    def is_sum(self) -> bool:
        """Whether it adds floating-point or integer numbers up."""
        return self.combiner == "stablehlo.add"

    @property
    def nbytes(self) -> int:
        """Bytes on one device of the larger side, for one execution."""
        values = self.op.results if self.kind == "all_gather" else self.op.operands
        return sum(map(nbytes_of, values))

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in one execution, were it bandwidth-optimal."""
        if self.kind == "permute" and all(sender == receiver for sender, receiver in self.groups):
            return 0.0
        return wire_bytes(self.kind, self.nbytes, self.devices)


def exchange_of(operation: ir.Operation) -> Exchange | None:
    """The collective that an op is; None if it is none, or not among groups of partitions."""
    kind = KINDS.get(operation.name)
    if kind is None or not _is_among_partitions(operation):
        return None
    if kind == "permute":
        return Exchange(operation, kind, _rows(operation.attributes["source_target_pairs"]))
    groups = _groups(operation)
    if not groups or any(device < 0 for group in groups for device in group):
        return None
    name = {"all_gather": "all_gather_dim", "reduce_scatter": "scatter_dimension"}.get(kind)
    dim = -1 if name is None else int(ir.IntegerAttr(operation.attributes[name]).value)
    return Exchange(operation, kind, groups, dim)


def _is_among_partitions(operation: ir.Operation) -> bool:
    channel = operation.attributes["channel_handle"] if _has(operation, "channel_handle") else None
    if channel is None or not int(_CHANNEL.findall(str(channel))[0]):
        return False
    flat = operation.name in ("stablehlo.all_to_all", "stablehlo.collective_permute")
    return flat or _has(operation, "use_global_device_ids")


def _has(operation: ir.Operation, name: str) -> bool:
    return name in operation.attributes


def _groups(operation: ir.Operation) -> Groups | None:
    """The groups that an op lists, or names by the axes of a mesh (JAX 0.11 and later)."""
    attribute = operation.attributes["replica_groups"]
    if isinstance(attribute, ir.DenseElementsAttr):
        return _rows(attribute)
    text = str(attribute)
    named = _MESH.search(text)
    mesh = None if named is None or "sub_axis" in text else _mesh(operation, named[1])
    if mesh is None:
        return None
    axes = tuple(_AXIS.findall(text))
    rows = replica_groups(mesh, axes)
    return tuple(tuple(row) for row in rows)


def _mesh(operation: ir.Operation, name: str) -> MeshShape | None:
    """The mesh of that name in an op's module; None if it numbers devices in its own way."""
    around = operation
    while around.parent is not None:
        around = around.parent.operation
    for op in around.regions[0].blocks[0].operations:
        found = op.operation
        if found.name == "sdy.mesh" and ir.StringAttr(found.attributes["sym_name"]).value == name:
            mesh = sdy.MeshAttr(found.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            if list(mesh.device_ids):
                return None
            return MeshShape(tuple(a.name for a in axes), tuple(a.size for a in axes))
    return None


def _rows(attribute: ir.Attribute) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in integers(attribute))


def rows_attribute(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    """Groups or pairs as an attribute."""
    text = f"dense<{[list(row) for row in rows]}> : tensor<{len(rows)}x{len(rows[0])}xi64>"
    return ir.Attribute.parse(text)


def nbytes_of(value: Value) -> int:
    """Size of a value [bytes]; elements narrower than a byte are packed."""
    kind = ir.RankedTensorType(value.type)
    return -(-math.prod(shape_of(value)) * bits_of(kind.element_type) // 8)


def bits_of(element: ir.Type) -> int:
    """Bits of an element; a truth value takes a byte."""
    if isinstance(element, ir.ComplexType):
        return 2 * bits_of(element.element_type)
    if isinstance(element, ir.IntegerType | ir.FloatType):
        return 8 if element.width == 1 else int(element.width)
    return 32


def exchanges(module: ir.Module) -> Iterator[tuple[Exchange, int]]:
    """Every collective of a program and how often it runs; unknown trip counts count once."""
    for operation in operations(main_block(module)):
        found = exchange_of(operation)
        if found is not None:
            yield found, executions(operation)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the collectives of a program exchange in one call, on one device.

    Attributes:
        count: Collectives run.
        sent_bytes: Bytes sent, were every collective bandwidth-optimal.
    """

    count: int
    sent_bytes: float

    @classmethod
    def of(cls, module: ir.Module) -> Traffic:
        """Of a module that holds the program of one device."""
        found = list(exchanges(module))
        return cls(sum(n for _, n in found), sum(e.sent_bytes * n for e, n in found))


def per_device(value: Value, devices: int) -> NDArray[np.int64] | None:
    """What an integer scalar is on each device; None where that depends on data.

    Args:
        value: A scalar, or an array of one element.
        devices: How many there are.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    maker = cast(ir.Operation, owner).operation
    name = maker.name.removeprefix("stablehlo.")
    if name == "partition_id":
        return np.arange(devices)
    if name == "constant":
        number = _scalar(maker)
        return None if number is None else np.full(devices, number)
    if name == "dynamic_slice":
        return _looked_up(maker, devices)
    if name not in _SCALAR and name != "compare":
        return None
    operands = [per_device(operand, devices) for operand in maker.operands]
    if any(operand is None for operand in operands):
        return None
    known = cast("list[NDArray[np.int64]]", operands)
    if name == "compare":
        direction = str(maker.attributes["comparison_direction"]).split()[-1].rstrip(">")
        return np.asarray(_COMPARE[direction](known[0], known[1]), np.int64)
    return np.asarray(_SCALAR[name](*known), np.int64)


_COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def _truncated(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1)), np.int64)


_SCALAR: dict[str, Callable[..., NDArray[np.int64]]] = {
    "add": lambda a, b: a + b,
    "clamp": lambda low, a, high: np.asarray(np.clip(a, low, high), np.int64),
    "convert": lambda a: a,
    "divide": _truncated,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": lambda a, b: a * b,
    "remainder": lambda a, b: a - b * _truncated(a, b),
    "reshape": lambda a: a,
    "select": lambda p, a, b: np.asarray(np.where(p != 0, a, b), np.int64),
    "subtract": lambda a, b: a - b,
}


def _scalar(constant: ir.Operation) -> int | None:
    element = ir.RankedTensorType(constant.results[0].type).element_type
    attribute = ir.DenseElementsAttr(constant.attributes["value"])
    if not isinstance(element, ir.IntegerType) or not attribute.is_splat:
        return None
    return int(ir.DenseIntElementsAttr(attribute)[0])


def _looked_up(maker: ir.Operation, devices: int) -> NDArray[np.int64] | None:
    """An entry of a constant table."""
    table = maker.operands[0].owner
    if isinstance(table, ir.Block) or table.name != "stablehlo.constant":
        return None
    shape = shape_of(maker.operands[0])
    element = ir.RankedTensorType(maker.operands[0].type).element_type
    if len(shape) != 1 or shape_of(maker.results[0]) != (1,):
        return None
    where = per_device(maker.operands[1], devices)
    if where is None or not isinstance(element, ir.IntegerType):
        return None
    dense = ir.DenseIntElementsAttr(table.attributes["value"])
    listed = [dense[0]] * shape[0] if dense.is_splat else [dense[k] for k in range(shape[0])]
    entries = np.array(listed, np.int64)
    return np.asarray(entries[np.clip(where, 0, shape[0] - 1)], np.int64)


def exchanged(
    like: Exchange,
    before: ir.Operation,
    values: Sequence[Value],
    *,
    name: str = "",
    groups: Groups | None = None,
    dim: int | None = None,
    location: ir.Location | None = None,
) -> list[Value]:
    """Write a collective with the groups, dimension and combiner of another.

    Args:
        like: The other; a reduction may be written as another kind of reduction.
        before: What it is written before.
        values: What it exchanges; the element type may be another.
        name: The op, if another than that of ``like``.
        groups: The groups, if others.
        dim: The dimension gathered or scattered, if another.
        location: Where it comes from; that of ``like`` by default.

    Returns:
        One result per value.
    """
    name = name or like.op.name
    groups = like.groups if groups is None else groups
    dim = like.dim if dim is None else dim
    attributes = {key: like.op.attributes[key] for key in map(str, like.op.attributes)}
    if like.kind != "permute":
        attributes["replica_groups"] = rows_attribute(groups)
    for kind, key in (("all_gather", "all_gather_dim"), ("reduce_scatter", "scatter_dimension")):
        attributes.pop(key, None)
        if name == f"stablehlo.{kind}":
            attributes[key] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)
    kinds = []
    for value in values:
        shape = list(shape_of(value))
        if name == "stablehlo.all_gather":
            shape[dim] *= len(groups[0])
        elif name == "stablehlo.reduce_scatter":
            shape[dim] //= len(groups[0])
        elif name == "stablehlo.all_to_all":
            shape = list(shape_of(like.result))
        kinds.append(ir.RankedTensorType.get(shape, ir.RankedTensorType(value.type).element_type))
    location = like.op.location if location is None else location
    made = ir.Operation.create(
        name,
        results=kinds,
        operands=list(values),
        attributes=attributes,
        regions=len(like.op.regions),
        loc=location,
        ip=ir.InsertionPoint(before),
    )
    if len(like.op.regions):
        scalar = ir.RankedTensorType.get([], kinds[0].element_type)
        body = made.regions[0].blocks.append(scalar, scalar, arg_locs=[location] * 2)
        with ir.InsertionPoint(body):
            both = ir.Operation.create(
                like.combiner, results=[scalar], operands=list(body.arguments), loc=location
            )
            ir.Operation.create("stablehlo.return", operands=[both.results[0]], loc=location)
    return [cast(Value, result) for result in made.results]
