"""The default solver: exact reductions, elimination, then search with a proved gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.core import MANY, Record, Search
from autoshard.solvers.kernels import load_kernels
from autoshard.solvers.memory import least_usage_limit, shortage
from autoshard.solvers.network import Network
from autoshard.solvers.rows import Timeline
from autoshard.solvers.solution import Deadline, Progress, Solution, Status

_ROOMY = 0.5
"""Where more than this fraction of the limit is left when every node uses its least, memory is
first left out of account."""

_FIRST_SHARE = 0.25  # of the time: for a choice before anything else
_NEARLY = 0.03  # of the limit: time points with less room than this in it get rows at once
_FIRST_POINTS = 8  # as many as that


@dataclass(frozen=True, slots=True)
class ExactSolver:
    """Reduces, eliminates, and searches what is left.

    Attributes:
        workers: Threads of CP-SAT, which gets what nothing else can solve; 0: it is not called. The
            same seed gives the same choice with one; with more, another of several best may come.
        stop_at_gap: Stop once the cost is proved to be this close to the best, as a fraction of the
            cost; 0: only at the best.
    """

    workers: int = 1
    stop_at_gap: float = 0.0

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
        record = Record(problem, deadline, progress, self.stop_at_gap)
        if hint is not None:
            record.offer_choices(tuple(hint))
        outcome = self._solve(record, np.random.default_rng(seed))
        return _solution(record, outcome)

    def prepare(self, problem: Problem) -> None:
        """Compile what solving will surely need; called before the clock runs."""
        if problem.usage_limit is not None and len(problem.costs) > MANY:
            load_kernels()

    def _solve(self, record: Record, rng: np.random.Generator) -> Outcome:
        """Fill the record; says what is proved."""
        problem = record.problem
        if problem.usage_limit is None:
            return Outcome(Search(Network.of(problem), record, rng, self.workers).run(), False)
        timeline = Timeline.of(problem)
        points: set[int] = set()
        if int(timeline.capacity.min()) < problem.usage_limit * _ROOMY:
            points.add(int(timeline.capacity.argmin()))
        if len(problem.costs) > MANY:
            record.look_around(_FIRST_SHARE, rng)
            if record.choices is not None:
                room = int(_NEARLY * problem.usage_limit)
                points.update(timeline.broken(record.choices, _FIRST_POINTS, room=room))
        whole = Network.of(problem, again=True)
        while True:
            net = whole.copy()
            timeline.give(net, sorted(points))
            search = Search(net, record, rng, self.workers, timeline, frozenset(points))
            finished = search.run()
            fresh = set(search.broken) - points
            if not fresh:
                return Outcome(finished, finished and self._fits_without_limit(record, rng))
            points |= fresh

    def _fits_without_limit(self, record: Record, rng: np.random.Generator) -> bool:
        """Whether some choice is allowed that is not feasible: memory forbids it."""
        if record.choices is not None:
            return True
        free = Record(replace(record.problem, usage_limit=None), record.deadline, None)
        finished = Search(Network.of(free.problem), free, rng, 0).run()
        return free.choices is not None or not finished


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search proved.

    Attributes:
        finished: Nothing is cheaper than the record's choice; without one, nothing is feasible.
        memory: Memory is what stands in the way of a cheaper, or of any, choice.
    """

    finished: bool
    memory: bool


def _solution(record: Record, outcome: Outcome) -> Solution:
    problem, spent = record.problem, record.deadline.spent_s
    least = least_usage_limit(problem)
    if record.choices is None or record.cost is None:
        bound = record.bound if record.bound is not None else -FORBIDDEN
        return Solution(
            status=Status.INFEASIBLE if outcome.finished else Status.UNKNOWN,
            choices=(),
            cost=FORBIDDEN,
            lower_bound=FORBIDDEN if outcome.finished else bound,
            peak_usage=0,
            seconds=spent,
            least_usage_limit=least,
            shortage=shortage(problem) if outcome.memory else None,
        )
    if outcome.finished or record.bound is None:
        bound = record.cost if outcome.finished else -FORBIDDEN
    else:
        bound = min(record.cost, record.bound)
    return Solution(
        status=Status.OPTIMAL if bound == record.cost else Status.FEASIBLE,
        choices=record.choices,
        cost=record.cost,
        lower_bound=bound,
        peak_usage=evaluate(problem, record.choices).peak_usage,
        seconds=spent,
        least_usage_limit=least,
    )


EXACT = ExactSolver()
"""The row of ``SOLVERS``."""
