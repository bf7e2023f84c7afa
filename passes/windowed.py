"""Products of gathered or scattered operands, a piece at a time while the next one is on its way.

In place of ``dot(all_gather(x), w)`` every device multiplies the piece it has while its neighbour
sends it the next one: n products and n - 1 permutes around the ring of a group of n. In place of
``reduce_scatter(dot(x, w))`` a sum travels around the ring, and every device adds its part of the
piece that is passing. FLOPs and bytes sent stay what they were (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", section
5). Half a piece may travel each way around, which uses both directions of the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.emit import Emitter
from autoshard.passes.contraction import DOT, dot_numbers, product
from autoshard.passes.exchanges import Exchange, exchange_of, rows_attribute
from autoshard.passes.patterns import maker_of
from autoshard.program import Value, shape_of
from autoshard.shardings import MeshShape


@dataclass(frozen=True, slots=True)
class Reading:
    """A product that reads a gathered value.

    Attributes:
        dot: The product.
        side: Which operand is gathered.
        dim: The dimension of that operand that is gathered.
        other_dim: The other operand's dimension that runs along with it; -1 if none does.
        out_dim: The result's dimension that it becomes; -1 if it is summed.
    """

    dot: ir.Operation
    side: int
    dim: int
    other_dim: int
    out_dim: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """A gather that only products read.

    Attributes:
        exchange: The gather.
        readings: The products.
    """

    exchange: Exchange
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Scattered:
    """A product that only a reduce-scatter reads.

    Attributes:
        exchange: The reduce-scatter.
        dot: The product.
        dims: Of each operand, the dimension that is scattered; -1 if it has none.
    """

    exchange: Exchange
    dot: ir.Operation
    dims: tuple[int, int]


def gathered(operation: ir.Operation) -> Gathered | None:
    """The gather that an op is, if products of its block alone read it."""
    exchange = exchange_of(operation)
    if exchange is None or exchange.kind != "all_gather" or len(operation.operands) != 1:
        return None
    readings = []
    for use in exchange.result.uses:
        dot = use.owner.operation
        if dot.name != DOT or dot.block != operation.block or dot.operands[0] == dot.operands[1]:
            return None
        readings.append(_reading(dot, use.operand_number, exchange.dim))
    # Uses are listed from the last to the first.
    return Gathered(exchange, tuple(reversed(readings))) if readings else None


def _reading(dot: ir.Operation, side: int, dim: int) -> Reading:
    numbers = dot_numbers(dot)
    batch, summed = (numbers[side], numbers[1 - side]), (numbers[2 + side], numbers[3 - side])
    if dim in summed[0]:
        return Reading(dot, side, dim, summed[1][summed[0].index(dim)], -1)
    if dim in batch[0]:
        place = batch[0].index(dim)
        return Reading(dot, side, dim, batch[1][place], place)
    return Reading(dot, side, dim, -1, _free_dims(dot, side)[dim])


def _free_dims(dot: ir.Operation, side: int) -> dict[int, int]:
    """Of an operand's dimensions that are neither batch nor summed: the result's."""
    numbers = dot_numbers(dot)
    ranks = [len(shape_of(value)) for value in dot.operands]
    free = [
        [d for d in range(ranks[s]) if d not in numbers[s] and d not in numbers[2 + s]]
        for s in (0, 1)
    ]
    first = len(numbers[0]) + (len(free[0]) if side else 0)
    return {d: first + k for k, d in enumerate(free[side])}


def scattered(operation: ir.Operation) -> Scattered | None:
    """The reduce-scatter that an op is, if it sums up a product that nothing else reads."""
    exchange = exchange_of(operation)
    if exchange is None or exchange.kind != "reduce_scatter" or not exchange.is_sum:
        return None
    dot = maker_of(exchange.value)
    if dot is None or dot.name != DOT or dot.block != operation.block:
        return None
    if len(list(exchange.value.uses)) != 1:
        return None
    numbers = dot_numbers(dot)
    if exchange.dim < len(numbers[0]):
        return Scattered(exchange, dot, (numbers[0][exchange.dim], numbers[1][exchange.dim]))
    dims = [-1, -1]
    for side in (0, 1):
        for d, out in _free_dims(dot, side).items():
            if out == exchange.dim:
                dims[side] = d
    return Scattered(exchange, dot, (dims[0], dims[1]))


@dataclass(frozen=True, slots=True)
class _Stream:
    """What travels one way around the ring.

    Attributes:
        step: 1: device k receives from k + 1; -1: from k - 1.
        start: Where its part starts in a piece.
        size: Size of its part.
    """

    step: int
    start: int
    size: int


def _streams(piece: int, both_ways: bool) -> list[_Stream]:
    if not both_ways or piece % 2:
        return [_Stream(1, 0, piece)]
    return [_Stream(1, 0, piece // 2), _Stream(-1, piece // 2, piece // 2)]


class _Ring:
    """Writes what a ring of devices does, for one collective."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.emit = Emitter(MeshShape(("devices",), (exchange.total,)), 0)
        self.places = [0] * exchange.total
        for group in exchange.groups:
            for place, device in enumerate(group):
                self.places[device] = place

    def moved(self, value: Value, step: int, before: ir.Operation) -> Value:
        """What the neighbour ``step`` further in the group had."""
        groups, n = self.exchange.groups, self.exchange.devices
        pairs = [(group[(k + step) % n], group[k]) for group in groups for k in range(n)]
        made = ir.Operation.create(
            "stablehlo.collective_permute",
            results=[value.type],
            operands=[value],
            attributes={
                "source_target_pairs": rows_attribute(pairs),
                "channel_handle": self.exchange.op.attributes["channel_handle"],
            },
            loc=self.exchange.op.location,
            ip=ir.InsertionPoint(before),
        )
        return cast(Value, made.results[0])

    def offset(self, shift: int, piece: int, start: int, before: ir.Operation) -> Value:
        """On the device at place k: ``piece * ((k + shift) mod n) + start``."""
        n = self.exchange.devices
        return self.emit.per_device(
            before, [piece * ((place + shift) % n) + start for place in self.places]
        )

    def part(self, value: Value, dim: int, start: Value, size: int, before: ir.Operation) -> Value:
        """``size`` elements of one dimension, from a place that differs between devices."""
        shape = list(shape_of(value))
        shape[dim] = size
        zero = self.emit.per_device(before, [0] * self.exchange.total)
        starts = [start if d == dim else zero for d in range(len(shape))]
        return self.emit.create(
            before,
            "dynamic_slice",
            [value, *starts],
            shape,
            attributes={"slice_sizes": ir.DenseI64ArrayAttr.get(shape)},
        )

    def placed(self, whole: Value, part: Value, dim: int, start: Value, at: ir.Operation) -> Value:
        """A value with a part of one dimension written over."""
        zero = self.emit.per_device(at, [0] * self.exchange.total)
        starts = [start if d == dim else zero for d in range(len(shape_of(whole)))]
        return self.emit.create(at, "dynamic_update_slice", [whole, part, *starts], shape_of(whole))


