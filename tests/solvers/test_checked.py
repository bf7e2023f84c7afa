"""A solver that lies is refused; one that is watched tells its timeline and can be stopped."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS, Progress, Solution, Solver, Status
from autoshard.solvers.checked import Checked
from autoshard.solvers.watch import watch
from tests.solvers.problems import dense

PROBLEM = Problem(
    costs=(np.array([1, 5]), np.array([2, 9])),
    usages=(np.array([10, 4]), np.array([10, 5])),
    intervals=np.array([[0, 3], [2, 4]]),
    edges=np.array([[0, 1]]),
    edge_costs=(np.array([[0, 0], [0, FORBIDDEN]]),),
    usage_limit=15,
)
"""The best choice is (1, 0): cost 7, peak 14."""

TRUE = Solution(Status.OPTIMAL, (1, 0), 7, 7, 14, 0.0, 9)


@dataclass(frozen=True)
class Says:
    """A solver with one answer, and signs of life before it."""

    answer: Any
    signs: tuple[Progress, ...] = ()

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        for sign in self.signs if progress else ():
            assert progress is not None
            progress(sign)
        answer: Solution = self.answer
        return answer


def asked(answer: Any, hint: tuple[int, ...] | None = None) -> Solution:
    return Checked(Says(answer), "mine").solve(PROBLEM, time_limit_s=1.0, hint=hint)


def test_what_is_true_is_passed_on() -> None:
    assert isinstance(Checked(Says(TRUE), "mine"), Solver)
    assert asked(TRUE) == TRUE


def test_cost_and_peak_are_counted_anew() -> None:
    assert asked(replace(TRUE, cost=1, peak_usage=3)) == TRUE


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "answered with a NoneType"),
        (replace(TRUE, choices=()), "OPTIMAL without choices"),
        (replace(TRUE, choices=(1,)), "chose strategies that the problem does not have"),
        (replace(TRUE, choices=(1, 2)), "chose strategies that the problem does not have"),
        (replace(TRUE, choices=(1, 1)), "a forbidden entry"),
        (replace(TRUE, choices=(0, 0)), "uses 20 bytes at 2"),
        (replace(TRUE, lower_bound=8), "nothing costs less than 8, but its own choice costs 7"),
        (replace(TRUE, lower_bound=6), "says OPTIMAL, but"),
        (replace(TRUE, status=Status.INFEASIBLE), "INFEASIBLE but gave choices"),
        (replace(TRUE, status=Status.UNKNOWN), "UNKNOWN but gave choices"),
    ],
)
def test_a_lie_is_refused(answer: Any, complaint: str) -> None:
    with pytest.raises(SolverError, match=f"the solver mine .*{complaint}") as caught:
        asked(answer)
    assert caught.value.fix


def test_a_hint_convicts_a_false_bound() -> None:
    none = Solution(Status.UNKNOWN, (), FORBIDDEN, 3, 0, 0.0, 9)
    kept = asked(none, hint=(1, 0))
    assert (kept.status, kept.choices, kept.cost) == (Status.FEASIBLE, (1, 0), 7)
    with pytest.raises(SolverError, match="the hint it was given costs 7"):
        asked(replace(none, lower_bound=9), hint=(1, 0))
    with pytest.raises(SolverError, match="the hint it was given is"):
        asked(replace(none, status=Status.INFEASIBLE), hint=(1, 0))


def test_a_bound_that_meets_the_cost_makes_it_optimal() -> None:
    assert asked(replace(TRUE, status=Status.FEASIBLE)).status is Status.OPTIMAL


def test_a_timeline_holds_every_improvement_and_ends_in_the_answer() -> None:
    signs = (
        Progress("a", 0.1, None, 2, 2),
        Progress("b", 0.2, 11, 2, 2),
        Progress("c", 0.3, 11, 2, 2),
        Progress("d", 0.4, 7, 5, 2, (1, 0)),
    )
    went = watch(Says(TRUE, signs), PROBLEM, name="mine", time_limit_s=9)
    assert [(m.cost, m.lower_bound) for m in went.timeline] == [(None, 2), (11, 2), (7, 5), (7, 7)]
    assert (went.solution, went.interrupted) == (TRUE, "")
    first = went.first()
    assert first is not None
    assert first.cost == 11


@pytest.mark.parametrize(
    ("sign", "complaint"),
    [
        (Progress("a", 0.1, 6, 2, 2), "told of a cost of 6 .* answered with a cost of 7"),
        (Progress("a", 0.1, None, 8, 2), "told of a bound of 8"),
    ],
)
def test_a_lie_on_the_way_is_refused(sign: Progress, complaint: str) -> None:
    with pytest.raises(SolverError, match=complaint):
        watch(Says(TRUE, (sign,)), PROBLEM, name="mine", time_limit_s=9)


class Stubborn:
    """Tells of one choice, then never ends until it is released."""

    def __init__(self) -> None:
        self.released, self.told = threading.Event(), threading.Event()

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        assert progress is not None
        progress(Progress("a", 0.0, 7, 3, 2, (1, 0)))
        self.told.set()
        self.released.wait()
        return TRUE


def test_a_solver_that_does_not_end_is_left_with_its_best_so_far() -> None:
    solver, start = Stubborn(), time.perf_counter()
    went = watch(solver, PROBLEM, name="stubborn", time_limit_s=0.01)
    assert went.interrupted == "overdue"
    assert time.perf_counter() - start > 2.0  # its grace
    assert (went.solution.status, went.solution.choices) == (Status.FEASIBLE, (1, 0))
    assert (went.solution.cost, went.solution.lower_bound) == (7, 3)
    solver.released.set()


def test_an_interrupt_gives_the_best_so_far() -> None:
    solver = Stubborn()

    def interrupt() -> None:
        solver.told.wait()
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    went = watch(solver, PROBLEM, name="stubborn", time_limit_s=60)
    assert went.interrupted == "Ctrl-C"
    assert went.solution.choices == (1, 0)
    solver.released.set()


def test_what_a_solver_raises_is_raised_where_it_was_asked() -> None:
    problem = dense(np.random.default_rng(0), nodes=30, states=5)
    with pytest.raises(ValueError, match="combinations"):
        watch(SOLVERS["brute"], problem, name="brute", time_limit_s=1)


def test_signs_of_life_of_the_default_solver_carry_choices() -> None:
    problem = dense(np.random.default_rng(1), nodes=60, states=12)
    seen: list[Progress] = []
    watch(SOLVERS["exact"], problem, name="exact", time_limit_s=0.7, progress=seen.append)
    told = [sign for sign in seen if sign.choices is not None]
    assert told
    assert all(evaluate(problem, s.choices or ()).cost == s.cost for s in told)
