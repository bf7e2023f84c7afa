"""A solver that answers with a random plan, to try plans that no cost model would choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS, Progress, Solution, Status


class RandomPlans:
    """The best plan with some of its decisions moved at random to others that are allowed."""

    def __init__(self, seed: int, moved: tuple[float, float] = (0.15, 0.4)) -> None:
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
        start = time.perf_counter()
        best = SOLVERS["exact"].solve(problem, time_limit_s=time_limit_s)
        choices = list(best.choices)
        around: list[list[int]] = [[] for _ in choices]
        for edge, (i, j) in enumerate(problem.edges.tolist()):
            around[i].append(edge)
            around[j].append(edge)
        for node in self.rng.permutation(len(choices)):
            if self.rng.random() < self.share:
                allowed = self._allowed(problem, choices, int(node), around[node])
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
        self, problem: Problem, choices: list[int], node: int, edges: list[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
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
