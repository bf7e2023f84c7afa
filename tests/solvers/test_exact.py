"""The solvers against brute force, and what an answer promises."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InputError, UnknownNameError
from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS, Progress, Solver, Status
from autoshard.solvers.exact import ExactSolver
from autoshard.solvers.local_search import LocalSearch
from autoshard.solvers.solution import Deadline
from tests.solvers.problems import dense, problems

many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@many
@given(problem=problems())
def test_exact_equals_brute_force(problem: Problem) -> None:
    want = SOLVERS["brute"].solve(problem, time_limit_s=10)
    got = SOLVERS["exact"].solve(problem, time_limit_s=30)
    assert got.status is want.status
    assert got.cost == want.cost == got.lower_bound
    assert got.least_usage_limit == want.least_usage_limit
    if got.choices:
        found = evaluate(problem, got.choices)
        assert found.feasible
        assert (found.cost, found.peak_usage) == (got.cost, got.peak_usage)


@many
@given(problem=problems(limited=True), seed=st.integers(0, 9))
def test_local_never_claims_more_than_is_true(problem: Problem, seed: int) -> None:
    want = SOLVERS["brute"].solve(problem, time_limit_s=10)
    got = SOLVERS["local"].solve(problem, time_limit_s=0.5, seed=seed)
    assert got.lower_bound <= want.cost <= got.cost
    if got.status is Status.OPTIMAL:
        assert got.cost == want.cost
    if got.status is Status.INFEASIBLE:
        assert want.status is Status.INFEASIBLE
    if got.choices:
        assert evaluate(problem, got.choices).feasible


@pytest.mark.parametrize("limit", [None, 90, 60])
@pytest.mark.parametrize("seed", range(3))
def test_exact_equals_brute_force_on_complete_graphs(seed: int, limit: int | None) -> None:
    problem = dense(np.random.default_rng(seed), nodes=6, states=4, limit=limit)
    want = SOLVERS["brute"].solve(problem, time_limit_s=10)
    got = SOLVERS["exact"].solve(problem, time_limit_s=30)
    assert (got.status, got.cost) == (want.status, want.cost)


@many
@given(problem=problems(limited=True))
def test_infeasible_exactly_when_no_choice_is_feasible(problem: Problem) -> None:
    sizes = [range(len(cost)) for cost in problem.costs]
    possible = any(evaluate(problem, c).feasible for c in itertools.product(*sizes))
    got = SOLVERS["exact"].solve(problem, time_limit_s=30)
    assert (got.status is Status.INFEASIBLE) == (not possible)
    free = SOLVERS["brute"].solve(replace(problem, usage_limit=None), time_limit_s=10)
    if got.status is Status.INFEASIBLE:
        assert (got.shortage is None) == (free.status is Status.INFEASIBLE)
        assert got.gap == float("inf")


@many
@given(problem=problems(limited=True))
def test_no_limit_below_the_least_can_be_met(problem: Problem) -> None:
    got = SOLVERS["exact"].solve(problem, time_limit_s=30)
    below = replace(problem, usage_limit=got.least_usage_limit - 1)
    answer = SOLVERS["brute"].solve(below, time_limit_s=10)
    assert answer.status is Status.INFEASIBLE


def chain(limit: int | None) -> Problem:
    """Two nodes that live together; being cheap takes 10 bytes each, being dear 4 and 5."""
    return Problem(
        costs=(np.array([1, 5]), np.array([2, 9])),
        usages=(np.array([10, 4]), np.array([10, 5])),
        intervals=np.array([[0, 3], [2, 4]]),
        edges=np.zeros((0, 2), np.int64),
        edge_costs=(),
        usage_limit=limit,
        names=("weights", "activations"),
    )


@pytest.mark.parametrize(
    ("limit", "choices", "cost"),
    [(None, (0, 0), 3), (20, (0, 0), 3), (19, (1, 0), 7), (14, (1, 0), 7), (9, (1, 1), 14)],
)
def test_memory_is_met_at_the_least_cost(
    limit: int | None, choices: tuple[int, ...], cost: int
) -> None:
    got = SOLVERS["exact"].solve(chain(limit), time_limit_s=10)
    assert (got.status, got.choices, got.cost) == (Status.OPTIMAL, choices, cost)
    assert got.gap == 0


def test_a_shortage_says_when_how_much_and_who() -> None:
    got = SOLVERS["exact"].solve(chain(6), time_limit_s=10)
    assert got.status is Status.INFEASIBLE
    assert got.least_usage_limit == 9
    assert got.shortage is not None
    assert (got.shortage.time, got.shortage.missing) == (2, 3)
    assert (got.shortage.nodes, got.shortage.usages) == ((1, 0), (5, 4))


def test_a_limit_that_only_combinations_break_is_proved_infeasible() -> None:
    """Each point could be met alone: the tie between the nodes makes it impossible."""
    tie = np.array([[FORBIDDEN, 0], [0, FORBIDDEN]])
    problem = replace(
        chain(10),
        usages=(np.array([10, 1]), np.array([10, 1])),
        edges=np.array([[0, 1]]),
        edge_costs=(tie,),
    )
    got = SOLVERS["exact"].solve(problem, time_limit_s=10)
    assert got.status is Status.INFEASIBLE
    assert got.least_usage_limit == 2
    assert got.shortage is not None
    assert got.shortage.missing == 0


def test_the_same_seed_gives_the_same_choices() -> None:
    problem = dense(np.random.default_rng(5), nodes=9, states=5, limit=120)
    first, second = (SOLVERS["exact"].solve(problem, time_limit_s=60, seed=3) for _ in range(2))
    assert first.choices == second.choices
    assert first.status is Status.OPTIMAL


def test_out_of_time_is_said_and_bounded() -> None:
    problem = dense(np.random.default_rng(1), nodes=60, states=12)
    start = time.process_time()  # other programs on the machine take none of it
    got = SOLVERS["exact"].solve(problem, time_limit_s=1.0)
    assert time.process_time() - start < 5
    assert got.status is Status.FEASIBLE
    assert 0 < got.gap < 1
    assert 0 < got.lower_bound < got.cost
    none = SOLVERS["exact"].solve(problem, time_limit_s=0.0)
    assert none.status is Status.UNKNOWN
    assert none.choices == ()
    assert none.lower_bound <= got.cost


def test_a_hint_is_never_made_worse() -> None:
    problem = dense(np.random.default_rng(2), nodes=60, states=12)
    hint = (3,) * 60
    got = SOLVERS["exact"].solve(problem, time_limit_s=0.0, hint=hint)
    assert (got.status, got.choices) == (Status.FEASIBLE, hint)


def test_a_gap_that_is_close_enough_ends_the_search() -> None:
    problem = dense(np.random.default_rng(2), nodes=60, states=12)
    got = ExactSolver(stop_at_gap=0.9).solve(problem, time_limit_s=60)
    assert got.status is Status.FEASIBLE
    assert 0 < got.gap <= 0.9
    assert got.seconds < 30


def test_progress_reports_a_bound_below_the_cost() -> None:
    seen: list[Progress] = []
    problem = dense(np.random.default_rng(3), nodes=9, states=5, limit=150)
    got = SOLVERS["exact"].solve(problem, time_limit_s=30, progress=seen.append)
    assert seen
    assert all(p.cost is None or p.lower_bound <= p.cost for p in seen)
    assert all(p.lower_bound <= got.cost for p in seen)


def test_brute_force_refuses_what_it_cannot_finish() -> None:
    problem = dense(np.random.default_rng(0), nodes=30, states=5)
    with pytest.raises(InputError, match="exact"):
        SOLVERS["brute"].solve(problem, time_limit_s=1)


def test_costs_too_large_to_add_up_are_refused() -> None:
    problem = replace(chain(None), costs=(np.array([0, 9 * 10**17]), np.array([0, 9 * 10**17])))
    with pytest.raises(InputError, match="larger unit"):
        SOLVERS["exact"].solve(problem, time_limit_s=1)


def test_every_row_is_a_solver_and_others_are_refused() -> None:
    for name in SOLVERS:
        assert isinstance(SOLVERS[name], Solver)
    with pytest.raises(UnknownNameError, match="did you mean 'exact'"):
        SOLVERS["exat"]


@pytest.mark.slow
def test_a_clique_ends_no_higher_than_a_short_local_search() -> None:
    problem = dense(np.random.default_rng(0), nodes=12, states=30)
    local = LocalSearch.of(problem).first(0, Deadline.after(60.0))
    assert local is not None
    found = SOLVERS["exact"].solve(problem, time_limit_s=8.0)
    assert found.cost <= evaluate(problem, local).cost
