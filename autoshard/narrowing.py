"""Floats that XLA:TPU stores and moves in half of their size, because that is all that is read.

At JAX's default precision XLA:TPU multiplies f32 operands as bf16 (one pass of the matrix unit). It
converts such an operand where it is made, not where it is read: a value that nothing but products
reads is kept as bf16, and gathered and exchanged as bf16 on the way to them. So is what the program
itself converts to bf16 after it has moved. Seen in programs that libtpu 0.0.42 compiled ahead of
time, and alike where they are manual. A product of higher precision keeps its operands as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.graph import Graph, Op
from autoshard.kinds import PRODUCTS
from autoshard.local import LocalBlock, LocalOp, LocalProgram, LocalValue

_MOVES = frozenset(
    {"all_gather", "all_to_all", "permute", "slice", "pad", "reshape", "transpose", "concatenate"}
)


def reads_halves(graph: Graph, op: Op, dtype: str, compiler: str) -> bool:
    """Whether an op reads operands of that type as bf16."""
    if compiler != "tpu" or dtype != "f32":
        return False
    if op.kind == "convert":
        return graph.values[op.results[0]].dtype == "bf16"
    return op.kind in PRODUCTS and not op.is_precise


def narrowed(graph: Graph, program: LocalProgram) -> list[LocalValue]:
    """The values of a device's program with the sizes that XLA:TPU stores them in."""
    values = list(program.values)
    wide = {v for v, value in enumerate(values) if value.dtype != "f32"}
    readers: dict[int, list[LocalOp]] = {}
    moved: set[int] = set()
    for block in _blocks(program.main):
        wide |= {*block.params, *block.returned}
        for op in block.ops:
            if op.kind in _MOVES:
                moved |= {*op.outputs}
            if op.blocks:
                wide |= {*op.outputs}
                if op.kind == "while":
                    wide |= {*op.inputs[: len(op.outputs)]}
            for value in op.inputs:
                readers.setdefault(value, []).append(op)

    known: dict[int, bool] = {}

    def is_narrow(value: int) -> bool:
        if value not in known:
            known[value] = False
            users = [op for op in readers.get(value, ()) if not op.blocks]
            known[value] = value not in wide and bool(users)
            known[value] &= all(wants_halves(op, value) for op in users)
        return known[value]

    def wants_halves(op: LocalOp, value: int) -> bool:
        if op.kind in PRODUCTS:
            return reads_halves(graph, graph.ops[op.op], "f32", "tpu")
        if op.kind == "convert":
            return value in moved and values[op.outputs[0]].dtype == "bf16"
        return op.kind in _MOVES and all(map(is_narrow, op.outputs))

    # From the end of the program to its start, so that no search goes deep.
    for v in reversed(range(len(values))):
        if is_narrow(v):
            values[v] = replace(values[v], dtype="bf16", nbytes=values[v].nbytes // 2)
    return values


def with_hoisted(values: list[LocalValue], main: LocalBlock) -> tuple[list[LocalValue], LocalBlock]:
    """The program as XLA:TPU runs it, which converts weights once before the loops that read them.

    A loop over layers slices its weights and converts each slice from f32 to bf16. XLA:TPU converts
    all of them before the first such loop, and holds the copy until the last has ended.
    """
    copies: dict[int, int] = {}
    ops: list[LocalOp] = []
    for op in main.ops:
        if op.kind == "while":
            for value in _converted(op, values):
                if value not in copies:
                    copies[value] = len(values)
                    half = replace(values[value], dtype="bf16", nbytes=values[value].nbytes // 2)
                    values.append(half)
                    ops.append(LocalOp("convert", (value,), (copies[value],), op.op))
                op = _reading(op, value, copies[value])
        ops.append(op)
    return values, replace(main, ops=tuple(ops))


def _converted(loop: LocalOp, values: Sequence[LocalValue]) -> list[int]:
    """What a loop reads from outside only to convert slices of it to bf16."""
    (body,) = loop.blocks[-1:]
    readers: dict[int, list[LocalOp]] = {}
    for op in body.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)

    def is_converted(value: int) -> bool:
        users = readers.get(value, [])
        return bool(users) and all(
            (u.kind == "convert" and values[u.outputs[0]].dtype == "bf16")
            or (u.kind == "reshape" and is_converted(u.outputs[0]))
            for u in users
        )

    outside = dict.fromkeys(loop.inputs[len(loop.outputs) :])
    return [
        v
        for v in outside
        if values[v].dtype == "f32"
        and readers.get(v)
        and v not in body.returned
        and all(
            u.kind == "dynamic_slice" and u.inputs[0] == v and is_converted(u.outputs[0])
            for u in readers[v]
        )
    ]


def _reading(loop: LocalOp, value: int, copy: int) -> LocalOp:
    """The loop with another value read from outside."""
    *before, body = loop.blocks

    def there(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(copy if v == value else v for v in values)

    inner = replace(body, ops=tuple(replace(op, inputs=there(op.inputs)) for op in body.ops))
    return replace(loop, inputs=there(loop.inputs), blocks=(*before, inner))


def _blocks(block: LocalBlock) -> Iterator[LocalBlock]:
    yield block
    for op in block.ops:
        for inside in op.blocks:
            yield from _blocks(inside)
