"""A first choice on a mesh of many axes: the best one that uses neighbouring axes as one.

Merging axes leaves each op the strategies that it would have on a mesh with fewer, longer axes: a
problem many times smaller, whose best choice is a choice of the whole problem too, at the same
cost. It is where the search on all axes starts from, so nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Graph
from autoshard.pricing import Priced
from autoshard.problem import Problem
from autoshard.reshard import layouts
from autoshard.shardings import MeshShape, Sharding

FEW_AXES = 2
"""Meshes with no more axes are searched as they are: their problems are small."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """A problem in which some axes are used together only.

    Attributes:
        problem: The problem.
        kept: Per node, the strategies of the whole problem that it has.
    """

    problem: Problem
    kept: tuple[NDArray[np.intp], ...]

    def whole(self, choices: Sequence[int]) -> tuple[int, ...]:
        """A choice of this problem as one of the whole problem."""
        return tuple(int(k[c]) for k, c in zip(self.kept, choices, strict=True))


def merges(mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Groups of axes to use as one axis each, so that few are left; empty if there are few.

    Examples:
        >>> merges(MeshShape(("x", "y", "z"), (2, 2, 2)))
        (('x', 'y'),)
        >>> merges(MeshShape(("x", "y", "z", "w"), (4, 2, 2, 2)))
        (('x', 'y'), ('z', 'w'))
        >>> merges(MeshShape(("x", "y"), (4, 2)))
        ()
    """
    axes = [a for a, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1]
    if len(axes) <= FEW_AXES:
        return ()
    half = -(-len(axes) // 2)
    return tuple(unit for unit in (tuple(axes[:half]), tuple(axes[half:])) if len(unit) > 1)


def coarse(
    graph: Graph, priced: Priced, problem: Problem, units: Sequence[tuple[str, ...]]
) -> Coarse:
    """The problem in which each of some groups of axes is used as one axis.

    A node that would have no strategy left, because a pin uses an axis alone, keeps all it has.

    Args:
        graph: The program.
        priced: What the problem means.
        problem: Its problem, or one with other costs for the same nodes.
        units: Groups of axes, each in mesh order.
    """
    finder = _Finder(graph, priced, units)
    kept = tuple(finder.kept(number) for number in range(len(priced.nodes)))
    vectors: dict[tuple[int, int], NDArray[np.int64]] = {}
    matrices: dict[tuple[int, int, int], NDArray[np.int64]] = {}

    def some(vector: NDArray[np.int64], keep: NDArray[np.intp]) -> NDArray[np.int64]:
        key = id(vector), id(keep)
        if key not in vectors:
            vectors[key] = vector[keep]
        return vectors[key]

    edge_costs = []
    for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
        key = id(matrix), id(kept[i]), id(kept[j])
        if key not in matrices:
            matrices[key] = np.ascontiguousarray(matrix[np.ix_(kept[i], kept[j])])
        edge_costs.append(matrices[key])
    smaller = replace(
        problem,
        costs=tuple(map(some, problem.costs, kept)),
        usages=tuple(map(some, problem.usages, kept)),
        edge_costs=tuple(edge_costs),
    )
    return Coarse(smaller, kept)


class _Finder:
    """Which strategies of each node use the axes of a unit together."""

    def __init__(self, graph: Graph, priced: Priced, units: Sequence[tuple[str, ...]]) -> None:
        self.graph, self.priced, self.units = graph, priced, units
        self.mesh = priced.resharder.mesh
        self.masks: dict[int, NDArray[np.bool_]] = {}  # by rank
        self.known: dict[object, NDArray[np.intp]] = {}
        edges = zip(priced.problem.edges.tolist(), priced.moved, strict=True)
        self.shared = {j: value for (_, j), (value, _) in edges if priced.nodes[j].kind == "hub"}

    def kept(self, number: int) -> NDArray[np.intp]:
        node = self.priced.nodes[number]
        values = (self.shared[number],) if node.kind == "hub" else node.values
        sides = list(zip(values, node.layouts, strict=True))
        if node.strategies is not None:
            operands = self.graph.ops[node.op].operands
            sides += zip(operands, node.strategies.operands, strict=True)
        ranks = [len(self.graph.values[value].shape) for value, _ in sides]
        key = (
            id(node.strategies),
            tuple((r, id(ids)) for r, (_, ids) in zip(ranks, sides, strict=True)),
        )
        if key not in self.known:
            keep = np.ones(len(node), np.bool_)
            for rank, (_, ids) in zip(ranks, sides, strict=True):
                keep &= self._mask(rank)[ids]
            if node.strategies is not None:
                factors = [self._together(axes) for axes in node.strategies.factor_axes]
                keep &= np.array(factors, np.bool_)
            self.known[key] = np.flatnonzero(keep) if keep.any() else np.arange(len(node))
        return self.known[key]

    def _mask(self, rank: int) -> NDArray[np.bool_]:
        if rank not in self.masks:
            shardings = layouts(rank, self.mesh).shardings
            self.masks[rank] = np.array([self._together(s) for s in shardings], np.bool_)
        return self.masks[rank]

    def _together(self, sharding: Sharding) -> bool:
        """Whether axes of a unit stand only where all of them do, one after the other."""
        for unit in self.units:
            for dim in sharding:
                at = dim.index(unit[0]) if unit[0] in dim else None
                if at is None:
                    if any(a in dim for a in unit):
                        return False
                elif dim[at : at + len(unit)] != unit:
                    return False
        return True
