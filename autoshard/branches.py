"""Which branch of each conditional a plan's totals count: the costliest, as for compiled programs.

A call runs one branch; which one is not known before. Counting the costliest alone makes the totals
an upper bound that a call can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoshard.graph import Graph

Block = tuple[int, int]
"""An op and which of its regions; (-1, 0) is the program's outermost block."""


def weigh(
    graph: Graph, flops: Mapping[int, float], sent: Iterable[tuple[Block, float]]
) -> dict[Block, tuple[float, float]]:
    """(FLOP, bytes sent) of each block, without the blocks inside it.

    Args:
        graph: The program.
        flops: Per op that counts, what all its executions in one call compute [FLOP].
        sent: Per collective, its block and what all its executions send [bytes].
    """
    weights: dict[Block, tuple[float, float]] = {}
    for index, amount in flops.items():
        block = graph.ops[index].parent, graph.ops[index].region
        computed, moved = weights.get(block, (0.0, 0.0))
        weights[block] = computed + amount, moved
    for block, amount in sent:
        computed, moved = weights.get(block, (0.0, 0.0))
        weights[block] = computed, moved + amount
    return weights


def uncounted(graph: Graph, weights: Mapping[Block, tuple[float, float]]) -> frozenset[Block]:
    """Blocks of branches that are not the costliest of their conditional.

    Args:
        graph: The program.
        weights: Per block, what orders branches: (FLOP, bytes sent) of all its executions, without
            the blocks inside it.

    Returns:
        The blocks left out, those inside others of them included.
    """
    total = dict(weights)
    chosen: dict[int, int] = {}
    for op in reversed(graph.ops):  # what is inside an op comes after it
        count = 2 if op.name == "stablehlo.while" else len(op.returned)
        inside = [total.get((op.index, region), (0.0, 0.0)) for region in range(count)]
        if op.name in ("stablehlo.case", "stablehlo.if"):
            chosen[op.index] = max(range(count), key=inside.__getitem__, default=0)
            inside = inside[chosen[op.index] :][:1]
        flops, sent = total.get((op.parent, op.region), (0.0, 0.0))
        flops += sum(f for f, _ in inside)
        sent += sum(s for _, s in inside)
        total[op.parent, op.region] = flops, sent
    left: set[Block] = set()
    for op in graph.ops:
        outside = (op.parent, op.region) in left
        for region in range(2 if op.name == "stablehlo.while" else len(op.returned)):
            if outside or chosen.get(op.index, region) != region:
                left.add((op.index, region))
    return frozenset(left)
