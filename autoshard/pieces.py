"""What a value is on one device, and the ops that must say so of themselves.

A strategy splits only dimensions along which elements do not meet, so most ops stay as they are.
Constants, iotas and slices speak of the whole and are adapted here, sums over padding too; gathers
and scatters are adapted in :mod:`autoshard.indexing`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.child import UnsupportedError
from autoshard.emit import Emitter
from autoshard.shardings import MeshShape, Sharding, local_shape, replicated

Value: TypeAlias = "ir.Value[Any]"


class Pieces:
    """What is known of the values of a program that is being turned into that of one device.

    Args:
        mesh: The mesh.

    Attributes:
        mesh: The mesh.
        shardings: Of each value so far.
        shapes: Of each value so far, the shape of the whole.
    """

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh = mesh
        self.shardings: dict[Value, Sharding] = {}
        self.shapes: dict[Value, tuple[int, ...]] = {}

    def place(self, value: Value, sharding: Sharding | None) -> None:
        """Give a value the type of a device's piece of it."""
        if not isinstance(value.type, ir.RankedTensorType):
            raise UnsupportedError(f"a value of type {value.type}")
        type_ = ir.RankedTensorType(value.type)
        shape = tuple(type_.shape)
        self.shapes[value] = shape
        self.shardings[value] = sharding if sharding is not None else replicated(len(shape))
        if any(self.shardings[value]):
            piece = local_shape(shape, self.shardings[value], self.mesh)
            value.set_type(ir.RankedTensorType.get(list(piece), type_.element_type))

    def name(self, value: Value, shape: tuple[int, ...], sharding: Sharding) -> None:
        """Say that a value is a device's piece already."""
        self.shapes[value], self.shardings[value] = shape, sharding

    def split(self, operation: ir.Operation) -> set[int]:
        """Dimensions along which an operand or result is split."""
        tensors = (*operation.operands, *operation.results)
        return {d for v in tensors for d, axes in enumerate(self.shardings[v]) if axes}

    def stand_in(self, readers: list[tuple[ir.Operation, int]], result: Value, made: Value) -> None:
        """Have ``readers``, the operands that read an op's result so far, read ``made``."""
        for reader, position in readers:
            reader.operands[position] = made
        self.name(made, self.shapes[result], self.shardings[result])


def readers_of(value: Value) -> list[tuple[ir.Operation, int]]:
    """The operands that read a value: op and position."""
    return [(use.owner.operation, use.operand_number) for use in value.uses]


def adapt(pieces: Pieces, emit: Emitter, operation: ir.Operation, after: ir.Operation) -> None:
    """Have an op speak of a device's piece where it speaks of the whole.

    Args:
        pieces: Its operands and results among them.
        emit: Writes further ops.
        operation: Any op but gathers and scatters.
        after: The op that follows it.

    Raises:
        UnsupportedError: Elements meet along a dimension that is split.
    """
    name = operation.name.partition(".")[2]
    results = operation.results
    split = pieces.split(operation)
    if name == "composite":
        raise UnsupportedError("a composite op whose operands are split")
    if name == "constant":
        _constant(pieces, emit, operation, results[0], after)
    elif name == "iota":
        _iota(pieces, emit, operation, results[0], after)
    elif name == "slice":
        _whole(pieces, operation, split, "limit_indices")
    elif name == "dynamic_slice":
        _whole(pieces, operation, split, "slice_sizes")
    elif name in ("dot_general", "reduce"):
        _mask(pieces, emit, operation)
    else:
        meeting = _meeting(operation, pieces.shapes) & split
        if meeting:
            raise UnsupportedError(f"elements meet along dimension {min(meeting)}, which is split")


def _constant(
    pieces: Pieces, emit: Emitter, operation: ir.Operation, result: Value, after: ir.Operation
) -> None:
    value = ir.DenseElementsAttr(operation.attributes["value"])
    piece = ir.RankedTensorType(result.type)
    if value.is_splat:
        operation.attributes["value"] = ir.DenseElementsAttr.get_splat(
            piece, value.get_splat_value()
        )
        return
    sharding = pieces.shardings[result]
    result.set_type(ir.RankedTensorType.get(list(pieces.shapes[result]), piece.element_type))
    readers = readers_of(result)
    split = {d: axes for d, axes in enumerate(sharding) if axes}
    padded = result
    for d, axes in split.items():
        padded = emit.padded(after, padded, d, piece.shape[d] * pieces.mesh.size(axes))
    made = emit.piece(after, padded, split)
    pieces.stand_in(readers, result, made)


