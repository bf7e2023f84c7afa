"""Small collectives of one kind, put together: one start instead of many, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

from jax.extend.mlir import ir

from autoshard.passes.exchanges import Exchange, exchange_of, exchanged
from autoshard.program import Value, operations

_TOGETHER = ("all_reduce", "all_gather")
"""Kinds that StableHLO has with several operands."""


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
    kinds = {ir.RankedTensorType(v.type).element_type for v in exchange.op.operands}
    body = exchange.combiner if exchange.kind == "all_reduce" else ""
    if (
        exchange.kind not in _TOGETHER
        or len(kinds) > 1
        or (exchange.kind == "all_reduce" and not body)
    ):
        return None
    return exchange.kind, exchange.groups, exchange.dim, body, str(kinds.pop())


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
    last = members[-1].op
    made = exchanged(
        members[0],
        last,
        [value for member in members for value in member.op.operands],
        location=ir.Location.fused([member.op.location for member in members]),
    )
    results = [result for member in members for result in member.op.results]
    for result, value in zip(results, made, strict=True):
        result.replace_all_uses_with(value)
    for member in members:
        member.op.erase()


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
