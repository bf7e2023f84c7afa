"""The default solver: exact reductions, elimination, then search with a proved gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.core import Record, Search
from autoshard.solvers.memory import least_usage_limit, shortage
from autoshard.solvers.network import Network
from autoshard.solvers.rows import add_memory
from autoshard.solvers.solution import Deadline, Progress, Solution, Status


@dataclass(frozen=True, slots=True)
class ExactSolver:
    """Reduces, eliminates, and searches what is left.

    Attributes:
        workers: Search strategies that CP-SAT runs in turn on what elimination can't solve; 0: none,
            what is left stays with local search and its bound.
    """

    workers: int = 4

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
        validate_problem(problem)
        record = Record(problem, Deadline.after(time_limit_s), progress)
        if hint is not None:
            record.offer_choices(tuple(hint))
        finished = self._solve(record, np.random.default_rng(seed))
        return _solution(record, finished)

    def _solve(self, record: Record, rng: np.random.Generator) -> bool:
        """Fill the record; says whether nothing cheaper than its choice can exist."""
        problem = record.problem
        net = Network.of(problem)
        if problem.usage_limit is None:
            return Search(net, record, rng, self.workers).run()
        add_memory(net, problem)
        return Search(net, record, rng, self.workers).run()


def _solution(record: Record, finished: bool) -> Solution:
    problem, spent = record.problem, record.deadline.spent_s
    least = least_usage_limit(problem)
    if record.choices is None or record.cost is None:
        limit = problem.usage_limit
        tight = shortage(problem) if limit is not None else None
        return Solution(
            Status.INFEASIBLE if finished else Status.UNKNOWN,
            (),
            FORBIDDEN,
            FORBIDDEN if finished or record.bound is None else record.bound,
            0,
            spent,
            least,
            tight,
        )
    bound = record.cost if finished else min(record.cost, record.bound)
    return Solution(
        Status.OPTIMAL if bound == record.cost else Status.FEASIBLE,
        record.choices,
        record.cost,
        bound,
        evaluate(problem, record.choices).peak_usage,
        spent,
        least,
    )


EXACT = ExactSolver()
"""The row of ``SOLVERS``."""

LOCAL = ExactSolver(workers=0)
"""The row of ``SOLVERS`` that never calls CP-SAT."""
