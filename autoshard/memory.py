"""Live bytes on one device over a sharded program: what is held, when, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.fusion import Fusion
from autoshard.graph import Graph


@dataclass(frozen=True, slots=True)
class Copy:
    """A value held a second time under another sharding.

    Attributes:
        name: What it is a copy of.
        nbytes: Bytes on one device.
        start: Index of the op before which it is made.
        end: Index of the last op that reads it.
    """

    name: str
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one call on one device.

    Attributes:
        peak_bytes: Arguments + results + temporaries - aliased.
        timeline: Live bytes while each op runs.
        holders: What is live at the fullest moment, (name, bytes), the largest first.
    """

    peak_bytes: int
    timeline: tuple[int, ...]
    holders: tuple[tuple[str, int], ...]


def footprint(
    graph: Graph, fusion: Fusion, local_bytes: Mapping[int, int], copies: tuple[Copy, ...]
) -> Footprint:
    """Add up what is live.

    Args:
        graph: The program.
        fusion: Which values have buffers and how long they live.
        local_bytes: Per value, its bytes on one device under the plan.
        copies: What reshards hold besides.
    """
    end = len(graph.ops)
    spans: list[tuple[str, int, int, int]] = []
    names = {v: i.name for v, i in zip(graph.arguments, graph.argument_info, strict=True)}
    for value in graph.arguments:
        spans.append((names[value], local_bytes[value], 0, end))
    tied = {graph.values[graph.results[r]].alias for _, r in graph.ties}
    results = {graph.values[v].alias for v in graph.results} - set(graph.arguments)
    for value in results - tied:
        info = graph.result_info[[graph.values[v].alias for v in graph.results].index(value)]
        spans.append((info.name, local_bytes[value], 0, end))
    for tensor in graph.values:
        if tensor.op < 0 or not fusion.materialized[tensor.id]:
            continue
        if tensor.id in results:
            continue
        op = graph.ops[tensor.op]
        name = f"{op.kind} #{op.index} {tensor.dtype}{list(tensor.shape)}"
        spans.append((name, local_bytes[tensor.id], tensor.op, fusion.last_use[tensor.id]))
    spans += [(c.name, c.nbytes, c.start, c.end) for c in copies]
    line = np.zeros(end + 2, np.int64)
    for _, nbytes, start, stop in spans:
        line[max(0, start)] += nbytes
        line[min(end, stop) + 1] -= nbytes
    live = np.cumsum(line)[: end + 1]
    fullest = int(np.argmax(live)) if len(live) else 0
    held = sorted(
        ((n, b) for n, b, start, stop in spans if start <= fullest <= stop and b),
        key=lambda h: -h[1],
    )
    return Footprint(int(live.max(initial=0)), tuple(live.tolist()), tuple(held[:20]))
