"""A rising lower bound: costs moved along edges, memory rows priced.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing
for energy minimization", 2006): what a node charges is shared out to its edges and collected again,
and whatever all its states come to charge moves to the bound. All numbers are integers, and what an
edge or node charges never goes negative, so the bound is proved at any moment, not only when the
process has settled. Memory rows enter with prices (Lagrange multipliers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.layout import Layout, Places, scaled
from autoshard.solvers.network import INF, Ints, Network

_ROOM = 1 << 56  # scaled costs, and prices times usages, each span less than this: both fit in INF

_LEVEL = 16  # sweeps after which messages are brought back to the size they need


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a ``Dual`` was; its attributes of the same names."""

    offset: int
    prices: Ints
    costs: Ints
    floors: Ints
    messages: Ints


@dataclass(slots=True)
class Dual:
    """A scaled copy of a network whose costs are moved about.

    Attributes:
        net: The network that is bounded; not changed.
        base: Its offset.
        shift: Costs here are the network's times two to this power; rounded down if it is negative.
        offset: Proved lower bound above the network's own offset, scaled.
        prices: Per memory row, the scaled cost of one byte.
        layout: The nodes, in the order of the sweeps.
        costs: Per state of each node, what it charges now.
        floors: Per state of each node, the best proved bound on choices with that state, scaled,
            above the network's own offset.
        messages: What was moved along edges.
        impossible: Some node has no allowed state.
        sweeps: How many there were.
    """

    net: Network
    base: int
    shift: int
    offset: int
    prices: Ints
    layout: Layout
    costs: Ints
    floors: Ints
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
        layout = Layout.of(net, shift)
        dual = cls(
            net=net,
            base=net.offset,
            shift=shift,
            offset=0,
            prices=np.zeros(len(net.capacity), np.int64),
            layout=layout,
            costs=np.zeros(layout.at[-1], np.int64),
            floors=np.full(layout.at[-1], -INF),
            messages=np.zeros(layout.message_at[-1], np.int64),
        )
        dual._reset()
        return dual

    @property
    def bound(self) -> int:
        """Proved lower bound on the network's cost, its offset included."""
        return self.base - scaled(-self.offset, -self.shift)

    @property
    def scale(self) -> float:
        """What the network's costs are multiplied by."""
        return 2.0**self.shift

    def floor(self, node: int) -> Ints:
        """A view of the floors of one node that is in the network."""
        place = int(np.searchsorted(self.layout.nodes, node))
        return self.floors[self.layout.at[place] : self.layout.at[place + 1]]

    def named(self, states: Places) -> dict[int, int]:
        """States in the order of the layout, by node."""
        return dict(zip(self.layout.nodes, states.tolist(), strict=True))

    @property
    def room(self) -> int:
        """What ``save`` takes [bytes]."""
        return int(2 * self.costs.nbytes + self.messages.nbytes + self.prices.nbytes)

    def save(self) -> Moved:
        """Remember what was moved where, and which states are forbidden."""
        return Moved(
            self.offset,
            self.prices.copy(),
            self.costs.copy(),
            self.floors.copy(),
            self.messages.copy(),
        )

    def restore(self, moved: Moved) -> None:
        """Go back to where this was."""
        self.offset, self.impossible = moved.offset, False
        self.prices = moved.prices.copy()
        self.costs[:], self.floors[:] = moved.costs, moved.floors
        self.messages[:] = moved.messages

    def drop(self, most: int) -> float:
        """Drop states of the network that cost more, whatever is chosen beside them.

        Args:
            most: Cost from which on choices don't matter.

        Returns:
            The fraction of states that were dropped.
        """
        limit, dropped = scaled(most - self.base, self.shift), 0
        for node in self.layout.nodes:
            keep = self.floor(node) <= limit
            if not keep.all():
                self.net.restrict(node, keep)
                dropped += int((~keep).sum())
        return dropped / max(len(self.floors), 1)

    def set_prices(self, wanted: NDArray[np.float64]) -> None:
        """Charge other prices for memory; the bound stays proved, and may fall.

        Args:
            wanted: Scaled cost of one byte per row, at least 0; rounded down, and all lowered alike
                where the charges would not fit 64 bits.
        """
        from autoshard.solvers.sweeps import charge

        flat = self.layout
        sums = np.concatenate([[0.0], np.cumsum(wanted)])
        largest = np.maximum.reduceat(flat.uses, flat.use_at[:-1]) if len(flat.who) else flat.uses
        charges = float(((sums[flat.end] - sums[flat.first]) * largest).sum())
        prices = (wanted * min(1.0, _ROOM / max(charges, 1.0))).astype(np.int64)
        moves = prices - self.prices
        if not moves.any():
            return
        change = np.concatenate([[0], np.cumsum(moves)])
        self.offset -= sum(map(mul, moves.tolist(), self.net.capacity.tolist()))
        charge(flat.at, flat.who, flat.first, flat.end, flat.use_at, flat.uses, change, self.costs)
        # Charges of each are below _ROOM: what is INF or near it has been forbidden before.
        low = np.minimum.reduceat(self.costs, flat.at[:-1])
        dead = self.costs >= INF
        self.costs -= np.repeat(low, np.diff(flat.at))
        self.costs[dead | (self.costs > INF)] = INF
        self.offset += sum(low.tolist())
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
        flat = self.layout
        whole = np.zeros(len(self.messages))
        spread = np.zeros(len(flat.nodes))
        owner = np.repeat(np.arange(len(flat.nodes)), np.diff(flat.link_at))
        for k, (i, j) in enumerate(zip(owner.tolist(), flat.near.tolist(), strict=True)):
            moved = np.rint(messages[flat.nodes[i], flat.nodes[j]] * self.scale)
            whole[flat.message_at[k] : flat.message_at[k + 1]] = moved
            spread[i] += np.abs(moved).max()
        if (spread >= _ROOM).any():
            return False
        self._reset()
        self.set_prices(prices * self.scale)
        self.messages -= whole.astype(np.int64)
        dead = self.costs >= INF
        for k, i in enumerate(owner.tolist()):
            moved = whole[flat.message_at[k] : flat.message_at[k + 1]].astype(np.int64)
            self.costs[flat.at[i] : flat.at[i + 1]] += moved
        self.costs[dead] = INF
        self._visit(forward=True, proved=False)
        return True

    def _reset(self) -> None:
        """Undo all moves and prices; floors stay, for they are proved."""
        self.offset, self.prices = 0, np.zeros(len(self.prices), np.int64)
        self.messages[:] = 0
        for k, node in enumerate(self.layout.nodes):
            cost = self.net.costs[node]
            charged = np.where(cost < INF, scaled(cost, self.shift), INF)
            self.costs[self.layout.at[k] : self.layout.at[k + 1]] = charged

    def sweep(self) -> None:
        """Visit all nodes once in each direction."""
        from autoshard.solvers.sweeps import level

        self._visit(forward=True)
        self._visit(forward=False)
        self.sweeps += 1
        if self.sweeps % _LEVEL == 0:
            flat = self.layout
            level(flat.at, flat.link_at, flat.near, flat.back, flat.message_at, self.messages)

    def _visit(self, *, forward: bool, proved: bool = True) -> None:
        from autoshard.solvers.sweeps import visit

        self.offset, impossible = visit(
            forward, proved, self.offset, *self.layout.links, self.costs, self.floors,
            self.messages, *self._room(),
        )  # fmt: skip
        self.impossible |= impossible

    def _room(self) -> tuple[Ints, ...]:
        """What kernels write to: one number per message, and thrice one per state of a node."""
        most = int(np.diff(self.layout.at).max(initial=0))
        return np.empty(len(self.messages), np.int64), *np.empty((3, most), np.int64)

    def decode(self) -> Places:
        """A choice that the bound suggests: node after node, cheapest given those before.

        Returns:
            States of the nodes of the layout, in its order.
        """
        from autoshard.solvers.sweeps import decode

        states = np.zeros(len(self.layout.nodes), np.int64)
        decode(*self.layout.links, self.costs, self.messages, *self._room(), states)
        return states


def _largest(values: Ints) -> int:
    return int(np.where(values < INF, values, 0).max(initial=0))
