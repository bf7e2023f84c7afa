"""Small collectives of one kind, put together: one start instead of many, the same bytes.

Values are laid end to end in one row, exchanged, and cut apart again, which costs their bytes in
main memory twice. XLA's own combiners do without these copies, on programs they see whole; a
collective with several results inside a manual computation is what jaxlib 0.10.2 refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.passes.exchanges import Exchange, exchange_of, exchanged
from autoshard.program import Value, operations, shape_of

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")


def combine(block: ir.Block, allow: Callable[[str, ir.Operation], bool], bucket: int) -> int:
    """Put independent collectives of a block together, up to a size.

    Two are put together if neither needs the other's result, they run over the same groups, combine
    or gather alike and have one element type. What reads them moves behind them.

    Args:
        block: The block.
        allow: Asked before each is added to others.
        bucket: Bytes of a device's larger side, up to which a bucket is filled [bytes].

    Returns:
        How many collectives fewer there are.
    """
    fewer = 0
    while True:
        members = _next_bucket(block, allow, bucket)
        if not members:
            return fewer
        _put_together(members)
        _sort(block)
        fewer += len(members) - 1


def _key(exchange: Exchange) -> Hashable:
    """What two collectives must share to be put together; None for one that never is."""
    body = exchange.combiner
    if exchange.kind not in _TOGETHER or len(exchange.op.operands) != 1:
        return None
    if exchange.kind != "all_gather" and not body:
        return None
    element = ir.RankedTensorType(exchange.value.type).element_type
    return exchange.kind, exchange.groups, body, str(element)


def _next_bucket(
    block: ir.Block, allow: Callable[[str, ir.Operation], bool], bucket: int
) -> list[Exchange]:
    """The first bucket that takes in more than one collective."""
    listed = [o.operation for o in block.operations]
    found: dict[Hashable, list[tuple[int, Exchange]]] = {}
    for position, operation in enumerate(listed):
        exchange = exchange_of(operation)
        if exchange is not None and (key := _key(exchange)) is not None:
            found.setdefault(key, []).append((position, exchange))
    candidates = [each for alike in found.values() if len(alike) > 1 for each in alike]
    if not candidates:
        return []
    needs = _needs(listed, [position for position, _ in candidates])
    for alike in found.values():
        rest = alike if len(alike) > 1 else []
        while len(rest) > 1:
            (first, exchange), *others = rest
            members, numbers, size = [exchange], {first}, exchange.nbytes
            left = []
            for position, other in others:
                fits = size + other.nbytes <= bucket
                if fits and not needs[position] & numbers and allow("combine", other.op):
                    members.append(other)
                    numbers.add(position)
                    size += other.nbytes
                else:
                    left.append((position, other))
            if len(members) > 1:
                return members
            rest = left
    return []


def _needs(listed: list[ir.Operation], marked: list[int]) -> dict[int, set[int]]:
    """For each marked position of a block, the marked positions that it needs, however far."""
    bit = {position: 1 << k for k, position in enumerate(marked)}
    behind: dict[Value, int] = {}
    needs: dict[int, set[int]] = {}
    for position, operation in enumerate(listed):
        mask = 0
        for value in _reads(operation):
            mask |= behind.get(value, 0)
        if position in bit:
            needs[position] = {p for p, b in bit.items() if mask & b}
            mask |= bit[position]
        for result in operation.results:
            behind[cast(Value, result)] = mask
    return needs


def _reads(operation: ir.Operation) -> list[Value]:
    """What an op reads, in its regions too."""
    values = list(operation.operands)
    for region in operation.regions:
        for block in region.blocks:
            for inner in operations(block):
                values += inner.operands
    return values


def _put_together(members: list[Exchange]) -> None:
    """Replace collectives by one, at the place of the last."""
    last, first = members[-1].op, members[0]
    location = ir.Location.fused([member.op.location for member in members])
    rows = 1 if first.kind == "all_reduce" else first.devices
    with location, ir.InsertionPoint(last):
        flat = [_row(member, rows) for member in members]
        whole = cast(Value, stablehlo.concatenate(flat, 1))
    dim = -1 if first.kind == "all_reduce" else 0
    (made,) = exchanged(first, last, [whole], dim=dim, location=location)
    start = 0
    for member, row in zip(members, flat, strict=True):
        stop = start + shape_of(row)[1]
        with member.op.location, ir.InsertionPoint(last):
            count = shape_of(made)[0]
            part = stablehlo.slice(made, [0, start], [count, stop], [1, 1])
            result = _from_row(member, cast(Value, part))
        member.result.replace_all_uses_with(result)
        start = stop
    for member in members:
        member.op.erase()


def _row(member: Exchange, rows: int) -> Value:
    """What a collective exchanges as a row; for a reduce-scatter, a row for each device."""
    shape, value = list(shape_of(member.value)), member.value
    if member.kind != "reduce_scatter":
        return _reshaped(value, [1, math.prod(shape)])
    dim = member.dim
    value = _reshaped(value, [*shape[:dim], rows, shape[dim] // rows, *shape[dim + 1 :]])
    order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
    return _reshaped(
        cast(Value, stablehlo.transpose(value, order)), [rows, math.prod(shape) // rows]
    )


def _from_row(member: Exchange, part: Value) -> Value:
    """The result of a collective from its part of the rows that came out."""
    wanted = list(shape_of(member.result))
    if member.kind != "all_gather":
        return _reshaped(part, wanted)
    dim, given = member.dim, list(shape_of(member.value))
    value = _reshaped(part, [member.devices, *given])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(given) + 1)]
    return _reshaped(cast(Value, stablehlo.transpose(value, order)), wanted)


def _reshaped(value: Value, shape: list[int]) -> Value:
    element = ir.RankedTensorType(value.type).element_type
    return cast(Value, stablehlo.reshape(ir.RankedTensorType.get(shape, element), value))


def _sort(block: ir.Block) -> None:
    """Put what reads a value behind what makes it; all else keeps its order."""
    listed = [o.operation for o in block.operations]
    made = {cast(Value, r): k for k, o in enumerate(listed) for r in o.results}
    placed: set[int] = set()
    order: list[int] = []
    for first in range(len(listed)):
        stack = [first]
        while stack:
            position = stack[-1]
            if position in placed:
                stack.pop()
                continue
            missing = [
                made[v] for v in _reads(listed[position]) if v in made and made[v] not in placed
            ]
            if missing:
                stack += reversed(missing)
            else:
                placed.add(position)
                order.append(position)
                stack.pop()
    before = listed[order[0]]
    if order[0] != 0:
        before.move_before(listed[0])
    for position in order[1:]:
        listed[position].move_after(before)
        before = listed[position]
