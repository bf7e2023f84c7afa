"""Which values get a buffer of their own: the fusion model that bytes and memory are counted with.

Elementwise work fuses into what reads it; matrix products, reductions, gathers, loops and
collectives read and write memory. A value is *materialized* when something that does not fuse reads
it, when it leaves its region, or when several ops read it and computing it again is not cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.graph import MATERIALS, Graph, Op

VIEWS = frozenset({"stablehlo.reshape"})
"""Ops that only rename dimensions; they move no data while the tensor stays in one piece."""

CHEAP = frozenset(
    {
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.reshape",
        "stablehlo.slice",
        "stablehlo.compare",
        "stablehlo.iota",
        "stablehlo.constant",
        "stablehlo.negate",
    }
)
"""Ops that compilers rather compute again in every reader than keep."""

MEMORY_OPS = frozenset(
    {
        "stablehlo.dot_general",
        "stablehlo.convolution",
        "stablehlo.gather",
        "stablehlo.scatter",
        "stablehlo.sort",
        "stablehlo.while",
        "stablehlo.case",
        "stablehlo.if",
        "stablehlo.custom_call",
        "stablehlo.reduce_window",
        "stablehlo.select_and_scatter",
        "stablehlo.rng_bit_generator",
        "stablehlo.fft",
        "stablehlo.cholesky",
        "stablehlo.triangular_solve",
        "stablehlo.dynamic_update_slice",
        "stablehlo.concatenate",
        "sdy.manual_computation",
        "chlo.top_k",
    }
)
"""Ops that read their operands from memory and write their results to it."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """The outcome of the fusion model.

    Attributes:
        materialized: Per value, whether it has a buffer.
        readers: Per value, the indices of the ops that read it (a loop reads what it starts from).
        last_use: Per value, the index of the op after which it is dead; the number of ops for
            results of the program.
    """

    materialized: tuple[bool, ...]
    readers: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]


def fuse(graph: Graph) -> Fusion:
    """Decide for every value of ``graph`` whether it has a buffer, and how long it lives."""
    readers: list[list[int]] = [[] for _ in graph.values]
    returned: list[bool] = [False] * len(graph.values)
    ends = _region_ends(graph)
    last = [v.op for v in graph.values]
    root = [v.alias for v in graph.values]
    for op in graph.ops:
        for v in (root[o] for o in op.operands):
            readers[v].append(op.index)
            last[v] = max(last[v], _seen_from(graph, v, op.index, ends))
        for region in op.returned:
            for v in (root[r] for r in region):
                returned[v] = True
                last[v] = max(last[v], _seen_from(graph, v, ends[op.index], ends))
        for v in op.results:
            if op.name == "stablehlo.while":
                last[v] = max(last[v], ends[op.index])
    for v in (root[r] for r in graph.results):
        returned[v] = True
        last[v] = len(graph.ops)
    materialized = [
        v.alias == v.id and _has_buffer(graph, v.id, readers[v.id], returned[v.id])
        for v in graph.values
    ]
    return Fusion(tuple(materialized), tuple(map(tuple, readers)), tuple(last))


def _region_ends(graph: Graph) -> list[int]:
    """Per op, the index of the last op inside it (itself if it holds none)."""
    ends = list(range(len(graph.ops)))
    for op in reversed(graph.ops):
        if op.parent >= 0:
            ends[op.parent] = max(ends[op.parent], ends[op.index])
    return ends


def _seen_from(graph: Graph, value: int, reader: int, ends: list[int]) -> int:
    """A read inside a loop that does not make the value lasts until the loop ends."""
    maker = graph.values[value].op
    home = graph.ops[maker].parent if maker >= 0 else -1
    inside = maker if maker >= 0 and graph.ops[maker].name == "stablehlo.while" else None
    place, result = graph.ops[reader].parent, reader
    while place != home and place >= 0 and place != inside:
        result = max(result, ends[place])
        place = graph.ops[place].parent
    return result


def _has_buffer(graph: Graph, value: int, readers: list[int], returned: bool) -> bool:
    tensor = graph.values[value]
    maker = graph.ops[tensor.op] if tensor.op >= 0 else None
    if maker is None or maker.name in MEMORY_OPS:
        return True
    if tensor.free or maker.is_alias:
        return False
    if returned:
        return maker.name not in VIEWS
    reading = [graph.ops[r] for r in readers if not graph.ops[r].is_alias]
    if any(_reads_memory(graph, op, value) for op in reading):
        return maker.name not in VIEWS
    if maker.kind == "reduce":
        return True
    return len({op.index for op in reading}) > 1 and maker.name not in CHEAP


def _reads_memory(graph: Graph, op: Op, value: int) -> bool:
    """Whether ``op`` needs ``value`` in memory; a view passes the question on to its readers."""
    if op.name in MATERIALS:
        return False
    if op.name == "stablehlo.dynamic_update_slice":
        return op.operands[0] == value
    return op.name in MEMORY_OPS
