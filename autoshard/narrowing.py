"""Floats that XLA:TPU stores and moves in half of their size, because only products read them.

At JAX's default precision XLA:TPU multiplies f32 operands as bf16 (one pass of the matrix unit). It
converts such an operand where it is made, not where it is read: a value that nothing but products
reads is kept as bf16, and gathered and exchanged as bf16 on the way to them. Seen in programs that
libtpu 0.0.42 compiled ahead of time. A product of higher precision keeps its operands as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.graph import Graph, Op
from autoshard.kinds import PRODUCTS
from autoshard.local import LocalBlock, LocalOp, LocalProgram, LocalValue

_MOVES = frozenset(
    {"all_gather", "all_to_all", "permute", "slice", "pad", "reshape", "transpose", "concatenate"}
)


def reads_halves(op: Op, dtype: str, compiler: str) -> bool:
    """Whether an op reads operands of that type as bf16."""
    return compiler == "tpu" and dtype == "f32" and op.kind in PRODUCTS and not op.is_precise


def narrowed(graph: Graph, program: LocalProgram) -> list[LocalValue]:
    """The values of a device's program with the sizes that XLA:TPU stores them in."""
    values = list(program.values)
    wide = {v for v, value in enumerate(values) if value.dtype != "f32"}
    readers: dict[int, list[LocalOp]] = {}
    for block in _blocks(program.main):
        wide |= {*block.params, *block.returned}
        for op in block.ops:
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
            known[value] = value not in wide and bool(users) and all(map(wants_halves, users))
        return known[value]

    def wants_halves(op: LocalOp) -> bool:
        if op.kind in PRODUCTS:
            return reads_halves(graph.ops[op.op], "f32", "tpu")
        return op.kind in _MOVES and all(map(is_narrow, op.outputs))

    # From the end of the program to its start, so that no search goes deep.
    for v in reversed(range(len(values))):
        if is_narrow(v):
            values[v] = replace(values[v], dtype="bf16", nbytes=values[v].nbytes // 2)
    return values


def _blocks(block: LocalBlock) -> Iterator[LocalBlock]:
    yield block
    for op in block.ops:
        for inside in op.blocks:
            yield from _blocks(inside)
