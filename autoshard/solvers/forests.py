"""Moves over random forests of a flat problem, with memory at prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN
from autoshard.solvers.flat import Flat, Floats, Places
from autoshard.solvers.forest import charge, grow, minimise
from autoshard.solvers.messages import pass_messages
from autoshard.solvers.trade import settle, split

_LEAN = (-0.5, 1.0)  # powers of the degree that delay a group when a forest is chosen


@dataclass(slots=True)
class Forests:
    """Room and random numbers for moves on one problem.

    Attributes:
        flat: The problem.
        rng: Makes the forests and the noise.
    """

    flat: Flat
    rng: np.random.Generator
    _linked: Places
    _lone: Places
    _degree: Floats
    _line: Places
    _up: Places
    _mark: Places
    _root: Places
    _charged: Floats
    _total: Floats
    _low: Floats
    _noise: NDArray[np.float32]
    _back: Places
    _message_at: Places
    _messages: Floats

    @classmethod
    def on(cls, flat: Flat, rng: np.random.Generator) -> Forests:
        """Make room for a problem."""
        groups, states = len(flat.at) - 1, len(flat.costs)
        degree = np.diff(flat.link_at)
        sizes = np.diff(flat.at)
        message_at = np.concatenate([[0], np.cumsum(sizes[flat.owner])])
        back = np.empty(len(flat.near), np.int64)
        back[np.lexsort((flat.near, flat.owner))] = np.lexsort((flat.owner, flat.near))
        noise = rng.standard_exponential(3 * states + 1, dtype=np.float32)
        return cls(
            flat=flat,
            rng=rng,
            _linked=np.flatnonzero(degree > 0),
            _lone=np.flatnonzero(degree == 0),
            _degree=degree + 1.0,
            _line=np.empty(groups, np.int64),
            _up=np.full(groups, -1, np.int64),
            _mark=np.full(groups, -1, np.int64),
            _root=np.empty(groups, np.int64),
            _charged=np.empty(states),
            _total=np.zeros(states),
            _low=np.empty(2 * int(sizes.max(initial=0))),
            _noise=np.log(np.maximum(noise, 1e-30)),
            _back=back,
            _message_at=message_at,
            _messages=np.zeros(int(message_at[-1])),
        )

    def sweep(self, states: Places, prices: Floats, heat: float) -> None:
        """Minimise over one random forest and all groups without links.

        Args:
            states: The state of each group; changed.
            prices: Per memory row, the cost of one byte.
            heat: Every state is made cheaper by a random amount of about this size, drawn from
                Gumbel's distribution, so that states are chosen about as Boltzmann's has it.
        """
        flat, rng = self.flat, self.rng
        linked, lone = self._linked, self._lone
        lean = rng.uniform(*_LEAN)
        key = rng.random(len(linked)) * self._degree[linked] ** lean
        order = linked[np.argsort(key)]
        count = grow(flat.link_at, flat.near, order, self._mark, self._root, self._line, self._up)
        line = self._line[: count + len(lone)]
        line[count:] = lone
        begin = int(rng.integers(2 * len(flat.costs) + 1))
        charge(
            flat.at,
            flat.costs,
            flat.hold_at,
            flat.first,
            flat.end,
            flat.use_at,
            flat.uses,
            line,
            np.concatenate([[0.0], np.cumsum(prices)]),
            heat,
            self._noise[begin:],
            self._charged,
        )
        minimise(
            flat.at,
            flat.link_at,
            flat.near,
            flat.own,
            flat.far,
            flat.tables,
            self._charged,
            line,
            self._up,
            self._mark,
            states,
            self._total,
            self._low,
        )

    def forget(self) -> None:
        """Start ``decode`` anew."""
        self._messages[:] = 0.0

    def decode(self, prices: Floats) -> Places:
        """Pass messages once forth and back, with memory at prices; what they suggest.

        Args:
            prices: Per memory row, the cost of one byte.

        Returns:
            A state for each group; forbidden ones only where it found no other.
        """
        flat = self.flat
        groups = len(flat.at) - 1
        charge(
            flat.at,
            flat.costs,
            flat.hold_at,
            flat.first,
            flat.end,
            flat.use_at,
            flat.uses,
            np.arange(groups),
            np.concatenate([[0.0], np.cumsum(prices)]),
            0.0,
            self._noise,
            self._charged,
        )
        states = np.zeros(groups, np.int64)
        most = len(self._low) // 2
        pass_messages(
            flat.at,
            flat.link_at,
            flat.near,
            flat.own,
            flat.far,
            flat.tables,
            self._charged,
            self._back,
            self._message_at,
            self._messages,
            self._low[:most],
            self._low[most:],
            states,
        )
        return states

    def merge(self, old: Places, new: Places) -> tuple[float, bool]:
        """Take over the parts of a proposed choice that fit the memory and gain together.

        Args:
            old: The present choice.
            new: The proposed one; becomes the merged one.

        Returns:
            What the merged choice costs more than the old one, and whether it fits the memory.
        """
        flat = self.flat
        changed = np.flatnonzero(old != new)
        part = np.empty(len(changed), np.int64)
        gain = np.empty(len(changed))
        parts = split(
            flat.at,
            flat.costs,
            flat.link_at,
            flat.near,
            flat.own,
            flat.tables,
            old,
            new,
            changed,
            self._mark,
            part,
            gain,
        )
        order = np.argsort(part, kind="stable")
        changed, gain = changed[order], gain[:parts]
        starts = np.searchsorted(part[order], np.arange(parts + 1))
        taken = np.empty(parts, np.bool_)
        fits = settle(
            flat.hold_at,
            flat.first,
            flat.end,
            flat.use_at,
            flat.uses,
            old,
            new,
            changed,
            starts,
            gain,
            np.argsort(gain, kind="stable"),
            taken,
            flat.usage(new) - flat.capacity,
        )
        left = changed[~np.repeat(taken, np.diff(starts))]
        new[left] = old[left]
        return float(gain[taken].sum()), bool(fits)

    def regret(self) -> float:
        """What the second best state costs more than the best: large, as met in the last sweep.

        The ninth decile over linked groups; 1 if there is none.
        """
        found = []
        for g in self._linked.tolist():
            low = np.partition(self._total[self.flat.at[g] : self.flat.at[g + 1]], 1)[:2]
            if low[1] < FORBIDDEN / 2:
                found.append(low[1] - low[0])
        return max(1.0, float(np.quantile(found, 0.9))) if found else 1.0
