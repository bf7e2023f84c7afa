"""Branching on what nodes hold of scarce memory rows, where prices leave a wide gap.

A linear program, and every price on memory, may mix a lavish choice with a frugal one: a tenth of
each node then holds its most, which fits, though whole nodes that hold so much don't. Cases tell
them apart: in one a node holds up to so many bytes, in the other it holds more, so that others must
hold less. Each case is bounded by messages, from those of the case that it came from on (all in
integers, see :mod:`autoshard.solvers.dual`); the case with the lowest bound is split next. Where no
node's memory matters any longer, what is left of a case is reduced and solved on its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.solvers.cpsat import paid, solve_network
from autoshard.solvers.dual import Dual, Moved
from autoshard.solvers.eliminate import Bucket, Elimination, plan_elimination
from autoshard.solvers.layout import Places, scaled
from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.polytope import MOST_FLOWS, Polytope, Relaxation
from autoshard.solvers.reduce import reduce
from autoshard.solvers.rows import compact
from autoshard.solvers.solution import Deadline

_ROUNDS = 20  # changes of the prices per case
_SWEEPS = 2  # of the bound between two of them
_STEP = 0.1  # of the step that would close the gap if the bound were linear (Polyak's)
_GAIN = 1.2  # growth of the step when the bound rises
_PATIENCE = 3  # changes of the prices without a better bound before steps are halved
_SMOOTH = 0.6  # of what rows were exceeded by before stays in the direction of the next step
_MATTERS = 0.1  # of a row's room: memory below this is not branched on
_SETTLED = 0.1  # fraction of states to be dropped that is worth another linear program
_LEAF_SWEEPS = 10
_WHOLE = 1 - 1e-4  # share of a state from which on a node counts as decided
_LEAF_WORK = 20.0  # of CP-SAT on what is left of a case, in its own deterministic seconds
_MOST_ROOM = 1 << 28  # bytes that open cases may take


@dataclass(frozen=True, slots=True)
class Target:
    """Where cases report to.

    Attributes:
        cost: Cost of the best choice known.
        offer: Called with states of a network; false if the search can't go on with its rows.
        raise_bound: Called with proved bounds.
        deadline: When to stop.
    """

    cost: Callable[[], int]
    offer: Callable[[Network, dict[int, int]], bool]
    raise_bound: Callable[[int], None]
    deadline: Deadline


@dataclass(slots=True)
class Cases:
    """A search through cases on one network.

    Attributes:
        net: The network; not changed.
        dual: Its bound, with prices and messages to start from; changed.
        target: Where results go.
        seed: For the integer programs.
        count: Cases looked at.
    """

    net: Network
    dual: Dual
    target: Target
    seed: int
    count: int = 0
    _open: list[tuple[int, int, Moved]] = field(default_factory=list)
    _left: int = INF  # the least scaled bound of cases that could not be finished
    _going: bool = True

    def run(self) -> bool:
        """Go through cases until none is left or time is up; says whether none is left."""
        dual = self.dual
        if not self._fit():
            return True
        self._consider(dual.offset)
        while self._open and self._going and self.target.deadline.left_s > 0:
            if len(self._open) * dual.room > _MOST_ROOM:
                return False
            bound, _, moved = heapq.heappop(self._open)
            if bound > self._most:
                continue
            dual.restore(moved)
            split = self._split()
            if split is None:
                self._finish(bound)
            else:
                for dropped in split:
                    dual.restore(moved)
                    dual.costs[dropped] = INF
                    self._consider(bound)
            if self._going:
                self._tell()
        return self._going and not self._open and self._left >= INF

    @property
    def _most(self) -> int:
        """The largest scaled bound that a cheaper choice than the best known can have."""
        return scaled(self.target.cost() - 1 - self.dual.base, self.dual.shift)

    def _tell(self) -> None:
        least = min(self._left, self._open[0][0] if self._open else INF)
        if least < INF:
            self.target.raise_bound(self.dual.base - scaled(-least, -self.dual.shift))

    def _consider(self, bound: int) -> None:
        """Bound a case that ``dual`` has been restricted to, and keep it if it may matter."""
        self.count += 1
        if self._fit() and self._raise() and self._fit():
            kept = max(bound, self.dual.offset)
            heapq.heappush(self._open, (kept, self.count, self.dual.save()))

    def _raise(self) -> bool:
        """Raise the bound of a case; says whether something below the best cost may be left."""
        dual, capacity = self.dual, self.net.capacity
        step, fails, best = _STEP, 0, dual.save()
        smooth: NDArray[np.float64] | None = None
        for count in range(_ROUNDS):
            for _ in range(_SWEEPS):
                dual.sweep()
            if dual.impossible:
                return False
            most = self._most
            if dual.offset > most:
                return False
            if dual.offset > best.offset:
                best, fails, step = dual.save(), 0, step * _GAIN
            else:
                fails += 1
            states = dual.decode()
            over = dual.layout.excess(states, capacity)
            if not (over > 0).any():
                self._offer(self.net, dual.named(states))
            if not self._going or self.target.deadline.left_s <= 0 or count == _ROUNDS - 1:
                break
            if fails >= _PATIENCE:
                self._return(best)
                step, fails = step / 2, 0
            new = over.astype(np.float64)
            smooth = new if smooth is None else _SMOOTH * smooth + (1 - _SMOOTH) * new
            slope = np.where((smooth > 0) | (dual.prices > 0), smooth, 0.0)
            if slope.any():
                length = step * max(most - dual.offset, 1) / float(slope @ slope)
                dual.set_prices(np.maximum(0.0, dual.prices + length * slope))
        self._return(best)
        return True

    def _return(self, best: Moved) -> None:
        """Go back to the prices and messages of the best bound; floors are proved and stay."""
        floors = self.dual.floors.copy()
        self.dual.restore(best)
        np.maximum(self.dual.floors, floors, out=self.dual.floors)

    def _holds(self) -> Iterator[tuple[int, int, Places, Ints]]:
        """Each segment: its number, the first state of its node, the states left, their usage."""
        flat, dead = self.dual.layout, self.dual.costs >= INF
        for k, place in enumerate(flat.who.tolist()):
            first = int(flat.at[place])
            live = np.flatnonzero(~dead[first : flat.at[place + 1]])
            yield k, first, live, flat.uses[flat.use_at[k] + live]

    def _fit(self) -> bool:
        """Drop states that can't fit, or can't be cheaper; says whether each node has one left."""
        dual, flat = self.dual, self.dual.layout
        dual.costs[dual.floors > self._most] = INF
        while True:
            if np.logical_and.reduceat(dual.costs >= INF, flat.at[:-1]).any():
                return False
            room, holds = self.net.capacity.copy(), list(self._holds())
            for k, _, _, used in holds:
                room[flat.first[k] : flat.end[k]] -= used.min()
            if (room < 0).any():
                return False
            changed = False
            for k, first, live, used in holds:
                worst = room[flat.first[k] : flat.end[k]].min()
                bad = used - used.min() > worst
                if bad.any():
                    dual.costs[first + live[bad]] = INF
                    changed = True
            if not changed:
                return True

    def _split(self) -> tuple[Places, Places] | None:
        """States to drop in either case; None if no node's memory matters.

        The node is the one whose memory varies most, measured by the room of the tightest row that
        has a price. In one case it holds its most.
        """
        flat, dual = self.dual.layout, self.dual
        best, found = _MATTERS, None
        for k, first, live, used in self._holds():
            rows = slice(int(flat.first[k]), int(flat.end[k]))
            capacity = self.net.capacity[rows][dual.prices[rows] > 0]
            if len(capacity):
                share = float(used.max() - used.min()) / max(float(capacity.min()), 1.0)
                if share > best:
                    most = used == used.max()
                    best, found = share, (first + live[most], first + live[~most])
        return found

    def _finish(self, bound: int) -> None:
        """Solve what is left of the case that ``dual`` is at."""
        net = self.net.copy(apart=True)
        for place, node in enumerate(self.dual.layout.nodes):
            own = slice(self.dual.layout.at[place], self.dual.layout.at[place + 1])
            keep = self.dual.costs[own] < INF
            if not keep.all():
                net.restrict(node, keep)
        proved = self._solve(net)
        if proved is not None:
            proved = scaled(proved - self.dual.base, self.dual.shift)
            self._left = min(self._left, max(bound, proved))

    def _solve(self, net: Network) -> int | None:
        """Look for choices on a network cheaper than the best; a bound if some may be left."""
        waiting, left = [(net, net.offset)], INF
        while waiting:
            part, bound = waiting.pop()
            if not self._going or self.target.deadline.left_s <= 0:
                left = min(left, bound)
                continue
            parts, bound = self._divide(part, bound)
            if parts is None:
                left = min(left, bound)
            else:
                waiting += [(part, bound) for part in parts]
        return left if left < INF else None

    def _divide(self, net: Network, bound: int) -> tuple[tuple[Network, ...] | None, int]:
        """Bound a network, and divide it in two if a cheaper choice may be left.

        Returns:
            The two, none if there is nothing left to find, or None if it could not be divided; and
            the bound.
        """
        target, deadline = self.target, self.target.deadline
        while True:
            net.changed.update(net.costs)
            reduce(net, deadline)
            compact(net)
            reduce(net, deadline)
            bound = max(bound, net.offset)
            if net.impossible or bound >= target.cost():
                return (), bound
            if deadline.left_s <= 0:
                return None, bound
            buckets = None if net.segments else plan_elimination(net)
            if buckets is not None:
                return self._eliminate(net, buckets, bound)
            model, dual = Polytope(net), Dual.of(net)
            found = model.relax(deadline) if model.columns <= MOST_FLOWS else None
            if found is None or not dual.install(found.prices, found.messages):
                return self._search(net, bound)
            self._offer(net, found.states())
            for _ in range(_LEAF_SWEEPS):
                dual.sweep()
            bound = max(bound, dual.bound)
            if dual.impossible or bound >= target.cost():
                return (), bound
            if not self._going:
                return None, bound
            if dual.drop(target.cost() - 1) <= _SETTLED:
                break
        return self._halve(net, found, bound)

    def _halve(
        self, net: Network, found: Relaxation, bound: int
    ) -> tuple[tuple[Network, ...] | None, int]:
        """Divide a network by whether a node is in the state that the relaxation gives most to.

        The node is one that many links hold in several states at once.
        """
        if net.impossible:
            return (), bound
        torn = {
            node: (1 - float(share.max())) * len(net.links[node])
            for node, share in found.shares.items()
            if share.max() < _WHOLE and len(share) == net.size(node) > 1
        }
        if not torn:
            return self._search(net, bound)
        node = max(torn, key=torn.__getitem__)
        here = np.arange(net.size(node)) == int(found.shares[node].argmax())
        parts = []
        for keep in (~here, here):
            parts.append(net.copy(apart=True))
            parts[-1].restrict(node, keep)
        return tuple(parts), bound

    def _eliminate(
        self, net: Network, buckets: tuple[Bucket, ...], bound: int
    ) -> tuple[tuple[Network, ...] | None, int]:
        """Find the cheapest choice on a network without memory rows."""
        ran = Elimination.run(net, buckets, self.target.deadline)
        if ran is None:
            return None, bound
        value, run = ran
        if value < INF:
            self._offer(net, run.best())
        return (() if self._going else None), bound

    def _search(self, net: Network, bound: int) -> tuple[tuple[Network, ...] | None, int]:
        """Hand to CP-SAT what can't be divided."""
        target = self.target
        result = solve_network(
            net, target.deadline, seed=self.seed, workers=1, most_work=_LEAF_WORK,
            priced=range(len(net.capacity)), upper=target.cost(),
        )  # fmt: skip
        if result.states is not None:
            self._offer(net, result.states)
        if result.complete and self._going:
            return (), bound
        return None, max(bound, result.bound or bound)

    def _offer(self, net: Network, states: dict[int, int]) -> None:
        if self._going and net.offset + paid(net, states) < self.target.cost():
            self._going = self.target.offer(net, states)
