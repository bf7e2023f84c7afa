"""A solver whose answers are recounted before anybody believes them.

A solver may be anybody's. What it says of its choices is counted anew from the problem; a bound is
believed, because recounting it would be solving, but not where it contradicts a choice at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from autoshard.errors import SolverError
from autoshard.problem import FORBIDDEN, Evaluation, Problem, evaluate
from autoshard.solvers.solution import Progress, Solution, Solver, Status


@dataclass(frozen=True, slots=True)
class Checked:
    """A solver that refuses to pass on what cannot be true.

    Attributes:
        solver: Whose answers are recounted.
        name: What it is called in errors.
    """

    solver: Solver
    name: str

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Solve a problem; see ``Solver.solve``.

        Cost and peak of the answer are those counted here. A hint that is feasible and cheaper than
        the answer takes its place.

        Raises:
            SolverError: The choices don't fit the problem, or the status or the bound contradicts
                them or the hint.
        """
        solution = self.solver.solve(
            problem, time_limit_s=time_limit_s, seed=seed, hint=hint, progress=progress
        )
        if not isinstance(solution, Solution):
            self._refuse(f"answered with a {type(solution).__name__}", "return a Solution")
        counted = self._counted(problem, solution)
        known = None if hint is None else evaluate(problem, hint)
        if known is not None and known.feasible:
            if solution.status is Status.INFEASIBLE:
                self._refuse(
                    "says that nothing is feasible, but the hint it was given is",
                    "answer UNKNOWN if nothing was found and nothing proved",
                )
            if solution.lower_bound > known.cost:
                self._refuse(
                    f"says that nothing costs less than {solution.lower_bound:,}, but the hint it "
                    f"was given costs {known.cost:,}",
                    "lower_bound must hold for every feasible choice",
                )
            if counted is None or known.cost < counted.cost:
                assert hint is not None
                counted, solution = known, replace(solution, choices=tuple(hint))
        if counted is None:
            return replace(solution, cost=FORBIDDEN, peak_usage=0)
        if solution.lower_bound > counted.cost:
            self._refuse(
                f"says that nothing costs less than {solution.lower_bound:,}, but its own choice "
                f"costs {counted.cost:,}",
                "lower_bound must hold for every feasible choice",
            )
        closed = solution.lower_bound == counted.cost
        return replace(
            solution,
            status=Status.OPTIMAL if closed else Status.FEASIBLE,
            cost=counted.cost,
            peak_usage=counted.peak_usage,
            shortage=None,
        )

    def _counted(self, problem: Problem, solution: Solution) -> Evaluation | None:
        """The recount of an answer's choices; None if there are none."""
        empty = not solution.choices and len(problem.costs) > 0
        solved = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
        if empty or not solved:
            if solved or solution.choices:
                self._refuse(
                    f"answered {solution.status.name} "
                    + ("without choices" if solved else "but gave choices"),
                    "choices go with OPTIMAL and FEASIBLE, and with these alone",
                )
            return None
        sizes = [len(cost) for cost in problem.costs]
        fits = len(solution.choices) == len(sizes) and all(
            0 <= choice < size for choice, size in zip(solution.choices, sizes, strict=True)
        )
        if not fits:
            self._refuse(
                "chose strategies that the problem does not have",
                "choices holds one strategy index per node of the problem",
            )
        counted = evaluate(problem, solution.choices)
        if not counted.feasible:
            over = f"uses {counted.peak_usage:,} bytes at {counted.peak_time}"
            self._refuse(
                "chose what is not feasible: "
                + ("a forbidden entry" if counted.cost >= FORBIDDEN else over),
                "leave choices empty if nothing feasible was found, with status UNKNOWN",
            )
        if solution.status is Status.OPTIMAL and solution.lower_bound < counted.cost:
            self._refuse(
                f"says OPTIMAL, but its choice costs {counted.cost:,} and its bound is "
                f"{solution.lower_bound:,}",
                "with OPTIMAL, lower_bound is the cost of the choices",
            )
        return counted

    def _refuse(self, problem: str, fix: str) -> NoReturn:
        raise SolverError(f"the solver {self.name} {problem}", fix=fix)
