"""Patterns that make collectives cheaper: each gives what replaces the one result of an op.

Those that move a collective past an op that moves or converts elements one by one are exact. Those
that add up in another order agree within rounding.
"""

from __future__ import annotations

from typing import cast

from jax.extend.mlir import ir

from autoshard.passes.contraction import DOT, TRANSPOSE, transposed
from autoshard.passes.exchanges import (
    KINDS,
    Exchange,
    Groups,
    bits_of,
    exchange_of,
    exchanged,
    per_device,
)
from autoshard.passes.fold_transpose import permutation_of
from autoshard.passes.patterns import maker_of
from autoshard.passes.replacing import Make, replacing
from autoshard.program import Value, shape_of

MOVES = ("stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.collective_permute")
"""Collectives that only move elements."""


@replacing("reduce-scatter", "stablehlo.dynamic_slice")
def scatter_a_reduction(piece: ir.Operation) -> Make | None:
    """``slice(all_reduce(x))`` -> ``reduce_scatter(x)``, where each device takes its own piece.

    Where several devices of a group take the same piece, they add up what they got afterwards.
    """
    found = _sliced(piece, "all_reduce")
    if found is None or not found[0].combiner:
        return None
    exchange, dim, starts = found
    size = shape_of(piece.results[0])[dim]
    pieces = shape_of(exchange.value)[dim] // size
    same = exchange.devices // pieces
    scattered: list[tuple[int, ...]] = []
    shared: list[tuple[int, ...]] = []
    for group in exchange.groups:
        takers = [[d for d in group if starts[d] == k * size] for k in range(pieces)]
        if any(len(t) != same for t in takers):
            return None
        scattered += [tuple(t[j] for t in takers) for j in range(same)]
        shared += [tuple(t) for t in takers]
    if pieces < 2:
        return None

    def make() -> Value:
        (made,) = exchanged(
            exchange,
            piece,
            [exchange.value],
            name="stablehlo.reduce_scatter",
            groups=tuple(scattered),
            dim=dim,
        )
        if same > 1:
            (made,) = exchanged(exchange, piece, [made], groups=tuple(shared))
        return made

    return make


@replacing("forget-gather", "stablehlo.dynamic_slice")
def forget_a_gather(piece: ir.Operation) -> Make | None:
    """``slice(all_gather(x))`` -> ``x``, where each device takes what it gave."""
    found = _sliced(piece, "all_gather")
    if found is None or found[1] != found[0].dim:
        return None
    exchange, dim, starts = found
    size = shape_of(exchange.value)[dim]
    own = all(
        starts[device] == k * size for group in exchange.groups for k, device in enumerate(group)
    )
    if not own or shape_of(piece.results[0])[dim] != size:
        return None
    return lambda: exchange.value


def _sliced(piece: ir.Operation, kind: str) -> tuple[Exchange, int, list[int]] | None:
    """The collective of which an op slices one dimension, that, and where on each device."""
    exchange = _read_once(piece.operands[0], piece)
    if exchange is None or exchange.kind != kind or len(exchange.op.operands) != 1:
        return None
    whole, part = shape_of(piece.operands[0]), shape_of(piece.results[0])
    dims = [d for d in range(len(whole)) if whole[d] != part[d]]
    if len(dims) != 1 or whole[dims[0]] % part[dims[0]]:
        return None
    starts = per_device(piece.operands[1 + dims[0]], exchange.total)
    if starts is None:
        return None
    top = whole[dims[0]] - part[dims[0]]
    return exchange, dims[0], [min(max(int(n), 0), top) for n in starts]


@replacing("repeated", *KINDS)
def share_a_repeated_one(collective: ir.Operation) -> Make | None:
    """A collective of a value that an earlier one in the block exchanges alike."""
    exchange = exchange_of(collective)
    if exchange is None or len(collective.operands) != 1:
        return None
    for use in exchange.value.uses:
        other = exchange_of(use.owner.operation)
        if other is None or other.op == collective or other.op.block != collective.block:
            continue
        alike = (
            other.op.name == collective.name
            and other.groups == exchange.groups
            and other.dim == exchange.dim
            and other.result.type == exchange.result.type
            and (not len(collective.regions) or other.combiner == exchange.combiner != "")
            and (exchange.kind != "all_to_all" or _splits(other.op) == _splits(collective))
        )
        if alike and other.op.is_before_in_block(collective):
            return lambda: other.result
    return None


def _splits(exchange: ir.Operation) -> list[str]:
    return [str(exchange.attributes[f"{name}_dimension"]) for name in ("split", "concat")]


