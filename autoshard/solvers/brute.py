"""Every choice there is: the oracle for small problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.errors import InputError
from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.memory import least_usage_limit, shortage
from autoshard.solvers.solution import Deadline, Progress, Solution, Status


@dataclass(frozen=True, slots=True)
class BruteForce:
    """Tries all combinations, one by one.

    Attributes:
        most_combinations: Problems with more are refused.
    """

    most_combinations: int = 1_000_000

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Try everything; see ``Solver.solve``. The time limit, seed and hint are not used.

        Raises:
            InputError: There are too many combinations.
        """
        validate_problem(problem)
        deadline = Deadline.after(time_limit_s)
        sizes = [len(cost) for cost in problem.costs]
        if math.prod(sizes) > self.most_combinations:
            raise InputError(
                f"there are {math.prod(sizes)} combinations to try",
                fix="use solver='exact'",
            )
        best: tuple[int, tuple[int, ...], int] | None = None
        for choices in itertools.product(*map(range, sizes)):
            found = evaluate(problem, choices)
            if found.feasible and (best is None or found.cost < best[0]):
                best = (found.cost, choices, found.peak_usage)
        least = least_usage_limit(problem)
        if best is None:
            tight = shortage(problem)
            return Solution(
                Status.INFEASIBLE, (), FORBIDDEN, FORBIDDEN, 0, deadline.spent_s, least, tight
            )
        cost, choices, peak = best
        return Solution(Status.OPTIMAL, choices, cost, cost, peak, deadline.spent_s, least)


BRUTE_FORCE = BruteForce()
"""The row of ``SOLVERS``."""
