"""Sums of partial results that XLA:TPU adds before it combines them, in one collective.

Where two reductions over the same devices are read by nothing but an addition of the two, XLA:TPU
adds the partial results and reduces once, all-reduces as well as reduce-scatters, and so on for
sums of more. The gradient of a value that several products read is such a sum. Seen in programs
that libtpu 0.0.42 compiled ahead of time: a difference is not treated so, nor results that
something else reads too or that are converted first. XLA:CPU keeps them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoshard.graph import Graph
from autoshard.kinds import PRODUCTS
from autoshard.local import Decided
from autoshard.reads import reads


def reassociated(graph: Graph, plans: Mapping[int, Decided]) -> frozenset[int]:
    """Ops whose partial results are added to another's instead of being combined themselves.

    Args:
        graph: The program.
        plans: The plans of its ops, by index.
    """
    readers = Counter(read.value for read in reads(graph))
    reduced: dict[int, int] = {}  # value -> op that reduces it
    joined: set[int] = set()
    for op in graph.ops:
        plan = plans.get(op.index)
        if plan is None:
            continue
        if op.kind in PRODUCTS or (op.kind == "reduce" and op.combiner == "stablehlo.add"):
            if plan.reduced and len(op.results) == 1:
                reduced[op.results[0]] = op.index
            continue
        if op.kind != "add" or len(set(op.operands)) < 2:
            continue
        makers = [reduced.get(value) for value in op.operands]
        if None in makers or any(readers[value] > 1 for value in op.operands):
            continue
        one, other = (graph.ops[index] for index in makers if index is not None)
        mine, theirs = plans[one.index], plans[other.index]
        alike = (mine.reduced, mine.partial) == (theirs.reduced, theirs.partial)
        together = {(o.parent, o.region) for o in (op, one, other)}
        as_made = (*mine.results, *theirs.results) == plan.operands
        if alike and len(together) == 1 and as_made and mine.results == plan.results:
            joined.add(one.index)
            reduced[op.results[0]] = other.index
    return frozenset(joined)
