"""What a solver is asked and what it answers: status, choices, cost, a proved bound."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autoshard.problem import Problem


class Status(enum.Enum):
    """Why a solver stopped; the value is the sentence a user reads."""

    OPTIMAL = "proved optimal"
    FEASIBLE = "the best found in time; the gap says how far from the best it can be at most"
    INFEASIBLE = "proved that no choice meets the memory limit and the forbidden entries"
    UNKNOWN = "no feasible choice was found in time, and none was proved impossible"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Where memory runs out, for a problem that can't be solved or was not.

    Attributes:
        time: The time point where even the least usage of each node exceeds the limit, or where
            it comes closest.
        missing: By how much the limit must be raised at least for that point [bytes]; 0 if each
            time point by itself could be met and only their combination can't.
        nodes: The nodes that hold most at that point in their least hungry strategies, the
            largest first; at most ten.
        usages: What each of them holds [bytes].
    """

    time: int
    missing: int
    nodes: tuple[int, ...]
    usages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of strategies with the proof of how good it is.

    Attributes:
        status: Why the solver stopped.
        choices: One strategy index per node; empty if no feasible choice was found.
        cost: Exact cost of ``choices``, recomputed from the problem; ``FORBIDDEN`` without choices.
        lower_bound: Proved: no feasible choice costs less than this.
        peak_usage: Largest usage over time of ``choices`` [bytes]; 0 without choices.
        seconds: Time the solver took [s].
        least_usage_limit: Proved: no usage limit below this can be met [bytes].
        shortage: Where memory runs out; None if ``choices`` are given, or if memory is not why
            they are missing.
    """

    status: Status
    choices: tuple[int, ...]
    cost: int
    lower_bound: int
    peak_usage: int
    seconds: float
    least_usage_limit: int
    shortage: Shortage | None = None

    @property
    def gap(self) -> float:
        """How far the cost can be above the best at most, as a fraction of the cost.

        0 when optimal; infinite when there are no choices, or the cost is zero or less while the
        bound is below it.
        """
        if not self.choices and self.status is not Status.OPTIMAL:
            return float("inf")
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / self.cost if self.cost > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Progress:
    """A sign of life from a running solver.

    Attributes:
        stage: What it is doing, e.g. ``eliminating``.
        seconds: Time since its start [s].
        cost: Cost of the best feasible choice so far; None if there is none.
        lower_bound: Proved lower bound so far.
        nodes_left: Nodes that are still undecided after exact reductions.
        choices: The choice of that cost, so that who stops a solver keeps its best; None if there
            is none yet, or the solver does not tell.
    """

    stage: str
    seconds: float
    cost: int | None
    lower_bound: int
    nodes_left: int
    choices: tuple[int, ...] | None = None


@runtime_checkable
class Solver(Protocol):
    """Solves problems; a row of ``SOLVERS`` or the caller's own."""

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """Choose a strategy per node.

        Args:
            problem: What to solve.
            time_limit_s: Stop after about this time [s] with the best so far.
            seed: The same seed gives the same answer as long as time does not run out.
            hint: A choice to start from; need not be feasible.
            progress: Called with signs of life.

        Returns:
            The solution, with a proved bound.
        """
        ...


def prepare(solver: Solver, problem: Problem) -> None:
    """Let a solver do what is no part of solving, such as compiling, before a clock runs.

    That is its method ``prepare(problem)``, if it has one.
    """
    ready = getattr(solver, "prepare", None)
    if ready is not None:
        ready(problem)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time to stop at.

    Attributes:
        start: Value of ``time.perf_counter`` at the start [s].
        limit_s: Allowed time from there on [s].
    """

    start: float
    limit_s: float

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """A deadline so many seconds from now."""
        return cls(time.perf_counter(), limit_s)

    @property
    def spent_s(self) -> float:
        """Time since the start [s]."""
        return time.perf_counter() - self.start

    @property
    def left_s(self) -> float:
        """Time until the deadline [s]; negative once it has passed."""
        return self.limit_s - self.spent_s

    def put_off(self, seconds: float) -> Deadline:
        """The same so much later [s]."""
        return Deadline(self.start + seconds, self.limit_s)

    def share(self, fraction: float) -> Deadline:
        """A deadline from now on with a fraction of the time left."""
        return Deadline.after(max(0.0, self.left_s) * fraction)
