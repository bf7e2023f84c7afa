"""Scatters that XLA:TPU writes as comparisons: one element per row, as in a loss's gradient.

Where each row of an array of zeros gets one element, at a place that an index says (the gradient of
picking the logit of a label), XLA:TPU compares the index with all places and selects. That is
elementwise and fuses with what reads it, so the array is never written. Seen in programs that
libtpu 0.0.42 compiled ahead of time.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph import Graph
from autoshard.kinds import MATERIAL_KINDS
from autoshard.local import LocalBlock, LocalOp, LocalProgram


def with_selects(graph: Graph, program: LocalProgram) -> LocalProgram:
    """The program with such scatters as the selects that XLA:TPU makes of them."""
    return replace(program, main=_block(graph, program.main))


def _block(graph: Graph, block: LocalBlock) -> LocalBlock:
    constant = {v for op in block.ops for v in op.outputs if op.kind in MATERIAL_KINDS}
    for op in block.ops:
        if op.kind == "broadcast_in_dim" and op.inputs[0] in constant:
            constant |= {*op.outputs}
    return replace(block, ops=tuple(_op(graph, op, constant) for op in block.ops))


def _op(graph: Graph, op: LocalOp, constant: set[int]) -> LocalOp:
    if op.blocks:
        return replace(op, blocks=tuple(_block(graph, block) for block in op.blocks))
    if op.kind == "scatter" and op.inputs[0] in constant and _is_one_per_row(graph, op.op):
        return replace(op, kind="select", inputs=op.inputs[1:])
    return op


def _is_one_per_row(graph: Graph, index: int) -> bool:
    """Whether a scatter puts one element into each row of its operand."""
    rule = graph.ops[index].rule
    if rule is None or len(rule.operands) != 3:
        return False
    target, indices, updates = (
        {f for dim in dims for f in dim if rule.sizes[f] > 1} for dims in rule.operands
    )
    filled = target - updates
    return len(filled) == 1 and updates <= target and updates <= indices
