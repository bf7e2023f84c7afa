"""Bucket elimination: the exact optimum of a network whose tables stay small.

After Dechter, "Bucket elimination: a unifying framework for reasoning" (1999). The order is fixed
once; costs of nodes may change between runs, which is what a search over memory prices needs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.solution import Deadline

_DENSE = 1 << 18
_TERMS = 8  # sums of this many clipped terms plus one stay far from the end of int64


@dataclass(frozen=True, slots=True)
class Bucket:
    """What happens to one node.

    Attributes:
        node: The node minimised away.
        scope: The nodes its message depends on.
        pairs: Neighbours whose pair matrices are used up here.
        messages: Positions of earlier buckets whose messages are used up here.
    """

    node: int
    scope: tuple[int, ...]
    pairs: tuple[int, ...]
    messages: tuple[int, ...]


def plan_elimination(
    net: Network, *, most_entries: int = 1 << 21, most_work: int = 1 << 31
) -> tuple[Bucket, ...] | None:
    """A greedy order that keeps tables small, smallest table first.

    Args:
        net: The network.
        most_entries: Entries a message may have.
        most_work: Entries that all steps may look at together.

    Returns:
        The buckets in order; None if some table would be too large.
    """
    near = {node: set(row) for node, row in net.links.items()}
    size = {node: len(cost) for node, cost in net.costs.items()}
    inbox: dict[int, list[int]] = {node: [] for node in near}
    scopes: list[tuple[int, ...]] = []
    buckets: list[Bucket] = []
    gone: set[int] = set()
    used: list[bool] = []

    def entries(node: int) -> int:
        return math.prod(size[k] for k in near[node])

    heap = [(entries(node) * size[node], node) for node in near]
    heapq.heapify(heap)
    work = 0
    while heap:
        weight, node = heapq.heappop(heap)
        if node in gone or weight != entries(node) * size[node]:
            continue
        work += weight
        if entries(node) > most_entries or work > most_work:
            return None
        scope = tuple(sorted(near[node]))
        messages = tuple(m for m in dict.fromkeys(inbox[node]) if not used[m])
        for m in messages:
            used[m] = True
        pairs = tuple(k for k in net.links[node] if k not in gone)
        buckets.append(Bucket(node, scope, tuple(sorted(pairs)), messages))
        gone.add(node)
        used.append(False)
        scopes.append(scope)
        for k in scope:
            inbox[k].append(len(buckets) - 1)
            near[k] |= near[node]
            near[k] -= {k, node}
        for k in scope:
            heapq.heappush(heap, (entries(k) * size[k], k))
        del near[node]
    return tuple(buckets)


@dataclass(slots=True)
class Elimination:
    """One run over planned buckets.

    Attributes:
        net: The network.
        buckets: From ``plan_elimination``.
        tables: Per bucket, the factors that were added up there, each with its axes.
    """

    net: Network
    buckets: tuple[Bucket, ...]
    tables: list[list[tuple[tuple[int, ...], Ints]]]

    @classmethod
    def run(
        cls,
        net: Network,
        buckets: tuple[Bucket, ...],
        deadline: Deadline,
        costs: Mapping[int, Ints] | None = None,
    ) -> tuple[int, Elimination] | None:
        """Minimise node after node.

        Args:
            net: The network.
            buckets: Its planned elimination.
            deadline: When to give up.
            costs: Costs of nodes to use in place of the network's; the sum of the allowed ones
                must stay below ``INF``.

        Returns:
            The least cost without the network's offset (``INF`` if there is no allowed choice) and
            the run, to read a best choice from; None if time ran out.
        """
        costs = net.costs if costs is None else costs
        messages: list[tuple[tuple[int, ...], Ints] | None] = []
        done = cls(net, buckets, [])
        value = 0
        for bucket in buckets:
            if deadline.left_s <= 0:
                return None
            node = bucket.node
            factors: list[tuple[tuple[int, ...], Ints]] = [((node,), costs[node])]
            factors += [((node, k), net.links[node][k]) for k in bucket.pairs]
            for m in bucket.messages:
                message = messages[m]
                assert message is not None
                factors.append(message)
                messages[m] = None
            table = _minimise(node, bucket.scope, factors, net)
            low = int(table.min())
            value += low
            if value >= INF:
                return INF, done
            messages.append((bucket.scope, np.where(table < INF, table - low, INF)))
            done.tables.append(factors)
        return value, done

    def best(self) -> dict[int, int]:
        """The states of a cheapest choice."""
        states: dict[int, int] = {}
        for bucket, factors in zip(reversed(self.buckets), reversed(self.tables), strict=True):
            total = np.zeros(self.net.size(bucket.node), np.int64)
            for axes, table in factors:
                index = tuple(slice(None) if k == bucket.node else states[k] for k in axes)
                total = np.minimum(total + table[index], INF)
            states[bucket.node] = int(total.argmin())
        return states


def _minimise(
    node: int,
    scope: tuple[int, ...],
    factors: list[tuple[tuple[int, ...], Ints]],
    net: Network,
) -> Ints:
    """Add factors up over ``(node, *scope)`` and minimise over the node."""
    axes = (node, *scope)
    shape = tuple(net.size(k) for k in axes)
    views = sorted((_spread(own, table, axes) for own, table in factors), key=lambda v: v.size)
    out = np.full(shape[1:], INF, np.int64)
    chunk = max(1, _DENSE // math.prod(shape[1:]))
    for first in range(0, shape[0], chunk):
        part = [v[first : first + chunk] if len(v) > 1 else v for v in views]
        total = _add(part, (min(chunk, shape[0] - first), *shape[1:]))
        np.minimum(out, total.min(axis=0), out=out)
    return out


def _spread(own: tuple[int, ...], table: Ints, axes: tuple[int, ...]) -> Ints:
    """View a table over some axes as one over all of them."""
    order = sorted(range(len(own)), key=lambda k: axes.index(own[k]))
    sizes = dict(zip(own, table.shape, strict=True))
    return table.transpose(order).reshape([sizes.get(k, 1) for k in axes])


def _add(views: list[Ints], shape: tuple[int, ...]) -> Ints:
    """The sum of views that broadcast to a shape, clipped."""
    total = views[0]
    for count, view in enumerate(views[1:], 1):
        total = total + view
        if count % _TERMS == 0:
            total = np.minimum(total, INF)
    return np.broadcast_to(np.minimum(total, INF), shape)
