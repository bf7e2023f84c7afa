"""The naive way, as a baseline: one binary per strategy and per pair of strategies, all to a MIP.

This is how sharding problems are usually solved: XLA's auto-sharding pass and Alpa before it, and
Meta's AutoParallel, give every edge a binary for each pair of strategies of its two nodes, add a
memory row per time point, and hand the whole to an integer solver. Here that is HiGHS. Nothing is
reduced beforehand but what is forbidden, and parallel edges are added up.

Sources: Zheng et al., *Alpa*, OSDI 2022, section 4.2 (the linearized edge variables);
meta-pytorch/autoparallel, ``optimize_sharding.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from autoshard.problem import FORBIDDEN, Problem, evaluate, validate_problem
from autoshard.solvers.memory import least_usage_limit, shortage
from autoshard.solvers.solution import Deadline, Progress, Solution, Status

_INTEGRAL = 1e-6
"""How far from whole HiGHS lets a variable be (its ``mip_feasibility_tolerance``)."""

_INFEASIBLE = 2
"""What ``scipy.optimize.milp`` calls a problem that is proved infeasible."""


@dataclass(frozen=True, slots=True)
class PairIlp:
    """The whole problem as one integer program.

    HiGHS computes in floating point; the bound is lowered by what its tolerances allow, and what
    it calls a solution is recounted. It takes no hint, says nothing until it ends, and may overrun
    its time while it prepares a large program.

    Attributes:
        most_entries: Programs whose matrix has more entries are not built (about 100 bytes each);
            the answer is then ``UNKNOWN``.
    """

    most_entries: int = 20_000_000

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Solve a problem; see ``Solver.solve``. Seed and hint are not used."""
        validate_problem(problem)
        deadline = Deadline.after(time_limit_s)
        least = least_usage_limit(problem)

        def nothing(status: Status, bound: int) -> Solution:
            tight = shortage(problem) if status is Status.INFEASIBLE else None
            spent = deadline.spent_s
            return Solution(status, (), FORBIDDEN, bound, 0, spent, least, tight)

        if not problem.costs:
            return Solution(Status.OPTIMAL, (), 0, 0, 0, deadline.spent_s, least)
        program = _Program.of(problem)
        if program is None:
            return nothing(Status.INFEASIBLE, FORBIDDEN)
        if program.entries > self.most_entries:
            return nothing(Status.UNKNOWN, -FORBIDDEN)
        if progress is not None:
            count = len(program.costs)
            progress(Progress("integer program", deadline.spent_s, None, -FORBIDDEN, count))
        matrix, low, high = program.rows()
        found = milp(
            program.costs,
            integrality=np.ones(len(program.costs)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": max(0.01, deadline.left_s), "mip_rel_gap": 0.0},
        )
        if found.status == _INFEASIBLE:
            return nothing(Status.INFEASIBLE, FORBIDDEN)
        bound = program.bound(found.mip_dual_bound, found.fun)
        if found.x is None:
            return nothing(Status.UNKNOWN, bound)
        choices = program.choices(found.x)
        counted = evaluate(problem, choices)
        if not counted.feasible:  # within its tolerances only
            return nothing(Status.UNKNOWN, bound)
        bound = min(bound, counted.cost)
        return Solution(
            status=Status.OPTIMAL if bound == counted.cost else Status.FEASIBLE,
            choices=choices,
            cost=counted.cost,
            lower_bound=bound,
            peak_usage=counted.peak_usage,
            seconds=deadline.spent_s,
            least_usage_limit=least,
        )


@dataclass(frozen=True, slots=True)
class _Program:
    """The integer program: binaries of nodes first, of pairs after them.

    Attributes:
        problem: Whose.
        states: Per node, its allowed strategies.
        first: Per node, its first variable.
        pairs: Per linked pair of nodes, the positions of allowed pairs among their strategies.
        costs: Per variable, its cost in units of ``unit``.
        least: The least cost of each table, in units of ``unit``.
        unit: All costs are multiples of it.
        entries: About how many entries the matrix has.
    """

    problem: Problem
    states: tuple[NDArray[np.intp], ...]
    first: NDArray[np.int64]
    pairs: tuple[tuple[int, int, NDArray[np.intp], NDArray[np.intp]], ...]
    costs: NDArray[np.float64]
    least: NDArray[np.float64]
    unit: int
    entries: int

    @classmethod
    def of(cls, problem: Problem) -> _Program | None:
        """The program; None if a node has no allowed strategy or an edge no allowed pair."""
        node_costs = [cost.copy() for cost in problem.costs]
        links: dict[tuple[int, int], NDArray[np.int64]] = {}
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
            if i == j:
                node_costs[i] = _plus(node_costs[i], np.diagonal(matrix))
                continue
            key, turned = ((i, j), matrix) if i < j else ((j, i), matrix.T)
            links[key] = _plus(links[key], turned) if key in links else turned
        states = tuple(
            np.flatnonzero((cost < FORBIDDEN) & fits)
            for cost, fits in zip(node_costs, _fitting(problem), strict=True)
        )
        if not all(map(len, states)):
            return None
        costs = [node_costs[node][allowed] for node, allowed in enumerate(states)]
        pairs = []
        for (i, j), matrix in links.items():
            inner = matrix[np.ix_(states[i], states[j])]
            rows, columns = np.nonzero(inner < FORBIDDEN)
            if not len(rows):
                return None
            pairs.append((i, j, rows, columns))
            costs.append(inner[rows, columns])
        every = np.concatenate(costs)
        unit = max(1, int(np.gcd.reduce(every)))
        sizes = np.array([len(allowed) for allowed in states])
        first = np.concatenate([[0], np.cumsum(sizes)])
        entries = 3 * (len(every) - int(first[-1])) + 2 * int(first[-1])
        if problem.usage_limit is not None:
            starts = np.unique(problem.intervals[:, 0])
            ends = np.searchsorted(starts, problem.intervals[:, 1])
            spans = ends - np.searchsorted(starts, problem.intervals[:, 0])
            entries += int((np.maximum(spans, 0) * sizes).sum())
        least = np.array([table.min() for table in costs]) / unit
        return cls(problem, states, first, tuple(pairs), every / unit, least, unit, entries)

    def rows(
        self,
    ) -> tuple[sparse.csr_array, NDArray[np.float64], NDArray[np.float64]]:
        """The matrix with the least and the largest value of each row."""
        entries: list[NDArray[np.float64]] = []  # row, variable and value of each, [3, n]

        def put(at: ArrayLike, variables: ArrayLike, values: ArrayLike) -> None:
            entries.append(np.array(np.broadcast_arrays(at, variables, values), np.float64))

        low: list[NDArray[np.float64]] = [np.ones(len(self.states))]
        high: list[NDArray[np.float64]] = [np.ones(len(self.states))]
        sizes = np.diff(self.first)
        put(np.repeat(np.arange(len(sizes)), sizes), np.arange(self.first[-1]), 1.0)
        row, variable = len(sizes), int(self.first[-1])
        for i, j, rows, columns in self.pairs:
            # What the pairs of a strategy add up to is that strategy's binary.
            chosen = np.arange(variable, variable + len(rows))
            for node, part in ((i, rows), (j, columns)):
                own = np.arange(self.first[node], self.first[node + 1])
                put(row + part, chosen, 1.0)
                put(np.arange(row, row + len(own)), own, -1.0)
                row += int(sizes[node])
                low.append(np.zeros(sizes[node]))
                high.append(np.zeros(sizes[node]))
            variable += len(rows)
        limit = self.problem.usage_limit
        if limit is not None:
            starts = np.unique(self.problem.intervals[:, 0])
            # HiGHS's tolerances suit numbers near 1.
            held = zip(self.problem.usages, self.states, strict=True)
            most = max(int(np.abs(usage[allowed]).max()) for usage, allowed in held)
            whole = float(max(1, abs(limit), most))
            for node, allowed in enumerate(self.states):
                start, end = self.problem.intervals[node].tolist()
                lives = np.searchsorted(starts, [start, max(start, end)]).tolist()
                used = self.problem.usages[node][allowed] / whole
                for time in range(*lives):
                    put(row + time, np.arange(self.first[node], self.first[node + 1]), used)
            low.append(np.full(len(starts), -np.inf))
            high.append(np.full(len(starts), limit / whole))
            row += len(starts)
        at, variables, values = np.concatenate(entries, axis=1)
        place = at.astype(np.int64), variables.astype(np.int64)
        matrix = sparse.csr_array((values, place), shape=(row, variable))
        return matrix, np.concatenate(low), np.concatenate(high)

    def bound(self, told: float | None, cost: float | None) -> int:
        """HiGHS's bound as a whole number, lowered by what its tolerances allow.

        A variable that is off by the tolerance lets a choice be cheaper by that share of what it
        pays above the least entries of all tables, and of those entries themselves.

        Args:
            told: The bound that HiGHS gives.
            cost: The cost of what it found.
        """
        if told is None or not math.isfinite(told):
            return -FORBIDDEN
        least = float(self.least.sum())
        paid = max(told if cost is None else cost, told) - least
        slack = _INTEGRAL * (2 * max(0.0, paid) + float(np.abs(self.least).sum()) + 1e-3)
        return max(-FORBIDDEN, math.ceil(told - slack) * self.unit)

    def choices(self, values: NDArray[np.float64]) -> tuple[int, ...]:
        """The strategies that the binaries choose."""
        return tuple(
            int(allowed[int(values[self.first[node] : self.first[node + 1]].argmax())])
            for node, allowed in enumerate(self.states)
        )


def _fitting(problem: Problem) -> list[NDArray[np.bool_]]:
    """Per node, which strategies keep to the usage limit if all others use nothing."""
    limit = problem.usage_limit
    fits = [np.ones(len(usage), bool) for usage in problem.usages]
    if limit is None or any(int(usage.min()) < 0 for usage in problem.usages):
        return fits
    lives = problem.intervals[:, 0] < problem.intervals[:, 1]
    for node in np.flatnonzero(lives).tolist():
        fits[node] = problem.usages[node] <= limit
    return fits


def _plus(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Two tables of costs added up; what is forbidden in either stays so."""
    forbidden = (a >= FORBIDDEN) | (b >= FORBIDDEN)
    return np.where(forbidden, FORBIDDEN, np.where(forbidden, 0, a) + np.where(forbidden, 0, b))


ILP = PairIlp()
"""The row of ``SOLVERS``."""
