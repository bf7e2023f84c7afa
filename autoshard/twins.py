"""Recomputed values that XLA:CPU makes one with what they recompute.

``jax.checkpoint`` guards recomputation with optimization barriers. XLA:CPU of jaxlib 0.10.2 drops
these early (``OptimizationBarrierExpander``) and then finds two ops on equal operands to be one, so
what a block recomputes from values it still has is not recomputed, sharded or not; that of jaxlib
0.12.0 does not. Between a loop and the loop of its gradient there is nothing to be found, and
recomputation stays; so does what is recomputed from a reduction that keeps its dimensions (a norm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from autoshard.cost_models.protocol import Compiler
from autoshard.graph import Graph
from autoshard.local import Decided
from autoshard.shardings import Sharding

FINDS_TWINS: frozenset[Compiler] = frozenset({"cpu"} if jax.__version_info__ < (0, 11) else ())
"""The compilers that do so (releases between 0.10.2 and 0.12.0 have not been tried)."""


@dataclass(frozen=True, slots=True)
class Twins:
    """What is one in the compiled program.

    Attributes:
        ops: Ops that are not run, and the one that is run for each.
        partial: Ops that are not run either, but whose partial results are combined once more:
            collectives are not found to be one.
    """

    ops: Mapping[int, int] = field(default_factory=dict)
    partial: frozenset[int] = frozenset()


def twins_of(graph: Graph, plans: Mapping[int, Decided], sharding: Mapping[int, Sharding]) -> Twins:
    """Find the twins of a program that one of :data:`FINDS_TWINS` compiles.

    Args:
        graph: The program; what its barriers hide is told by ``Tensor.same``.
        plans: The plans of its ops.
        sharding: The sharding of each value; none for free values.
    """
    if all(tensor.same == tensor.id for tensor in graph.values):
        return Twins()
    ops: dict[int, int] = {}
    partial: set[int] = set()
    values = {t.id: t.alias for t in graph.values}
    for op in graph.ops:
        first = graph.values[op.results[0]] if op.results else None
        if first is None or first.same == first.id or op.is_alias:
            continue
        other = graph.ops[graph.values[first.same].op]
        mine, theirs = plans.get(op.index), plans.get(other.index)
        if mine is None or theirs is None or not _is_decided_alike(mine, theirs):
            continue
        if 1 in first.shape:
            # XLA moves the reshape of a dimension kept by a reduction past one of the two, by what
            # else reads it, and then sees different operations.
            continue
        reads = zip(op.operands, other.operands, mine.operands, strict=True)
        if not all(
            graph.values[a].same == graph.values[b].same
            if graph.values[a].free
            else values[a] == values[b] and sharding[a] == sharding[b] == wanted
            for a, b, wanted in reads
        ):
            continue
        if mine.reduced:
            partial.add(op.index)
        else:
            ops[op.index] = ops.get(other.index, other.index)
            values.update((a, values[b]) for a, b in zip(op.results, other.results, strict=True))
    return Twins(ops, frozenset(partial))


def _is_decided_alike(mine: Decided, theirs: Decided) -> bool:
    return (mine.operands, mine.results, mine.partial, mine.reduced) == (
        theirs.operands,
        theirs.results,
        theirs.partial,
        theirs.reduced,
    )
