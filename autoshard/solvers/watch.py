"""A solver that is watched while it runs: its timeline, its best so far, an end that is kept.

The solver runs in a thread, so that whoever waits can be interrupted while it is inside code that
is not Python's; Ctrl-C, or a deadline that the solver ignores, gives what it last reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoshard.errors import SolverError
from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers.checked import Checked
from autoshard.solvers.memory import least_usage_limit
from autoshard.solvers.solution import Progress, Solution, Solver, Status, prepare

GRACE = 0.1, 2.0
"""How far past its time a solver may run before it is left: a share of the time, and seconds."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a timeline: one of the two numbers got better.

    Attributes:
        seconds: Since the start [s].
        cost: Of the best feasible choice; None if there was none yet.
        lower_bound: Proved until then; None if nothing was.
    """

    seconds: float
    cost: int | None
    lower_bound: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """How a solver went.

    Attributes:
        solution: Its answer, recounted; or its best so far.
        timeline: Every improvement, in order; the last is the answer.
        interrupted: Why the solver did not come to its own end: ``Ctrl-C`` or ``overdue``; empty if
            it did. It may then still be running in its thread.
    """

    solution: Solution
    timeline: tuple[Moment, ...]
    interrupted: str = ""

    def first(self, within: float = float("inf")) -> Moment | None:
        """The first moment with a cost at most this fraction above the answer's; None if none."""
        most = self.solution.cost + within * abs(self.solution.cost)
        return next((m for m in self.timeline if m.cost is not None and m.cost <= most), None)


def watch(
    solver: Solver,
    problem: Problem,
    *,
    name: str,
    time_limit_s: float,
    seed: int = 0,
    hint: Sequence[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Watched:
    """Run a solver to its end, to that of its time, or to Ctrl-C.

    Args:
        solver: The solver.
        problem: What to solve.
        name: What the solver is called in errors.
        time_limit_s: Time it is given [s]; it is left to itself a tenth and 2 s after that.
        seed: See ``Solver.solve``.
        hint: See ``Solver.solve``.
        progress: Called with its signs of life, in its thread.

    Raises:
        SolverError: Its answer contradicts itself, the problem, or what it told on the way.
    """
    prepare(solver, problem)
    tape = _Tape(problem, time.perf_counter(), progress)
    if hint is not None:
        tape.start_from(tuple(hint))
    ended: list[Solution | BaseException] = []

    def run() -> None:
        try:
            ended.append(
                Checked(solver, name).solve(
                    problem, time_limit_s=time_limit_s, seed=seed, hint=hint, progress=tape.tell
                )
            )
        except BaseException as error:  # raised again where the caller is
            ended.append(error)

    thread = threading.Thread(target=run, name=f"solver {name}", daemon=True)
    latest = time_limit_s * (1 + GRACE[0]) + GRACE[1]
    interrupted = ""
    try:
        thread.start()
        while thread.is_alive() and tape.spent_s < latest:
            thread.join(_POLL_S)
        if thread.is_alive():
            interrupted = "overdue"
    except KeyboardInterrupt:
        interrupted = "Ctrl-C"
    if not interrupted or ended:
        if isinstance(ended[0], BaseException):
            raise ended[0]
        tape.close(ended[0], name)
        return Watched(ended[0], tuple(tape.moments))
    return Watched(tape.best(), tuple(tape.moments), interrupted)


@dataclass(slots=True)
class _Tape:
    problem: Problem
    start: float
    told: Callable[[Progress], None] | None
    moments: list[Moment] = field(default_factory=list)
    choices: tuple[int, ...] | None = None

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self.start

    def start_from(self, hint: tuple[int, ...]) -> None:
        found = evaluate(self.problem, hint)
        if found.feasible:
            self.choices = hint
            self._note(0.0, found.cost, None)

    def tell(self, progress: Progress) -> None:
        if progress.choices is not None:
            self.choices = progress.choices
        self._note(self.spent_s, progress.cost, progress.lower_bound)
        if self.told is not None:
            self.told(progress)

    def close(self, solution: Solution, name: str) -> None:
        last = self.moments[-1] if self.moments else Moment(0.0, None, None)
        low = last.cost is not None and last.cost < solution.cost
        high = last.lower_bound is not None and last.lower_bound > solution.cost
        if low or high:
            told = f"a cost of {last.cost:,}" if low else f"a bound of {last.lower_bound:,}"
            raise SolverError(
                f"the solver {name} told of {told} on its way, and answered with a cost of "
                f"{solution.cost:,}",
                fix="Progress.cost is that of a choice feasible in the problem given, and "
                "Progress.lower_bound holds for every such choice",
            )
        if solution.choices or solution.status is Status.OPTIMAL:
            self._note(self.spent_s, solution.cost, solution.lower_bound)

    def best(self) -> Solution:
        """What is known without an answer: the choices told last, counted here."""
        bounds = [m.lower_bound for m in self.moments if m.lower_bound is not None]
        bound, least = max(bounds, default=-FORBIDDEN), least_usage_limit(self.problem)
        if self.choices is not None:
            found = evaluate(self.problem, self.choices)
            if found.feasible:
                bound = min(bound, found.cost)
                status = Status.OPTIMAL if bound == found.cost else Status.FEASIBLE
                return Solution(
                    status, self.choices, found.cost, bound, found.peak_usage, self.spent_s, least
                )
        return Solution(Status.UNKNOWN, (), FORBIDDEN, bound, 0, self.spent_s, least)

    def _note(self, seconds: float, cost: int | None, bound: int | None) -> None:
        last = self.moments[-1] if self.moments else Moment(0.0, None, None)
        better = cost is not None and (last.cost is None or cost < last.cost)
        higher = bound is not None and (last.lower_bound is None or bound > last.lower_bound)
        if better or higher:
            self.moments.append(
                Moment(
                    seconds, cost if better else last.cost, bound if higher else last.lower_bound
                )
            )