def _iota(
    pieces: Pieces, emit: Emitter, operation: ir.Operation, result: Value, after: ir.Operation
) -> None:
    dim = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    axes = pieces.shardings[result][dim]
    if not axes:
        return
    type_ = ir.RankedTensorType(result.type)
    shape = tuple(type_.shape)
    readers = readers_of(result)
    start = emit.offset(after, axes, shape[dim])
    start = emit.create(after, "convert", [start], (), type_.element_type)
    start = emit.spread(after, start, shape, ())
    made = emit.create(after, "add", [result, start], shape)
    pieces.stand_in(readers, result, made)


def _whole(pieces: Pieces, operation: ir.Operation, split: set[int], sizes: str) -> None:
    """Slices take all of a dimension that is split: on a device, all of its piece."""
    given = list(ir.DenseI64ArrayAttr(operation.attributes[sizes]))
    whole, out = (pieces.shapes[v] for v in (operation.operands[0], operation.results[0]))
    piece = ir.RankedTensorType(operation.results[0].type).shape
    for d in split:
        if whole[d] != out[d]:
            raise UnsupportedError(f"it takes a part of dimension {d}, which is split")
        given[d] = piece[d]
    operation.attributes[sizes] = ir.DenseI64ArrayAttr.get(given)


def _mask(pieces: Pieces, emit: Emitter, operation: ir.Operation) -> None:
    """Keep the padding of a dimension that is summed out of the sum."""
    if operation.name == "stablehlo.reduce":
        summed = set(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
        sides = [summed] * len(operation.results)
        starts = list(operation.operands)[len(sides) :]
    else:
        numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
        sides = [
            set(numbers.lhs_contracting_dimensions),
            set(numbers.rhs_contracting_dimensions),
        ]
        starts = []
    for k, dims in enumerate(sides):
        value = operation.operands[k]
        sharding, whole = pieces.shardings[value], pieces.shapes[value]
        for d in sorted(dims):
            if whole[d] % pieces.mesh.size(sharding[d]):
                element = ir.RankedTensorType(value.type).element_type
                start = starts[k] if starts else emit.constant(operation, element, 0)
                value = emit.masked(operation, value, start, d, sharding[d], whole[d])
                operation.operands[k] = value


def _meeting(operation: ir.Operation, shapes: dict[Value, tuple[int, ...]]) -> set[int]:
    """Dimensions along which an element of the result depends on several of an operand."""
    name = operation.name.partition(".")[2]
    rank = len(shapes[operation.operands[0]]) if len(operation.operands) else 0
    if name in ("sort", "concatenate"):
        return {ir.IntegerAttr(operation.attributes["dimension"]).value % rank}
    if name == "top_k":
        return {rank - 1}
    if name in ("cholesky", "triangular_solve"):
        return {rank - 2, rank - 1}
    if name == "reverse":
        return set(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
    if name == "fft":
        count = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
        return set(range(rank - count, rank))
    if name in ("reduce_window", "select_and_scatter"):
        sizes = ir.DenseI64ArrayAttr(operation.attributes["window_dimensions"])
        return {d for d, size in enumerate(sizes) if size != 1} | _resized(operation, shapes)
    if name in ("pad", "dynamic_update_slice"):
        return _resized(operation, shapes)
    return set(range(rank)) if name in ("rng", "rng_bit_generator") else set()


def _resized(operation: ir.Operation, shapes: dict[Value, tuple[int, ...]]) -> set[int]:
    """Dimensions of another size in the result, or the update, than in the operand."""
    other = operation.operands[1] if "update" in operation.name else operation.results[0]
    pairs = zip(shapes[operation.operands[0]], shapes[other], strict=True)
    return {d for d, (one, two) in enumerate(pairs) if one != two}
