"""A rising lower bound: costs moved along edges, memory rows priced.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", 2006), written as moving costs in place: what a node charges is shared out
to its edges and collected again, and whatever all its states come to charge moves to the bound. All
numbers are integers that never go negative, so the bound is proved at any moment, not only when the
process has settled. Memory rows enter with prices (Lagrange multipliers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.network import INF, Ints, Network

_ROOM = 1 << 56  # scaled costs, and prices times usages, each span less than this: both fit in INF


@dataclass(slots=True)
class Dual:
    """A scaled copy of a network whose costs are moved about.

    Attributes:
        net: The network that is bounded; not changed.
        scale: Costs here are the network's times this.
        offset: Proved lower bound, scaled.
        prices: Per memory row, the scaled cost of one byte.
        costs: Per node, what it charges now.
        links: As in a network, but both directions are views of one array.
        floors: Per node and state, the best proved bound on choices with that state, scaled, above
            the network's own offset.
        order: Nodes in the order of the sweeps.
        impossible: Some node has no allowed state.
    """

    net: Network
    scale: int
    offset: int
    prices: Ints
    costs: dict[int, Ints]
    links: dict[int, dict[int, Ints]]
    floors: dict[int, Ints]
    order: tuple[int, ...]
    impossible: bool = False
    _forbidden: dict[int, dict[int, NDArray[np.bool_] | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, net: Network) -> Dual:
        """Start from a network's own costs with all prices zero."""
        spread = 1 + sum(_largest(cost) for cost in net.costs.values())
        spread += sum(
            _largest(matrix) for i, row in net.links.items() for j, matrix in row.items() if i < j
        )
        scale = max(1, 1 << min(30, int(math.log2(_ROOM)) - spread.bit_length()))
        dual = cls(
            net=net,
            scale=scale,
            offset=net.offset * scale,
            prices=np.zeros(len(net.capacity), np.int64),
            costs={i: np.where(cost < INF, cost * scale, INF) for i, cost in net.costs.items()},
            links={i: {} for i in net.links},
            floors={i: np.full(len(cost), -INF) for i, cost in net.costs.items()},
            order=tuple(sorted(net.costs)),
        )
        dual._forbidden = {i: {} for i in net.links}
        for i, row in net.links.items():
            for j, matrix in row.items():
                if i < j:
                    mask = matrix >= INF
                    scaled = np.where(mask, INF, matrix * scale)
                    dual.links[i][j], dual.links[j][i] = scaled, scaled.T
                    has = bool(mask.any())
                    dual._forbidden[i][j] = mask if has else None
                    dual._forbidden[j][i] = mask.T if has else None
        return dual

    @property
    def bound(self) -> int:
        """Proved lower bound on the network's cost, its offset included."""
        return -(-self.offset // self.scale)

    def set_prices(self, wanted: NDArray[np.float64]) -> None:
        """Charge other prices for memory; the bound stays proved, and may fall.

        Args:
            wanted: Scaled cost of one byte per row, at least 0; rounded down, and all lowered alike
                where the charges would not fit 64 bits.
        """
        sums = np.concatenate([[0.0], np.cumsum(wanted)])
        charges = sum(
            float(sums[part.end] - sums[part.first]) * float(part.usage.max())
            for parts in self.net.segments.values()
            for part in parts
        )
        prices = (wanted * min(1.0, _ROOM / max(charges, 1.0))).astype(np.int64)
        moves = prices - self.prices
        change = np.concatenate([[0], np.cumsum(moves)])
        self.offset -= sum(map(mul, moves.tolist(), self.net.capacity.tolist()))
        for node, parts in self.net.segments.items():
            cost = self.costs[node].copy()
            for part in parts:
                cost += (change[part.end] - change[part.first]) * part.usage
            dead = self.costs[node] >= INF
            cost[dead] = INF
            low = int(cost.min())
            self.offset += low
            self.costs[node] = np.where(dead, INF, np.minimum(cost - low, INF))
        self.prices = prices

    def sweep(self) -> None:
        """Visit all nodes once in each direction."""
        place = {node: k for k, node in enumerate(self.order)}
        for direction in (1, -1):
            for node in self.order[::direction]:
                self._visit(node, place, direction)

    def _visit(self, node: int, place: dict[int, int], direction: int) -> None:
        links = self.links[node]
        lows = [matrix.min(axis=1) for matrix in links.values()]
        total = self.costs[node]
        for low in lows:
            total = total + low
        total = np.minimum(total, INF)
        least = int(total.min())
        if least >= INF:
            self.impossible = True
            return
        self.offset += least
        dead = total >= INF
        total = total - least
        total[dead] = INF
        floor = np.where(dead, INF, total + (self.offset - self.net.offset * self.scale))
        np.maximum(self.floors[node], floor, out=self.floors[node])
        here = place[node]
        ahead = sum((place[other] - here) * direction > 0 for other in links)
        parts = max(ahead, len(links) - ahead, 1)
        share = total // parts
        forbidden = self._forbidden[node]
        for (other, matrix), low in zip(links.items(), lows, strict=True):
            give = share - low if (place[other] - here) * direction > 0 else -low
            if give.any():
                matrix += give[:, None]
                mask = forbidden[other]
                if mask is not None:
                    np.putmask(matrix, mask, INF)
        rest = total - share * ahead
        rest[dead] = INF
        self.costs[node] = rest

    def decode(self) -> dict[int, int]:
        """A choice that the bound suggests: node after node, cheapest given those before."""
        states: dict[int, int] = {}
        for node in self.order:
            total = self.costs[node]
            for other, matrix in self.links[node].items():
                total = total + (
                    matrix[:, states[other]] if other in states else matrix.min(axis=1)
                )
            states[node] = int(total.argmin())
        return states


def _largest(values: Ints) -> int:
    return int(np.where(values < INF, values, 0).max(initial=0))