@replacing("widen-late", *MOVES)
def widen_late(collective: ir.Operation) -> Make | None:
    """``gather(convert(x))`` -> ``convert(gather(x))``, where ``x`` is narrower."""
    exchange = exchange_of(collective)
    if exchange is None or exchange.op.name not in MOVES or len(collective.operands) != 1:
        return None
    convert = maker_of(exchange.value)
    if convert is None or convert.name != "stablehlo.convert" or not _narrows(convert, widens=True):
        return None

    def make() -> Value:
        (made,) = exchanged(exchange, collective, [convert.operands[0]])
        return _converted(convert, made, collective)

    return make


@replacing("narrow-early", "stablehlo.convert")
def narrow_early(convert: ir.Operation) -> Make | None:
    """``convert(gather(x))`` -> ``gather(convert(x))``, where the result is narrower."""
    if not _narrows(convert, widens=False):
        return None
    exchange = _read_once(convert.operands[0], convert)
    if exchange is None or exchange.op.name not in MOVES or len(exchange.op.operands) != 1:
        return None

    def make() -> Value:
        made = _converted(convert, exchange.value, convert)
        return exchanged(exchange, convert, [made])[0]

    return make


@replacing("transpose-before-gather", TRANSPOSE)
def transpose_before_a_gather(transpose: ir.Operation) -> Make | None:
    """``transpose(all_gather(x))`` -> ``all_gather(transpose(x))``: a piece is transposed.

    Products take a transpose in for nothing, so where they read it, it stays with them.
    """
    exchange = _read_once(transpose.operands[0], transpose)
    if exchange is None or exchange.kind != "all_gather" or len(exchange.op.operands) != 1:
        return None
    if all(use.owner.name == DOT for use in transpose.results[0].uses):
        return None
    moved = permutation_of(transpose)

    def make() -> Value:
        made = transposed(transpose, exchange.value, moved, transpose.location)
        return exchanged(exchange, transpose, [made], dim=moved.index(exchange.dim))[0]

    return make


@replacing("transpose-after-scatter", "stablehlo.reduce_scatter")
def transpose_after_a_scatter(collective: ir.Operation) -> Make | None:
    """``reduce_scatter(transpose(x))`` -> ``transpose(reduce_scatter(x))``."""
    exchange = exchange_of(collective)
    if exchange is None or exchange.kind != "reduce_scatter" or not exchange.combiner:
        return None
    transpose = maker_of(exchange.value)
    if transpose is None or transpose.name != TRANSPOSE:
        return None
    producer = maker_of(transpose.operands[0])
    if producer is not None and producer.name == DOT:
        return None  # which takes it in
    moved = permutation_of(transpose)

    def make() -> Value:
        (made,) = exchanged(exchange, collective, [transpose.operands[0]], dim=moved[exchange.dim])
        return transposed(collective, made, moved, transpose.location)

    return make


@replacing("merge-sums", "stablehlo.add", "stablehlo.subtract")
def merge_sums(operation: ir.Operation) -> Make | None:
    """``all_reduce(a) + all_reduce(b)`` -> ``all_reduce(a + b)``; reduce-scatters alike."""
    one, other = (_read_once(value, operation) for value in operation.operands)
    if one is None or other is None or one.op == other.op:
        return None
    if not (one.is_sum and other.is_sum) or one.kind != other.kind or one.dim != other.dim:
        return None
    if len(one.op.operands) != 1 or len(other.op.operands) != 1:
        return None
    if one.groups != other.groups and not (
        one.kind == "all_reduce" and _sets(one.groups) == _sets(other.groups)
    ):
        return None

    def make() -> Value:
        made = ir.Operation.create(
            operation.name,
            results=[one.value.type],
            operands=[one.value, other.value],
            loc=operation.location,
            ip=ir.InsertionPoint(operation),
        )
        return exchanged(one, operation, [cast(Value, made.results[0])])[0]

    return make


def _sets(groups: Groups) -> set[frozenset[int]]:
    return set(map(frozenset, groups))


def _read_once(value: Value, reader: ir.Operation) -> Exchange | None:
    """The collective that makes a value for one reader alone, in the reader's block."""
    maker = maker_of(value)
    if maker is None or maker.block != reader.block or len(list(value.uses)) != 1:
        return None
    return exchange_of(maker)


def _narrows(convert: ir.Operation, *, widens: bool) -> bool:
    before, after = (
        bits_of(ir.RankedTensorType(v.type).element_type)
        for v in (convert.operands[0], convert.results[0])
    )
    return before < after if widens else after < before


def _converted(convert: ir.Operation, value: Value, before: ir.Operation) -> Value:
    """A value converted like another, before an op."""
    element = ir.RankedTensorType(convert.results[0].type).element_type
    made = ir.Operation.create(
        "stablehlo.convert",
        results=[ir.RankedTensorType.get(list(shape_of(value)), element)],
        operands=[value],
        loc=convert.location,
        ip=ir.InsertionPoint(before),
    )
    return cast(Value, made.results[0])
