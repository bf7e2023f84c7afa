"""A rising lower bound: costs moved along edges, memory rows priced.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", 2006): what a node charges is shared out to its edges and collected again,
and whatever all its states come to charge moves to the bound. All numbers are integers, and what an
edge or node charges never goes negative, so the bound is proved at any moment, not only when the
process has settled. Memory rows enter with prices (Lagrange multipliers).

Nodes that look alike and are not linked to each other are visited together, which gives the same as
one after another: see :mod:`autoshard.solvers.batches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.batches import FORBIDDEN_FROM, Batch, batches_of, scaled
from autoshard.solvers.network import INF, Ints, Network

_ROOM = 1 << 56  # scaled costs, and prices times usages, each span less than this: both fit in INF

_LEVEL = 16  # sweeps after which messages are brought back to the size they need


@dataclass(slots=True)
class Dual:
    """A scaled copy of a network whose costs are moved about.

    Attributes:
        net: The network that is bounded; not changed.
        base: Its offset.
        shift: Costs here are the network's times two to this power; rounded down if it is negative.
        offset: Proved lower bound above the network's own offset, scaled.
        prices: Per memory row, the scaled cost of one byte.
        batches: The nodes, in the order of the sweeps.
        costs: Per node, what it charges now; a view of its batch.
        floors: Per node and state, the best proved bound on choices with that state, scaled, above
            the network's own offset; a view of its batch.
        messages: What was moved along edges, all in one array; batches know their places.
        impossible: Some node has no allowed state.
        sweeps: How many there were.
    """

    net: Network
    base: int
    shift: int
    offset: int
    prices: Ints
    batches: tuple[Batch, ...]
    costs: dict[int, Ints]
    floors: dict[int, Ints]
    messages: Ints
    impossible: bool = False
    sweeps: int = 0

    @classmethod
    def of(cls, net: Network) -> Dual:
        """Start from a network's own costs with all prices zero."""
        spread = 1 + sum(_largest(cost) for cost in net.costs.values())
        largest: dict[int, int] = {}
        for i, row in net.links.items():
            for j, matrix in row.items():
                if i < j:
                    if id(matrix) not in largest:
                        largest[id(matrix)] = _largest(matrix)
                    spread += largest[id(matrix)]
        shift = min(30, _ROOM.bit_length() - 1 - spread.bit_length())
        batches, messages = batches_of(net, shift)
        return cls(
            net=net,
            base=net.offset,
            shift=shift,
            offset=0,
            prices=np.zeros(len(net.capacity), np.int64),
            batches=batches,
            costs={n: row for b in batches for n, row in zip(b.nodes, b.costs, strict=True)},
            floors={n: row for b in batches for n, row in zip(b.nodes, b.floors, strict=True)},
            messages=messages,
        )

    @property
    def bound(self) -> int:
        """Proved lower bound on the network's cost, its offset included."""
        return self.base - scaled(-self.offset, -self.shift)

    @property
    def scale(self) -> float:
        """What the network's costs are multiplied by."""
        return 2.0**self.shift

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
            self.costs[node][:] = np.where(dead, INF, np.minimum(cost - low, INF))
        self.prices = prices

    def install(
        self, prices: NDArray[np.float64], messages: Mapping[tuple[int, int], NDArray[np.float64]]
    ) -> bool:
        """Start again from prices and messages that somebody else found, rounded to integers.

        Whatever they are, the bound stays proved: what rounding makes negative is taken from it.

        Args:
            prices: Per memory row, the cost of one byte, at least 0.
            messages: Per pair (i, j) in either order, what moves from the edge to i, per state
                of i.

        Returns:
            Whether they fit 64 bits; if not, nothing has changed.
        """
        moved: dict[tuple[int, int], Ints] = {}
        spread = dict.fromkeys(self.costs, 0.0)
        for pair, values in messages.items():
            whole = np.rint(values * self.scale)
            largest = float(np.abs(whole).max())
            spread[pair[0]] += largest
            if spread[pair[0]] >= _ROOM:
                return False
            moved[pair] = whole.astype(np.int64)
        self._reset()
        self.set_prices(prices * self.scale)
        for batch in self.batches:
            for position, link in enumerate(batch.links):
                for row, node in enumerate(batch.nodes):
                    message = moved[node, batch.others[position][row]]
                    link.own[row] -= message
                    cost = self.costs[node]
                    cost[:] = np.where(cost < INF, cost + message, INF)
        for batch in self.batches:
            self._visit(batch, forward=True, proved=False)
        return True

    def _reset(self) -> None:
        """Undo all moves and prices; floors stay, for they are proved."""
        self.offset, self.prices = 0, np.zeros(len(self.prices), np.int64)
        self.messages[:] = 0
        for node, cost in self.net.costs.items():
            self.costs[node][:] = np.where(cost < INF, scaled(cost, self.shift), INF)

    def sweep(self) -> None:
        """Visit all nodes once in each direction."""
        for batch in self.batches:
            self._visit(batch, forward=True)
        for batch in reversed(self.batches):
            self._visit(batch, forward=False)
        self.sweeps += 1
        if self.sweeps % _LEVEL == 0:
            for batch in self.batches:
                batch.level(self.messages)

    def _visit(self, batch: Batch, *, forward: bool, proved: bool = True) -> None:
        lows = [link.lows(self.messages) for link in batch.links]
        total = batch.sum_of(lows)
        least = total.min(axis=1)
        if int(least.max()) >= INF:
            self.impossible = True
            return
        self.offset += sum(least.tolist())
        dead = total >= INF
        total -= least[:, None]
        total[dead] = INF
        if proved:
            floor = np.where(dead, INF, total + self.offset)
            np.maximum(batch.floors, floor, out=batch.floors)
        parts, count = batch.shares(forward)
        share = total // parts[:, None]
        for link, low in zip(batch.links, lows, strict=True):
            gives = link.ahead if forward else ~link.ahead
            own = link.own + (np.where(gives[:, None], share, 0) - low)
            own[dead] = INF
            link.own[:] = own
        rest = total - share * count[:, None]
        rest[dead] = INF
        batch.costs[:] = rest

    def decode(self) -> dict[int, int]:
        """A choice that the bound suggests: node after node, cheapest given those before."""
        chosen = np.zeros(len(self.costs), np.int64)
        states: dict[int, int] = {}
        for batch in self.batches:
            given = []
            for link in batch.links:
                known = link.at(self.messages, chosen)
                if link.ahead.any():
                    known = np.where(link.ahead[:, None], link.lows(self.messages), known)
                given.append(known)
            best = batch.sum_of(given).argmin(axis=1)
            chosen[batch.start : batch.start + len(batch.nodes)] = best
            states.update(zip(batch.nodes, best.tolist(), strict=True))
        return states


def _largest(values: Ints) -> int:
    return int(np.where(values < INF, values, 0).max(initial=0))


assert 2 * _ROOM < FORBIDDEN_FROM
