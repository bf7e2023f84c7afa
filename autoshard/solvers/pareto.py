"""The front of cost against peak memory, and what a byte is worth on it.

Each point is the answer to one usage limit. Limits are placed where the front is known least: in
the widest rectangle, cost times memory, between two neighbours. A solve starts from the neighbour
that needs less memory, which fits; so the cost never falls as the limit does, and a bound proved
for one limit holds for every smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from autoshard.problem import FORBIDDEN, Problem
from autoshard.solvers import SOLVERS
from autoshard.solvers.checked import Checked
from autoshard.solvers.memory import least_usage_limit
from autoshard.solvers.solution import Deadline, Progress, Solution, Solver, Status

GIB = 1 << 30
"""Bytes of a GiB."""


@dataclass(frozen=True, slots=True)
class Point:
    """The cheapest choice known that keeps to a limit.

    Attributes:
        limit: The largest usage limit that it is known to be the answer for [bytes]; None: it is
            the answer without any.
        peak_usage: What it uses at most [bytes].
        cost: What it costs.
        lower_bound: Proved: nothing that uses at most ``peak_usage`` costs less.
        status: ``OPTIMAL`` if the two are equal.
        choices: The choice.
        cost_per_gib: The shadow price of memory: what one GiB less costs from here to the next
            leaner point [cost per GiB]; None at the leanest.
        seconds: Time that the solver took for it [s].
    """

    limit: int | None
    peak_usage: int
    cost: int
    lower_bound: int
    status: Status
    choices: tuple[int, ...]
    cost_per_gib: float | None
    seconds: float

    @property
    def gap(self) -> float:
        """How far the cost can be above the best at most, as a fraction of the cost."""
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / self.cost if self.cost > 0 else float("inf")


def front(
    problem: Problem,
    *,
    points: int = 8,
    time_limit_s: float = 60.0,
    solver: Solver | None = None,
    seed: int = 0,
    progress: Callable[[str, Progress], None] | None = None,
) -> tuple[Point, ...]:
    """Cost against peak memory, from the cheapest choice to the leanest that was found.

    Args:
        problem: The problem; its own usage limit is not used.
        points: How many limits to solve for at most; equal answers become one point.
        time_limit_s: Time for all of them together [s]; each gets an equal part of what is left.
        solver: Who solves; None: the default.
        seed: As for the solver.
        progress: Called with what is being solved and the solver's signs of life.

    Returns:
        Points with falling peak and rising cost; empty if nothing feasible was found at all.
    """
    found = _Front(problem, points, Deadline.after(time_limit_s), _given(solver), seed, progress)
    return found.run()


def _given(solver: Solver | None) -> Checked:
    if solver is None:
        return Checked(SOLVERS["exact"], "exact")
    return Checked(solver, type(solver).__name__)


@dataclass(slots=True)
class _Front:
    problem: Problem
    left: int
    deadline: Deadline
    solver: Checked
    seed: int
    tell: Callable[[str, Progress], None] | None

    def run(self) -> tuple[Point, ...]:
        cheapest = self._solve(None, None)
        if not cheapest.choices and self.problem.costs:
            return ()
        rows = [_point(None, cheapest)]
        floor = least_usage_limit(self.problem)  # no limit below it can be met
        while self.left > 0 and self.deadline.left_s > 0:
            limit, position = self._widest(rows, floor)
            if limit is None:
                break
            leaner = rows[position + 1] if position + 1 < len(rows) else None
            hint = (leaner or rows[position]).choices
            answer = self._solve(limit, hint)
            if not answer.choices:
                floor = limit + 1
                continue
            made = _point(limit, answer)
            if leaner is not None and made.cost >= leaner.cost:
                # The leaner point is as good up to this limit.
                bound = max(leaner.lower_bound, min(answer.lower_bound, leaner.cost))
                rows[position + 1] = replace(leaner, limit=limit, lower_bound=bound)
            else:
                rows.insert(position + 1, made)
            rows = _monotone(rows)
        return _priced(_monotone(rows))

    def _widest(self, rows: list[Point], floor: int) -> tuple[int | None, int]:
        """The next limit, and the position of the point that it lies just below."""
        spans = []
        for position, (rich, lean) in enumerate(pairwise(rows)):
            low = lean.peak_usage if lean.limit is None else lean.limit
            if rich.peak_usage - 1 > low:
                area = float(rich.peak_usage - low) * (lean.cost - rich.cost)
                spans.append((area, (low + rich.peak_usage) // 2, position))
        last = rows[-1]
        if last.peak_usage > floor:
            if len(rows) == 1:  # the leanest first: all others lie between
                return floor, 0
            # How dear it gets below is not known: as if it went on at the last price.
            before = rows[-2]
            price = (last.cost - before.cost) / max(1, before.peak_usage - last.peak_usage)
            below = last.peak_usage - floor
            spans.append((price * below * below, (floor + last.peak_usage) // 2, len(rows) - 1))
        if not spans:
            return None, 0
        _, limit, position = max(spans)
        return limit, position

    def _solve(self, limit: int | None, hint: tuple[int, ...] | None) -> Solution:
        share = self.deadline.left_s / self.left
        self.left -= 1
        what = "without a limit" if limit is None else f"with {limit / GIB:.3g} GiB"
        tell = self.tell
        return self.solver.solve(
            replace(self.problem, usage_limit=limit),
            time_limit_s=share,
            seed=self.seed,
            hint=hint,
            progress=None if tell is None else (lambda sign: tell(what, sign)),
        )


def _point(limit: int | None, s: Solution) -> Point:
    bound = max(s.lower_bound, -FORBIDDEN)
    return Point(limit, s.peak_usage, s.cost, bound, s.status, s.choices, None, s.seconds)


def _monotone(rows: list[Point]) -> list[Point]:
    """Points that no leaner one matches in cost, with the bounds of roomier ones taken over."""
    kept: list[Point] = []
    for row in reversed(rows):  # leanest first
        if kept and row.cost >= kept[-1].cost:
            limit, bound = row.limit, min(row.lower_bound, kept[-1].cost)
            last = kept[-1]
            kept[-1] = replace(last, limit=limit, lower_bound=max(last.lower_bound, bound))
        elif kept and row.peak_usage <= kept[-1].peak_usage:
            kept[-1] = row
        else:
            kept.append(row)
    kept.reverse()
    best = -FORBIDDEN
    for position, row in enumerate(kept):
        best = max(best, row.lower_bound)
        status = Status.OPTIMAL if best >= row.cost else Status.FEASIBLE
        kept[position] = replace(row, lower_bound=min(best, row.cost), status=status)
    return kept


def _priced(rows: list[Point]) -> tuple[Point, ...]:
    priced = []
    for rich, lean in pairwise(rows):
        per_byte = (lean.cost - rich.cost) / (rich.peak_usage - lean.peak_usage)
        priced.append(replace(rich, cost_per_gib=per_byte * GIB))
    return (*priced, *rows[-1:])
