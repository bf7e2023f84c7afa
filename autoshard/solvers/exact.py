"""The default solver: exact reductions, elimination, then search with a proved gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.cpsat import CpsatResult, solve_network
from autoshard.solvers.eliminate import Elimination, plan_elimination
from autoshard.solvers.memory import least_usage_limit, shortage
from autoshard.solvers.network import INF, Network
from autoshard.solvers.reduce import reduce
from autoshard.solvers.rows import add_memory, compact
from autoshard.solvers.solution import Deadline, Progress, Solution, Status


@dataclass(frozen=True, slots=True)
class ExactSolver:
    """Reduces, eliminates, and searches what is left.

    Attributes:
        workers: Search strategies that CP-SAT runs in turn.
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
        deadline = Deadline.after(time_limit_s)
        least = least_usage_limit(problem)
        bound = -FORBIDDEN
        for with_memory in (False, True):
            net = Network.of(problem)
            if with_memory:
                add_memory(net, problem)
            reduce(net, deadline)
            result = self._finish(net, deadline, seed)
            if result.bound is None:
                tight = shortage(problem) if with_memory else None
                return Solution(
                    Status.INFEASIBLE, (), FORBIDDEN, FORBIDDEN, 0, deadline.spent_s, least, tight
                )
            bound = max(bound, result.bound)
            if result.states is not None:
                full = net.complete(result.states)
                choices = tuple(full[i] for i in range(len(problem.costs)))
                found = evaluate(problem, choices)
                if found.feasible:
                    bound = min(bound, found.cost)
                    status = Status.OPTIMAL if bound == found.cost else Status.FEASIBLE
                    return Solution(
                        status, choices, found.cost, bound, found.peak_usage, deadline.spent_s,
                        least,
                    )
        return Solution(
            Status.UNKNOWN, (), FORBIDDEN, bound, 0, deadline.spent_s, least, shortage(problem)
        )

    def _finish(self, net: Network, deadline: Deadline, seed: int) -> CpsatResult:
        """Solve a reduced network."""
        compact(net)
        if net.impossible:
            return CpsatResult(None, None, True)
        buckets = None if net.segments else plan_elimination(net)
        if buckets is not None:
            ran = Elimination.run(net, buckets, deadline)
            if ran is not None:
                value, run = ran
                if value >= INF:
                    return CpsatResult(None, None, True)
                return CpsatResult(run.best(), net.offset + value, True)
        return solve_network(net, deadline, seed=seed, workers=self.workers)


EXACT = ExactSolver()
"""The row of ``SOLVERS``."""
