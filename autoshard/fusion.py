"""The fusion model that bytes and memory are counted with before anything is sharded.

Which values are written to memory and when they are held is read off the unsharded program, by the
rules of :mod:`autoshard.buffers` and in the order of :mod:`autoshard.memory`. Sharding changes
sizes and adds collectives; it hardly changes this.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cost_models.protocol import Compiler
from autoshard.graph import Graph
from autoshard.local import LOCAL_VIEWS
from autoshard.localize import localize
from autoshard.memory import occupancy
from autoshard.shardings import MeshShape


@dataclass(frozen=True, slots=True)
class Fusion:
    """The outcome of the fusion model; all tuples have one entry per value of the graph.

    Attributes:
        materialized: Whether it is written to memory.
        spans: From which step to which (exclusive) it is held; (0, 0) if it never is.
        copies: How many buffers of its size are held over this time, on average.
        steps: How many steps the program has.
    """

    materialized: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]
    copies: tuple[float, ...]
    steps: int


def fuse(graph: Graph, compiler: Compiler) -> Fusion:
    """Decide for every value of ``graph`` whether it has a buffer, and how long it is held."""
    held = occupancy(localize(graph, MeshShape((), ()), None), compiler)
    arguments = set(graph.arguments)
    materialized, spans, copies = [], [], []
    for tensor in graph.values:
        buffers = list(held.buffers.get(tensor.id, ()))
        if tensor.id in arguments:
            buffers.append((0, held.steps))
        start = min((a for a, _ in buffers), default=0)
        stop = max((b for _, b in buffers), default=0)
        view = tensor.op >= 0 and graph.ops[tensor.op].kind in LOCAL_VIEWS
        written = tensor.id in held.written and not (view or tensor.free)
        materialized.append(tensor.id in arguments or written)
        spans.append((start, stop))
        copies.append(sum(b - a for a, b in buffers) / max(1, stop - start))
    return Fusion(tuple(materialized), tuple(spans), tuple(copies), held.steps)
