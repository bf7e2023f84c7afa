"""A solver that answers with a random plan, to try plans that no cost model would choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS, Progress, Solution, Solver, Status


class RandomPlans:
    """The best plan with some of its decisions moved at random to others that are allowed.

    Args:
        seed: Of the share of decisions that are moved, of which they are, and of where they go.
        moved: The least and the largest share.
        best: Finds the best plan.
    """

    def __init__(
        self,
        seed: int,
        moved: tuple[float, float] = (0.15, 0.4),
        best: Solver = SOLVERS["exact"],
    ) -> None:
        self.best = best
        self.rng = np.random.default_rng(seed)
        self.share = self.rng.uniform(*moved)

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """A choice that is allowed, and the bound that the best one proves.

        Args:
            problem: What to choose for.
            time_limit_s: For the best choice [s].
            seed: Not used: the seed is this object's.
            hint: A choice to start the search for the best one from.
            progress: Called with signs of life.
        """
        start = time.perf_counter()
        best = self.best.solve(problem, time_limit_s=time_limit_s, hint=hint, progress=progress)
        choices = list(best.choices)
        around: list[list[int]] = [[] for _ in choices]
        for edge, (i, j) in enumerate(problem.edges.tolist()):
            around[i].append(edge)
            around[j].append(edge)
        for node in self.rng.permutation(len(choices)):
            if self.rng.random() < self.share:
                allowed = _allowed(problem, choices, int(node), around[node])
                choices[node] = int(self.rng.choice(allowed))
        found = evaluate(problem, choices)
        return Solution(
            status=Status.FEASIBLE,
            choices=tuple(choices),
            cost=found.cost,
            lower_bound=best.lower_bound,
            peak_usage=found.peak_usage,
            seconds=time.perf_counter() - start,
            least_usage_limit=best.least_usage_limit,
        )


def _allowed(
    problem: Problem, choices: list[int], node: int, edges: list[int]
) -> NDArray[np.int64]:
    """Choices of a node that go with what the others have chosen."""
    fine = problem.costs[node] < FORBIDDEN
    for edge in edges:
        i, j = problem.edges[edge].tolist()
        matrix = problem.edge_costs[edge]
        if i == j:
            fine &= matrix.diagonal() < FORBIDDEN
        elif i == node:
            fine &= matrix[:, choices[j]] < FORBIDDEN
        else:
            fine &= matrix[choices[i], :] < FORBIDDEN
    return np.flatnonzero(fine)
