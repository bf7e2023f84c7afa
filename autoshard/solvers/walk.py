"""Local search on a network: single moves, and exact moves of whole neighbourhoods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.cpsat import excess, paid
from autoshard.solvers.eliminate import Elimination, plan_elimination
from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.solution import Deadline


@dataclass(slots=True)
class Walk:
    """A choice on a network that is being improved.

    Attributes:
        net: The network; not changed.
        states: The choice.
        over: Per memory row, usage above capacity [bytes].
    """

    net: Network
    states: dict[int, int]
    over: Ints
    _local: dict[int, Ints] = field(default_factory=dict)

    @classmethod
    def at(cls, net: Network, states: dict[int, int]) -> Walk:
        """Start at a choice."""
        return cls(net, dict(states), excess(net, states))

    @property
    def paid(self) -> int:
        """What the choice pays above the network's offset; ``INF`` or more if forbidden."""
        return paid(self.net, self.states)

    @property
    def feasible(self) -> bool:
        """Nothing is forbidden and every memory row has room."""
        return not (self.over > 0).any() and self.paid < INF

    def _paid_by(self, block: set[int]) -> int:
        """What the nodes of a block and all their edges pay."""
        states, cost = self.states, 0
        for node in block:
            cost += int(self.net.costs[node][states[node]])
            for other, matrix in self.net.links[node].items():
                if other not in block or node < other:
                    cost += int(matrix[states[node], states[other]])
        return cost

    def local_costs(self, node: int) -> Ints:
        """What each state of a node would pay with its neighbours as they are."""
        cached = self._local.get(node)
        if cached is None:
            cached = self.net.costs[node]
            for count, (other, matrix) in enumerate(self.net.links[node].items(), 1):
                cached = cached + matrix[:, self.states[other]]
                if count % 8 == 0:
                    cached = np.minimum(cached, INF)
            cached = np.minimum(cached, INF)
            self._local[node] = cached
        return cached

    def overflow(self, node: int) -> Ints:
        """Per state of a node, the overflow of all rows it can touch, summed [bytes]."""
        parts = self.net.segments.get(node, ())
        total = np.zeros(self.net.size(node), np.int64)
        if not parts:
            return total
        first, end = min(p.first for p in parts), max(p.end for p in parts)
        rows = np.broadcast_to(self.over[first:end], (len(total), end - first)).copy()
        for p in parts:
            change = p.usage - p.usage[self.states[node]]
            rows[:, p.first - first : p.end - first] += change[:, None]
        result: Ints = np.maximum(rows, 0).sum(axis=1)
        return result

    def move(self, node: int, state: int) -> None:
        """Change the state of a node."""
        for part in self.net.segments.get(node, ()):
            change = part.usage[state] - part.usage[self.states[node]]
            self.over[part.first : part.end] += change
        self.states[node] = state
        for other in self.net.links[node]:
            self._local.pop(other, None)

    def descend(
        self, *, weight: float, prices: NDArray[np.float64] | None, deadline: Deadline
    ) -> None:
        """Move single nodes to their best state until none gains.

        Args:
            weight: Cost of one byte of overflow; infinite: overflow comes first.
            prices: Per memory row, the cost of one byte of use; None for free.
            deadline: When to stop.
        """
        waiting = dict.fromkeys(sorted(self.net.costs))
        sums = None if prices is None else np.concatenate([[0.0], np.cumsum(prices)])
        budget = 50 * len(waiting)
        while waiting and budget and deadline.left_s > 0:
            budget -= 1
            node = next(iter(waiting))
            del waiting[node]
            here = self.states[node]
            merit = self.local_costs(node).astype(np.float64)
            if sums is not None:
                for part in self.net.segments.get(node, ()):
                    merit += (sums[part.end] - sums[part.first]) * part.usage
            if node in self.net.segments:
                over = self.overflow(node)
                if np.isinf(weight):
                    merit[over > min(over[here], over.min())] = np.inf
                else:
                    merit += weight * over
            best = int(merit.argmin())
            if merit[best] < merit[here]:
                self.move(node, best)
                waiting.update(dict.fromkeys(self.net.links[node]))

    def repair(self, prices: NDArray[np.float64], deadline: Deadline) -> None:
        """Bring the choice within the memory rows, at ever higher prices for overflow."""
        allowed = [cost[cost < INF] for cost in self.net.costs.values()]
        spread = float(max((cost.max(initial=0) for cost in allowed), default=0)) + 1.0
        most = max(1.0, float(self.over.max(initial=0)))
        weight = 1e-3 * spread / most
        for _ in range(30):
            if deadline.left_s <= 0 or not (self.over > 0).any():
                break
            self.descend(weight=weight, prices=prices, deadline=deadline)
            weight *= 4
        if (self.over > 0).any():
            self.descend(weight=np.inf, prices=None, deadline=deadline)

    def improve_block(
        self, block: Iterable[int], prices: NDArray[np.float64], deadline: Deadline
    ) -> bool:
        """Solve a block of nodes exactly with everything else fixed, memory at prices.

        Keeps the result only if the cost falls and no row overflows that did not before.

        Returns:
            Whether the choice changed.
        """
        inside = set(block)
        sub = Network()
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        for node in inside:
            cost = self.net.costs[node]
            sub.links[node] = {}
            for count, (other, matrix) in enumerate(self.net.links[node].items(), 1):
                if other in inside:
                    sub.links[node][other] = matrix
                else:
                    cost = cost + matrix[:, self.states[other]]
                    if count % 8 == 0:
                        cost = np.minimum(cost, INF)
            for part in self.net.segments.get(node, ()):
                charge = (sums[part.end] - sums[part.first]) * part.usage
                cost = cost + np.minimum(charge, INF >> 8).astype(np.int64)
            sub.costs[node] = np.minimum(cost, INF)
        buckets = plan_elimination(sub, most_entries=1 << 16, most_work=1 << 21)
        if buckets is None:
            return False
        ran = Elimination.run(sub, buckets, deadline)
        if ran is None or ran[0] >= INF:
            return False
        before, old = self._paid_by(inside), {node: self.states[node] for node in inside}
        over_before = np.maximum(self.over, 0).sum()
        for node, state in ran[1].best().items():
            if state != old[node]:
                self.move(node, state)
        self._local.clear()
        over = np.maximum(self.over, 0).sum()
        after = self._paid_by(inside)
        if over < over_before or (over == over_before and after < before):
            return True
        for node, state in old.items():
            if self.states[node] != state:
                self.move(node, state)
        self._local.clear()
        return False


def ball(net: Network, start: int, size: int, rng: np.random.Generator) -> list[int]:
    """Nodes around a node, grown at random along edges."""
    chosen = {start}
    edge = [start]
    while edge and len(chosen) < size:
        node = edge[int(rng.integers(len(edge)))]
        fresh = [k for k in net.links[node] if k not in chosen]
        if not fresh:
            edge.remove(node)
            continue
        pick = fresh[int(rng.integers(len(fresh)))]
        chosen.add(pick)
        edge.append(pick)
    return sorted(chosen)
