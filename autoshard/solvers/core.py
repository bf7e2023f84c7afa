"""What happens to a network that reductions alone don't solve.

Rounds of: raise the bound (prices on memory included), by a linear program where it is small
enough, else by messages; look for cheaper choices around what the bound suggests; drop every state
that no choice cheaper than the best known can use; reduce again. A network that got small enough is
eliminated exactly or handed to HiGHS and CP-SAT. Where the network has memory rows for some time
points only, what is cheapest on it may break others: then those are what is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import Problem, evaluate
from autoshard.solvers.branch import Cases, Target
from autoshard.solvers.cpsat import excess, paid, solve_network
from autoshard.solvers.dual import Dual
from autoshard.solvers.eliminate import Elimination, plan_elimination
from autoshard.solvers.kernels import load_kernels
from autoshard.solvers.layout import scaled
from autoshard.solvers.memory import least_cost
from autoshard.solvers.network import INF, Network
from autoshard.solvers.polytope import MOST_FLOWS, Polytope
from autoshard.solvers.reduce import reduce
from autoshard.solvers.rows import Timeline, compact
from autoshard.solvers.solution import Deadline, Progress
from autoshard.solvers.walk import Walk, ball

if TYPE_CHECKING:
    from autoshard.solvers.local_search import LocalSearch

_SWEEPS = 2  # of the bound between two changes of the prices
_STEP = 0.3  # of the step that would close the gap if the bound were linear (Polyak's)
_GAIN = 1.2  # growth of the step when the bound rises
_PATIENCE = 4  # changes of the prices without a better bound before steps are halved
_WORTHWHILE = 0.3  # fraction of states to be dropped that is worth another round at once
_START_SHARE = 0.1  # of the time: for a first choice
_SEARCH_WORK = 3.0  # of CP-SAT in its first try, in its own deterministic seconds
_EASY_FLOWS = 20_000  # linear programs up to this size are solved at once
_ALL_ROUNDS = 10_000
_MOST_WALKED = 100  # nodes for which a first choice is looked for on the network itself
MANY = 500
"""In problems of more nodes than this, a choice is looked for before anything else."""

_LOCAL_AFTER = 64  # changes of the prices between the first local search and the next; doubled
_LOCAL_SHARE = 0.1  # of the time: for one local search
_DENSE_SHARE = 0.3  # the same on few nodes with large matrices, where it ends by itself
_FIRST_ROUNDS = 8  # changes of the prices before larger ones
_RELAX_SHARE = 0.5  # of the time: for the linear program
_EXACT_SHARE = 0.25  # of the time: for HiGHS in its first try
_WIDE = 0.03  # of the cost: a gap after the linear program from which on cases are told apart
_MOST_POINTS = 4  # time points to be added at once
_STALL = 40  # changes of the prices that together must gain something worth another round


@dataclass(slots=True)
class Record:
    """The best choice and bound known for a problem.

    Attributes:
        problem: The problem; choices are checked against it alone.
        deadline: When to stop.
        tell: Called with signs of life.
        stop_at_gap: Time is over once the cost is proved to be this close to the best, as a
            fraction of the cost.
        choices: The best feasible choice; None if there is none yet.
        cost: Its cost.
        bound: Proved lower bound; None if there is none yet.
        local: The local search; None until it is needed.
        wide: A linear program with prices on memory left a wide gap.
    """

    problem: Problem
    deadline: Deadline
    tell: Callable[[Progress], None] | None
    stop_at_gap: float = 0.0
    choices: tuple[int, ...] | None = None
    cost: int | None = None
    bound: int | None = None
    local: LocalSearch | None = None
    wide: bool = False

    def load_kernels(self) -> None:
        """Have what is compiled at hand; the time that takes is not counted."""
        begun = self.deadline.spent_s
        load_kernels()
        self.deadline = self.deadline.put_off(self.deadline.spent_s - begun)

    def look_around(self, share: float, rng: np.random.Generator, rounds: int | None = 1) -> None:
        """Search locally for better choices, all memory rows at once, from the best one known.

        Args:
            share: Of the time left.
            rng: See ``LocalSearch.improve``.
            rounds: See there.
        """
        from autoshard.solvers.local_search import LocalSearch  # brings numba, which takes time

        self.load_kernels()
        deadline = self.deadline.share(share)
        anew = False
        if self.local is None:
            self.local = LocalSearch.of(self.problem, self._found)
            anew = rounds is None  # what moves of single nodes led to is a poor place to start
        start = None if anew or self.local.cost == self.cost else self.choices
        self.local.improve(start, deadline, rng, rounds=rounds)

    def _found(self, choices: tuple[int, ...], cost: int) -> None:
        """Take a feasible choice if it is cheaper, and tell at once."""
        if self.cost is None or cost < self.cost:
            self.take(choices, cost)
            self.say("searching", len(choices), least_cost(self.problem))

    def offer(self, net: Network, states: dict[int, int]) -> bool:
        """Take a choice on a network if it is feasible and cheaper; says whether it was."""
        above = paid(net, states)
        if above >= INF or (self.cost is not None and net.offset + above >= self.cost):
            return False
        if (excess(net, states) > 0).any():
            return False
        return self.offer_choices(net.choices(states))

    def offer_choices(self, choices: tuple[int, ...]) -> bool:
        """Take a choice if it is feasible and cheaper; says whether it was."""
        found = evaluate(self.problem, choices)
        if not found.feasible or (self.cost is not None and found.cost >= self.cost):
            return False
        self.take(choices, found.cost)
        return True

    def take(self, choices: tuple[int, ...], cost: int) -> None:
        """Make a feasible choice of this cost the best one known."""
        self.choices, self.cost = choices, cost
        self._stop_if_close()

    def raise_bound(self, bound: int) -> None:
        """Note a bound on every choice cheaper than the best known."""
        if self.cost is not None:
            bound = min(bound, self.cost)
        self.bound = bound if self.bound is None else max(self.bound, bound)
        self._stop_if_close()

    def _stop_if_close(self) -> None:
        if not self.stop_at_gap or self.cost is None or self.bound is None:
            return
        if self.cost - self.bound <= self.stop_at_gap * self.cost:
            self.deadline = replace(self.deadline, limit_s=0.0)

    @property
    def closed(self) -> bool:
        """The best choice is proved best."""
        return self.cost is not None and self.bound is not None and self.bound >= self.cost

    def say(self, stage: str, left: int, bound: int) -> None:
        """Give a sign of life.

        Args:
            stage: What is being done.
            left: Nodes that are undecided.
            bound: Proved of every choice, should nothing better be known.
        """
        if self.tell is not None:
            bound = bound if self.bound is None else self.bound
            spent = self.deadline.spent_s
            self.tell(Progress(stage, spent, self.cost, bound, left, self.choices))


@dataclass(slots=True)
class Search:
    """Solves one network.

    Attributes:
        net: Shrinks as the search goes on.
        record: Where results go.
        rng: For random neighbourhoods.
        workers: Strategies of CP-SAT; 0: CP-SAT is not used.
        timeline: The problem's time points, if the network has memory rows for some of them only.
        points: Those time points.
        broken: Time points at which a choice that the network allows broke the limit.
        relaxed: The linear program was solved.
        prices: Per memory row, the best known cost of one byte.
    """

    net: Network
    record: Record
    rng: np.random.Generator
    workers: int
    timeline: Timeline | None = None
    points: frozenset[int] = frozenset()
    broken: tuple[int, ...] = ()
    relaxed: bool = False
    prices: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def run(self) -> bool:
        """Search until solved, out of time, or on to more memory rows.

        Returns:
            Whether the network is finished: nothing on it is cheaper than the record's cost.
        """
        net, record = self.net, self.record
        self.prices = np.zeros(len(net.capacity))
        if not net.impossible:
            record.raise_bound(net.offset)
        if not net.segments:
            self._start()
        effort = 1
        dual: Dual | None = None
        while record.deadline.left_s > 0:
            if dual is None:
                finished = self._reduce()
                if finished is not None:
                    return finished
                self._start()
                if record.deadline.left_s <= 0:
                    return False
                record.load_kernels()
                dual = Dual.of(net)
                closed = self._relax(dual)
            else:
                closed = not self.relaxed and self._raise_bound(dual, effort)
            if closed or record.closed:
                return True
            if self.broken:
                return False
            part = self._prunable(dual)
            if part and (self.relaxed or part > _WORTHWHILE / 3):
                self._prune(dual)
                dual = None
                if part > _WORTHWHILE / 3:
                    continue
                finished = self._reduce()
                if finished is not None:
                    return finished
            record.look_around(_LOCAL_SHARE, self.rng, rounds=None)
            if self._search_exactly(effort):
                return True
            if self.broken:
                return False
            effort *= 2
        return net.impossible

    def _relax(self, dual: Dual) -> bool:
        """Raise the bound, by the linear program if it can be solved; says if the gap closed."""
        net, record = self.net, self.record
        dual.set_prices(self.prices * dual.scale)
        model = Polytope(net)
        found = None
        if model.columns > _EASY_FLOWS and not self.relaxed:
            if self._raise_bound(dual, 1, most=_FIRST_ROUNDS):
                return True
            if self._prunable(dual) > _WORTHWHILE:
                return False
            if len(net.costs) <= _MOST_WALKED and record.local is None:
                # Dense: the program is slow, and moves of single nodes end in poor places.
                record.look_around(_DENSE_SHARE, self.rng, rounds=None)
        if model.columns <= MOST_FLOWS and not record.wide:
            self._say("relaxing")
            found = model.relax(record.deadline.share(_RELAX_SHARE))
        if found is None or not dual.install(found.prices, found.messages):
            return self._raise_bound(dual, 1)
        self.relaxed = True
        self.prices = found.prices
        for _ in range(_SWEEPS):
            dual.sweep()
        record.raise_bound(dual.bound)
        if dual.impossible:
            net.impossible = True
            return True
        if record.cost is not None and bool(self.prices.any()):
            record.wide = record.cost - dual.bound > _WIDE * record.cost
        self._offer(found.states())
        if not self.broken:
            self._improve(dual.named(dual.decode()), dual)
        return record.closed

    def _say(self, stage: str) -> None:
        """Give a sign of life."""
        self.record.say(stage, len(self.net.costs), self.net.offset)

    def _offer(self, states: dict[int, int]) -> None:
        """Take a choice if it is feasible and cheaper; note the time points that it breaks."""
        self._offer_on(self.net, states)

    def _offer_on(self, net: Network, states: dict[int, int]) -> None:
        record = self.record
        if paid(net, states) >= INF or (excess(net, states) > 0).any():
            return
        choices = net.choices(states)
        if not record.offer_choices(choices) and self.timeline is not None:
            self.broken += self.timeline.broken(choices, _MOST_POINTS)

    def _reduce(self) -> bool | None:
        """Shrink the network; says whether that finished it, None if more is to be done."""
        net, record = self.net, self.record
        self._say("reducing")
        reduce(net, record.deadline)
        self.prices = self.prices[compact(net)]
        reduce(net, record.deadline)
        if net.impossible:
            return True
        return None if net.segments else self._eliminate()

    def _start(self) -> None:
        """Make sure that there is some choice, if one is easily found."""
        net, record = self.net, self.record
        if record.cost is not None or record.deadline.left_s <= 0:
            return
        large = len(net.costs) > _MOST_WALKED or len(record.problem.costs) > MANY
        if self.timeline is not None and large:
            record.look_around(_START_SHARE, self.rng)
        else:
            deadline = record.deadline.share(_START_SHARE)
            walk = Walk.at(net, {node: int(cost.argmin()) for node, cost in net.costs.items()})
            walk.repair(self.prices, deadline)
            walk.descend(weight=np.inf, prices=None, deadline=deadline)
            record.offer(net, walk.states)

    def _eliminate(self) -> bool | None:
        """Solve a network without memory rows by elimination; None if it is too large."""
        net, record = self.net, self.record
        buckets = plan_elimination(net)
        if buckets is None:
            return None
        self._say("eliminating")
        ran = Elimination.run(net, buckets, record.deadline)
        if ran is None:
            return False
        value, run = ran
        if value < INF:
            self._offer(run.best())
            record.raise_bound(net.offset + value)
        return not self.broken

    def _raise_bound(self, dual: Dual, effort: int, most: int = _ALL_ROUNDS) -> bool:
        """One round of prices, bound and choices; says whether the gap closed."""
        net, record = self.net, self.record
        best, best_prices = dual.bound, dual.prices
        step, fails, smooth, mark, stalled, search = _STEP, 0, None, dual.bound, 0, 0
        for count in range(most):
            for _ in range(_SWEEPS):
                if record.deadline.left_s <= 0:
                    return False
                dual.sweep()
            states = dual.decode()
            over = dual.layout.excess(states, net.capacity)
            if not (over > 0).any():
                record.offer(net, dual.named(states))
            if count == search:
                self._improve(dual.named(states), dual)
                search = search + 4 if self.timeline is None else 2 * search + _LOCAL_AFTER
            if dual.impossible:
                net.impossible = True
                return True
            if dual.bound > best:
                best, best_prices, fails = dual.bound, dual.prices, 0
                step *= _GAIN
                record.raise_bound(best)
            else:
                fails += 1
            if record.closed:
                return True
            if count % 4 == 3 and self._prunable(dual) > _WORTHWHILE:
                break
            self._say("raising the bound")
            reach = max(abs(best), 1) if record.cost is None else record.cost - best
            if best - mark > 0.01 * reach:
                mark, stalled = best, 0
            else:
                stalled += 1
            if stalled >= _STALL * effort:
                break
            if fails >= _PATIENCE:
                step, fails = step / 2, 0
                dual.set_prices(best_prices.astype(np.float64))
            smooth = over.astype(np.float64) if smooth is None else 0.6 * smooth + 0.4 * over
            slope = np.where((smooth > 0) | (dual.prices > 0), smooth, 0.0)
            if slope.any():
                length = step * min(reach, max(abs(best), 1)) * dual.scale / float(slope @ slope)
                dual.set_prices(np.maximum(0.0, dual.prices + length * slope))
        dual.set_prices(best_prices.astype(np.float64))
        self.prices = best_prices / dual.scale
        if self.timeline is not None and most == _ALL_ROUNDS:
            self._note_broken(dual.named(dual.decode()))
        return False

    def _note_broken(self, states: dict[int, int]) -> None:
        """Note the time points that a choice breaks, if it keeps to those that have a row."""
        choices = self.net.choices(states)
        assert self.timeline is not None
        over = self.timeline.excess(choices)
        if not (over[list(self.points)] > 0).any():
            self.broken += self.timeline.broken(choices, _MOST_POINTS)

    def _prunable(self, dual: Dual) -> float:
        """The fraction of states that ``_prune`` would drop."""
        if self.record.cost is None:
            return 0.0
        least = scaled(self.record.cost - 1 - dual.base, dual.shift)
        return int((dual.floors > least).sum()) / max(len(dual.floors) - len(dual.layout.nodes), 1)

    def _prune(self, dual: Dual) -> None:
        """Drop the states that no cheaper choice than the best known can use."""
        assert self.record.cost is not None
        dual.drop(self.record.cost - 1)

    def _improve(self, states: dict[int, int], dual: Dual) -> None:
        """Repair a suggested choice, and improve the best one block by block.

        With some of the memory rows only, what would be found breaks others: search locally.
        """
        net, record, deadline = self.net, self.record, self.record.deadline
        if self.timeline is not None:
            record.look_around(_LOCAL_SHARE, self.rng)
            return
        prices = dual.prices / dual.scale
        walk = Walk.at(net, states)
        walk.repair(prices, deadline)
        walk.descend(weight=np.inf, prices=None, deadline=deadline)
        record.offer(net, walk.states)
        if record.choices is not None:
            walk = Walk.at(net, net.locate(record.choices))
        nodes = list(net.costs)
        for _ in range(20):
            if deadline.left_s <= 0:
                break
            block = ball(
                net,
                nodes[int(self.rng.integers(len(nodes)))],
                int(self.rng.integers(3, 30)),
                self.rng,
            )
            walk.improve_block(block, prices * 2 * self.rng.random(), deadline)
        walk.descend(weight=np.inf, prices=None, deadline=deadline)
        record.offer(net, walk.states)

    def _search_exactly(self, effort: int) -> bool:
        """Hand what is left to HiGHS, then to CP-SAT, for a while; says if that finished it."""
        net, record = self.net, self.record
        if not self.workers or record.deadline.left_s <= 0:
            return False
        model = Polytope(net)
        if model.columns > MOST_FLOWS:
            return False
        self._say("searching exactly")
        hint = net.locate(record.choices) if record.choices is not None else None
        seed = int(self.rng.integers(1 << 30))
        if record.wide and self.prices.any():
            return self._branch(seed)
        if self.relaxed:
            share = record.deadline.share(min(1.0, _EXACT_SHARE * effort))
            found = model.search(share, seed=seed, hint=hint)
            if found.bound is not None:
                record.raise_bound(found.bound)
            if found.states is not None:
                self._offer(found.states)
            if self.broken:
                return False
        result = solve_network(
            net,
            record.deadline,
            seed=seed,
            workers=self.workers,
            most_work=_SEARCH_WORK * effort * effort,
            priced=np.flatnonzero(self.prices > 0).tolist(),
            hint=net.locate(record.choices) if record.choices is not None else None,
            upper=record.cost,
        )
        if result.bound is not None:
            record.raise_bound(result.bound)
        if result.states is not None:
            self._offer(result.states)
        return result.complete and not self.broken

    def _branch(self, seed: int) -> bool:
        """Tell cases apart by what nodes hold; says if that finished the network."""
        net, record = self.net, self.record
        dual = Dual.of(net)
        dual.set_prices(self.prices * dual.scale)

        def cost() -> int:
            assert record.cost is not None
            return record.cost

        def offer(part: Network, states: dict[int, int]) -> bool:
            self._offer_on(part, states)
            return not self.broken

        def raise_bound(bound: int) -> None:
            record.raise_bound(bound)
            self._say("telling cases apart")

        target = Target(cost, offer, raise_bound, record.deadline)
        return Cases(net, dual, target, seed).run()
