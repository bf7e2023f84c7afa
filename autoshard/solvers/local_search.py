"""A good choice within seconds, and better ones as time goes on; nothing is proved.

Annealing over forests: sweeps of exact minimisation over random induced forests, with noise that
cools down and with memory at prices that follow how full each row is (as in "exponentiated
gradient", Kivinen and Warmuth, 1997). What comes out is merged part by part into the best choice
known, under the limit itself. Noise and minimum make samples of about Boltzmann's distribution
(Papandreou and Yuille, "Perturb-and-MAP random fields", 2011).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.flat import Flat, Floats, Places
from autoshard.solvers.forests import Forests
from autoshard.solvers.kernels import load_kernels
from autoshard.solvers.memory import least_cost, least_usage_limit, shortage
from autoshard.solvers.solution import Deadline, Progress, Solution, Status

_COOLING = 1e-4  # the last heat over the first
_HOT = 30.0  # times the cost per group: the first heat is not above this
_PACE = 1.0  # a price is multiplied by e to this power where usage is twice the limit
_START = 1e-2  # the first prices, as a fraction of the first heat per byte of limit
_FLOOR = 1e-9  # prices don't fall below this, as the same fraction
_SETTLING = 0.2  # of the sweeps of an annealing: the last ones, in which prices change less
_SLOW = 0.05  # of the usual pace: that of prices at the end
_STALE = 4  # rounds without a better choice after which a search ends
_MOST = 1e6  # prices don't rise above this, as the same fraction
_WARM_UP = 5  # sweeps without noise and prices before an annealing
_FIRST_SWEEPS = (16, 160)  # least and most of the first annealing; each one doubles them
_FITTING = 100  # sweeps at rising prices after messages that met no feasible choice
_FEWEST = 40  # rounds of messages
_LISTENING = 10**6  # entries that messages look at per sweep of an annealing
_FREE = 8  # one of so many rounds of messages is without prices
_FIRST_PRICE = 1e-4  # of memory after those: a part of the cost per byte of limit
_WORTH_TELLING = 0.02  # of the cost: messages that gain as much are told at once
_PER_GROUP = 4  # sweeps of the first annealing, between those
_REPAIRS = 400  # sweeps at rising prices after an annealing that ended with a row too full
_MARGIN = 0.003  # of the limit: each of them leaves so much more room free
_POLISH = 0.15  # proposals to be merged, as a fraction of the sweeps of an annealing
_COOL = (-6.0, -3.5)  # range of the logarithm of their heat over that of the start, base ten
_SPREAD = 0.03  # of the logarithm of what prices are multiplied with for a proposal


@dataclass(slots=True)
class LocalSearch:
    """A search on one problem that can be interrupted and taken up again.

    Attributes:
        problem: The problem.
        flat: The same in arrays.
        prices: Per memory row of ``flat``, what one byte cost when the best choice was found.
        tell: Called with each better feasible choice.
    """

    problem: Problem
    flat: Flat
    prices: Floats
    tell: Callable[[tuple[int, ...], int], None] | None = None
    _best: tuple[int, tuple[int, ...]] | None = None
    _sweeps: int = 0  # of the next annealing
    _seconds: float = 0.0  # of one sweep
    _hot: float = 1.0  # the heat that the last annealing began with

    @classmethod
    def of(
        cls, problem: Problem, tell: Callable[[tuple[int, ...], int], None] | None = None
    ) -> LocalSearch:
        """Prepare a search on a problem that ``validate_problem`` accepts."""
        flat = Flat.of(problem)
        least, most = _FIRST_SWEEPS
        sweeps = max(least, min(most, _PER_GROUP * (len(flat.at) - 1)))
        return cls(problem, flat, np.zeros(len(flat.capacity)), tell, _sweeps=sweeps)

    def first(self, seed: int, deadline: Deadline) -> tuple[int, ...] | None:
        """A feasible choice from one short annealing; None if none was found.

        Args:
            seed: The same seed gives the same choice as long as time does not run out.
            deadline: When to stop.
        """
        return self.improve(None, deadline, np.random.default_rng(seed), rounds=1)

    def improve(
        self,
        choices: Sequence[int] | None,
        deadline: Deadline,
        rng: np.random.Generator,
        *,
        rounds: int | None = None,
    ) -> tuple[int, ...] | None:
        """Look for cheaper choices, each round twice as long as the one before.

        Args:
            choices: Where to start; need not be feasible. None for nothing.
            deadline: When to stop.
            rng: The same state gives the same answer as long as time does not run out.
            rounds: Stop after so many; None: when several in a row found nothing better.

        Returns:
            The best feasible choice known, never worse than ``choices``; None if none is known.
        """
        if choices is not None:
            self.offer(tuple(choices))
        forests = Forests.on(self.flat, rng)
        incumbent = None if self._best is None else self.flat.locate(self._best[1])
        count = stale = 0
        while deadline.left_s > 0 and stale < _STALE and (rounds is None or count < rounds):
            sweeps = self._sweeps
            if self._seconds:
                sweeps = max(10, min(sweeps, int(0.8 * deadline.left_s / self._seconds)))
            before = self.cost
            for start in (self._listen, self._anneal):
                found = start(forests, sweeps, deadline)
                if found is not None:
                    incumbent = self._join(forests, incumbent, found)
                if incumbent is not None:
                    incumbent = self._polish(forests, incumbent, int(_POLISH * sweeps), deadline)
            self._sweeps *= 2
            count += 1
            stale = 0 if self.cost != before else stale + 1
            if not len(self.flat.costs):
                break  # no group has a choice
        return None if self._best is None else self._best[1]

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Take a choice if it is feasible and cheaper than the best known; says whether it was."""
        found = evaluate(self.problem, choices)
        if not found.feasible or (self._best is not None and found.cost >= self._best[0]):
            return False
        self._best = (found.cost, choices)
        if self.tell is not None:
            self.tell(choices, found.cost)
        return True

    @property
    def cost(self) -> int | None:
        """Cost of the best feasible choice known; None if there is none."""
        return None if self._best is None else self._best[0]

    def _listen(self, forests: Forests, sweeps: int, deadline: Deadline) -> Places | None:
        """Pass messages while prices find their level; the best feasible choice met."""
        flat = self.flat
        sizes = np.diff(flat.at)
        work = int((sizes[flat.owner] * sizes[flat.near]).sum()) + 1
        rounds = max(_FEWEST, min(sweeps, _LISTENING * sweeps // work))
        forests.forget()
        prices = np.zeros(len(flat.capacity))
        unit, best, least, told = 0.0, None, math.inf, float(FORBIDDEN)
        states = np.zeros(len(sizes), np.int64)
        for k in range(rounds + _FITTING):
            if deadline.left_s <= 0 or (k >= rounds and best is not None):
                break
            if k < rounds:
                states = forests.decode(prices)
            forests.sweep(states, prices, 0.0)
            cost = flat.cost(states)
            over = flat.usage(states) - flat.capacity
            if not (over > 0).any() and cost < least:
                best, least = states.copy(), cost
                if least < told - _WORTH_TELLING * abs(told):
                    told = least
                    self.offer(flat.expand(best))
            if k < rounds // _FREE:
                continue
            if not unit:
                unit = max(abs(cost), 1.0) / self._limit
                prices += _FIRST_PRICE * unit
            margin = max(0, k - rounds) * _MARGIN
            full = np.clip(over / self._limit + margin, -1.0, 1.0)
            pace = _PACE * (1.0 if margin else max(_SLOW, 1.0 - k / rounds))
            prices = np.clip(prices * np.exp(pace * full), _FLOOR * unit, _MOST * unit)
        if best is not None:
            self.prices = prices
            self._hot = min(forests.regret(), _HOT * abs(least) / max(len(best), 1))
        return best

    def _anneal(self, forests: Forests, sweeps: int, deadline: Deadline) -> Places | None:
        """One annealing from scratch, then sweeps at rising prices; the best feasible choice."""
        flat = self.flat
        began = deadline.spent_s
        states = np.array(
            [int(flat.costs[a:b].argmin()) for a, b in itertools.pairwise(flat.at.tolist())],
            np.int64,
        )
        prices = np.zeros(len(flat.capacity))
        for _ in range(_WARM_UP):
            forests.sweep(states, prices, 0.0)
        self._hot = min(forests.regret(), _HOT * abs(flat.cost(states)) / max(len(states), 1))
        floor = _FLOOR * self._hot / self._limit
        prices += _START * self._hot / self._limit
        best, least, done = None, math.inf, 0
        for done in range(1, sweeps + min(_REPAIRS, 4 * sweeps)):
            share = min(done / sweeps, 1.0)
            forests.sweep(states, prices, self._hot * _COOLING**share)
            over = flat.usage(states) - flat.capacity
            if not (over > 0).any():
                cost = flat.cost(states)
                if cost < least:
                    best, least = states.copy(), cost
                if done >= sweeps:
                    break
            if deadline.left_s <= 0:
                break
            pace = _PACE * min(1.0, max(_SLOW, (1.0 - share) / _SETTLING))
            margin = max(0, done - sweeps) * _MARGIN
            full = np.clip(over / self._limit + margin, -1.0, 1.0)
            prices = np.clip(
                prices * np.exp((_PACE if margin else pace) * full), floor, floor * _MOST / _FLOOR
            )
            if done == sweeps:
                self.prices = prices
        self._seconds = (deadline.spent_s - began) / (done + _WARM_UP)
        return best

    @property
    def _limit(self) -> float:
        """What usage above the room in a row is measured by [bytes]."""
        return float(max(self.problem.usage_limit or 0, 1))

    def _join(self, forests: Forests, old: Places | None, new: Places) -> Places:
        """Merge a new feasible choice with the best known one; the better of what comes out."""
        best = new
        if old is not None:
            for one, other in ((old, new), (new, old)):
                merged = other.copy()
                change, fits = forests.merge(one, merged)
                for candidate in (one, merged if fits and change <= 0 else one):
                    if self.flat.cost(candidate) < self.flat.cost(best):
                        best = candidate
        self.offer(self.flat.expand(best))
        return best

    def _polish(
        self, forests: Forests, states: Places, proposals: int, deadline: Deadline
    ) -> Places:
        """Merge what sweeps from a feasible choice propose into it."""
        rng, floor = forests.rng, _FLOOR * self._hot / self._limit
        prices = np.maximum(self.prices, floor)
        better = False
        for _ in range(proposals):
            if deadline.left_s <= 0:
                break
            new = states.copy()
            heat = self._hot * 10.0 ** rng.uniform(*_COOL)
            scale = math.exp(_SPREAD * rng.standard_normal())
            for _ in range(int(rng.integers(1, 4))):
                forests.sweep(new, prices * scale, heat)
            full = np.clip((self.flat.usage(new) - self.flat.capacity) / self._limit, -1.0, 1.0)
            prices = np.clip(prices * np.exp(_SLOW * _PACE * full), floor, floor * _MOST / _FLOOR)
            change, fits = forests.merge(states, new)
            if fits and change <= 0:
                better |= change < 0
                states = new
        self.prices = prices
        if better:
            self.offer(self.flat.expand(states))
        return states


@dataclass(frozen=True, slots=True)
class LocalSolver:
    """Searches until time is over; proves no more than a bound that costs nothing to find."""

    def prepare(self, problem: Problem) -> None:
        """Compile what the search needs; called before the clock runs."""
        load_kernels()

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Solve a problem; see ``Solver.solve``."""
        self.prepare(problem)
        deadline = Deadline.after(time_limit_s)
        validate_problem(problem)
        bound = least_cost(problem)

        def tell(choices: tuple[int, ...], cost: int) -> None:
            if progress is not None:
                left = len(search.flat.at) - 1
                spent = deadline.spent_s
                progress(Progress("searching", spent, cost, bound, left, choices))

        search = LocalSearch.of(problem, tell)
        impossible = bool((search.flat.capacity < 0).any())
        rng = np.random.default_rng(seed)
        found = None if impossible else search.improve(hint, deadline, rng)
        if found is None or search.cost is None:
            return Solution(
                status=Status.INFEASIBLE if impossible else Status.UNKNOWN,
                choices=(),
                cost=FORBIDDEN,
                lower_bound=FORBIDDEN if impossible else bound,
                peak_usage=0,
                seconds=deadline.spent_s,
                least_usage_limit=least_usage_limit(problem),
                shortage=shortage(problem),
            )
        return Solution(
            status=Status.OPTIMAL if search.cost == bound else Status.FEASIBLE,
            choices=found,
            cost=search.cost,
            lower_bound=bound,
            peak_usage=evaluate(problem, found).peak_usage,
            seconds=deadline.spent_s,
            least_usage_limit=least_usage_limit(problem),
        )


LOCAL = LocalSolver()
"""The row of ``SOLVERS``."""