def multiply_while_gathering(found: Gathered, *, both_ways: bool = False) -> None:
    """Replace a gather and the products that read it, in place."""
    exchange, ring = found.exchange, _Ring(found.exchange)
    piece, n = shape_of(exchange.value)[exchange.dim], exchange.devices
    streams = _streams(piece, both_ways)
    chunks: list[list[Value]] = []
    with exchange.op.location, ir.InsertionPoint(exchange.op):
        for stream in streams:
            chunk = exchange.value
            if stream.size != piece:
                stop = stream.start + stream.size
                chunk = ring.emit.section(exchange.op, chunk, exchange.dim, stream.start, stop)
            travelling = [chunk]
            for _ in range(n - 1):
                travelling.append(ring.moved(travelling[-1], stream.step, exchange.op))
            chunks.append(travelling)
    for reading in found.readings:
        result = _assembled(ring, reading, streams, chunks, piece)
        reading.dot.results[0].replace_all_uses_with(result)
        reading.dot.erase()
    exchange.op.erase()


def _assembled(
    ring: _Ring,
    reading: Reading,
    streams: Sequence[_Stream],
    chunks: Sequence[Sequence[Value]],
    piece: int,
) -> Value:
    """The result of a product from products with all pieces."""
    dot, n = reading.dot, ring.exchange.devices
    shape = list(shape_of(dot.results[0]))
    element = ir.RankedTensorType(dot.results[0].type).element_type
    summed = reading.out_dim < 0
    kept = _wide(element) if summed else element
    total = None if summed else ring.emit.constant(dot, kept, 0, shape)
    for index in range(n):
        for stream, travelling in zip(streams, chunks, strict=True):
            start = ring.offset(stream.step * index, piece, stream.start, dot)
            values = list(dot.operands)
            values[reading.side] = travelling[index]
            if reading.other_dim >= 0:
                other = dot.operands[1 - reading.side]
                part = ring.part(other, reading.other_dim, start, stream.size, dot)
                values[1 - reading.side] = part
            part_shape = list(shape)
            if not summed:
                part_shape[reading.out_dim] = stream.size
            made = product(dot, values[0], values[1], dot_numbers(dot), part_shape, element=kept)
            if not summed:
                assert total is not None
                total = ring.placed(total, made, reading.out_dim, start, dot)
            else:
                total = (
                    made if total is None else ring.emit.create(dot, "add", [total, made], shape)
                )
    assert total is not None
    return total if kept == element else ring.emit.create(dot, "convert", [total], shape, element)


def multiply_while_scattering(found: Scattered, *, both_ways: bool = False) -> None:
    """Replace a product and the reduce-scatter that reads it, in place."""
    exchange, dot, ring = found.exchange, found.dot, _Ring(found.exchange)
    before, n = exchange.op, exchange.devices
    piece = shape_of(exchange.result)[exchange.dim]
    parts = []
    for stream in _streams(piece, both_ways):
        total: Value | None = None
        for index in range(n):
            start = ring.offset(stream.step * (index + 1), piece, stream.start, before)
            values = list(dot.operands)
            for side, dim in enumerate(found.dims):
                if dim >= 0:
                    values[side] = ring.part(values[side], dim, start, stream.size, before)
            shape = list(shape_of(exchange.result))
            shape[exchange.dim] = stream.size
            made = product(dot, values[0], values[1], dot_numbers(dot), shape, before=before)
            if total is not None:
                passed = ring.moved(total, stream.step, before)
                made = ring.emit.create(before, "add", [passed, made], shape)
            total = made
        assert total is not None
        parts.append(total)
    result = parts[0]
    if len(parts) > 1:
        with before.location, ir.InsertionPoint(before):
            result = cast(Value, stablehlo.concatenate(parts, exchange.dim))
    exchange.result.replace_all_uses_with(result)
    exchange.op.erase()
    dot.erase()


def _wide(element: ir.Type) -> ir.Type:
    """What partial sums of an element type are kept in: they are rounded once, at the end."""
    narrow = isinstance(element, ir.FloatType) and element.width < 32
    return ir.F32Type.get() if narrow else element
