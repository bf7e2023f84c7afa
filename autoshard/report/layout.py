"""A readable picture of a large graph: its most expensive ops, in layers from top to bottom.

The method is the one of Sugiyama, Tagawa, Toda 1981 ("Methods for visual understanding of
hierarchical system structures"): layers by longest path, long edges broken into points, crossings
lowered by sorting each layer by the mean position of its neighbours. Positions inside a layer are
the least-squares ones that keep the order and a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

POINT_WIDTH = 0.18
"""Room that an edge passing through a layer takes, in node widths."""


@dataclass(frozen=True, slots=True)
class Link:
    """A value that goes from one op to another.

    Attributes:
        producer: Index of the op that makes it; -1 for an argument of the program.
        consumer: Index of the op that reads it.
        reshard: The reshard on the way, as text; empty if there is none.
        seconds: Time of the reshard [s].
    """

    producer: int
    consumer: int
    reshard: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """An edge of the picture.

    Attributes:
        producer: Index of the upper op.
        consumer: Index of the lower op.
        reshard: As in :class:`Link`.
        seconds: As in :class:`Link`.
        through: Whether it stands for a path through ops that are left out.
        points: ``(x, layer)`` of the corners, both ends included.
    """

    producer: int
    consumer: int
    reshard: str
    seconds: float
    through: bool
    points: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Where to draw what.

    Attributes:
        nodes: Per op that is drawn, ``(index, x, layer, fetched)``: x in node widths, and the
            reshards of the arguments that it reads.
        edges: Edges between them.
        ops: Number of ops in the whole graph.
    """

    nodes: tuple[tuple[int, float, int, tuple[str, ...]], ...]
    edges: tuple[DrawnEdge, ...]
    ops: int


def picture(cost_s: Mapping[int, float], links: Sequence[Link], *, most: int = 36) -> Picture:
    """Lay out the ``most`` most expensive ops of a graph.

    The ends of the most expensive reshards (a slice costs nothing) take up to half of the places.
    An edge that only repeats a longer way round is left out, unless it is resharded. Links may pass
    through ops that have no cost; those are never drawn.

    Args:
        cost_s: Predicted time of every op [s].
        links: Values between ops; ones that go back to an earlier op (loops) are left out.
        most: How many ops to draw at most.
    """
    forward = [e for e in links if 0 <= e.producer < e.consumer]
    fetched: dict[int, list[str]] = defaultdict(list)
    for link in links:
        if link.producer < 0 and link.reshard:
            fetched[link.consumer].append(link.reshard)
    kept = _chosen(cost_s, forward, most)
    graph = _contracted(kept, forward)
    layer = {
        n: depth for depth, layer in enumerate(nx.topological_generations(graph)) for n in layer
    }
    chains = {edge: _chain(edge, layer) for edge in graph.edges}
    x = _positions(chains, layer)
    edges = tuple(
        DrawnEdge(
            a, b, data["reshard"], data["seconds"], data["through"],
            tuple((x[point], depth) for point, depth in chains[a, b]),
        )
        for a, b, data in graph.edges(data=True)
    )  # fmt: skip
    nodes = tuple((n, x[n, n, layer[n]], layer[n], tuple(fetched[n])) for n in sorted(kept))
    return Picture(nodes, edges, len(cost_s))


Point = tuple[int, int, int]
"""Corner of an edge: producer, consumer, layer; an op itself is its own producer and consumer."""


def _chosen(cost_s: Mapping[int, float], links: Sequence[Link], most: int) -> set[int]:
    kept: set[int] = set()
    for link in sorted((e for e in links if e.seconds > 0), key=lambda e: -e.seconds):
        ends = {link.producer, link.consumer}
        if ends <= cost_s.keys() and len(kept | ends) <= most // 2:
            kept |= ends
    for op in sorted(cost_s, key=lambda op: (-cost_s[op], op)):
        if len(kept) == most:
            break
        kept.add(op)
    return kept


def _contracted(kept: set[int], links: Sequence[Link]) -> nx.DiGraph[int]:
    """The kept ops, with an edge for each path that touches no other kept op."""
    above: dict[int, set[int]] = defaultdict(set)
    direct: dict[tuple[int, int], Link] = {}
    for link in sorted(links, key=lambda e: (e.consumer, e.producer)):
        from_producer = {link.producer} if link.producer in kept else above[link.producer]
        above[link.consumer] |= from_producer
        pair = (link.producer, link.consumer)
        if pair not in direct or link.seconds > direct[pair].seconds:
            direct[pair] = link
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(sorted(kept))
    graph.add_edges_from((a, b) for b in sorted(kept) for a in sorted(above[b]))
    needed = nx.transitive_reduction(graph).edges
    for a, b in list(graph.edges):
        link = direct.get((a, b), Link(a, b))
        if link.reshard or (a, b) in needed:
            graph.edges[a, b].update(
                reshard=link.reshard, seconds=link.seconds, through=(a, b) not in direct
            )
        else:
            graph.remove_edge(a, b)
    return graph


def _chain(edge: tuple[int, int], layer: Mapping[int, int]) -> list[tuple[Point, int]]:
    a, b = edge
    inner = [((a, b, depth), depth) for depth in range(layer[a] + 1, layer[b])]
    return [((a, a, layer[a]), layer[a]), *inner, ((b, b, layer[b]), layer[b])]


def _positions(
    chains: Mapping[tuple[int, int], list[tuple[Point, int]]], layer: Mapping[int, int]
) -> dict[Point, float]:
    rows: dict[int, list[Point]] = defaultdict(list)
    for node, depth in layer.items():
        rows[depth].append((node, node, depth))
    upper: dict[Point, list[Point]] = defaultdict(list)
    lower: dict[Point, list[Point]] = defaultdict(list)
    for chain in chains.values():
        for point, depth in chain[1:-1]:
            rows[depth].append(point)
        for (a, _), (b, _) in pairwise(chain):
            lower[a].append(b)
            upper[b].append(a)
    x = {p: float(i) for row in rows.values() for i, p in enumerate(row)}
    for sweep in range(12):
        downwards = sweep % 2 == 0
        near = upper if downwards else lower
        for depth in sorted(rows, reverse=not downwards):
            wanted = {p: _mean([x[q] for q in near[p]], x[p]) for p in rows[depth]}
            rows[depth].sort(key=lambda p, wanted=wanted: (wanted[p], x[p]))  # type: ignore[misc]
            x.update(_spread(rows[depth], wanted))
    for sweep in range(6):  # order is settled; now between the neighbours on both sides
        for depth in sorted(rows, reverse=sweep % 2 == 1):
            wanted = {p: _mean([x[q] for q in upper[p] + lower[p]], x[p]) for p in rows[depth]}
            x.update(_spread(rows[depth], wanted))
    left = min(x.values(), default=0.0)
    return {p: at - left for p, at in x.items()}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _width(point: Point) -> float:
    return 1.12 if point[0] == point[1] else POINT_WIDTH


def _spread(row: Sequence[Point], wanted: Mapping[Point, float]) -> dict[Point, float]:
    """Positions nearest to the wanted ones that keep the order and the widths.

    Taking the widths off makes it an isotonic regression, solved by pooling adjacent violators.
    """
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (_width(a) + _width(b)) / 2)
    pools: list[tuple[float, int]] = []
    for point, offset in zip(row, offsets, strict=True):
        total, count = wanted[point] - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, many = pools.pop()
            total, count = total + before, count + many
        pools.append((total, count))
    level = [total / count for total, count in pools for _ in range(count)]
    return {p: a + b for p, a, b in zip(row, level, offsets, strict=True)}
