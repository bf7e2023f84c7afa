"""The local search: feasible when it says so, never worse than its start, the same for a seed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.problem import Problem, evaluate
from autoshard.solvers import SOLVERS
from autoshard.solvers.flat import Flat
from autoshard.solvers.local_search import LocalSearch
from autoshard.solvers.solution import Deadline
from tests.solvers.problems import dense, problems

several = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@several
@given(problem=problems(), seed=st.integers(0, 9))
def test_what_is_found_is_feasible_and_no_cheaper_than_the_best(
    problem: Problem, seed: int
) -> None:
    want = SOLVERS["brute"].solve(problem, time_limit_s=10)
    found = LocalSearch.of(problem).first(seed, Deadline.after(10))
    if found is not None:
        have = evaluate(problem, found)
        assert have.feasible
        assert have.cost >= want.cost


@several
@given(problem=problems(limited=True))
def test_it_is_never_worse_than_its_start(problem: Problem) -> None:
    best = SOLVERS["brute"].solve(problem, time_limit_s=10)
    if best.choices:
        search = LocalSearch.of(problem)
        found = search.improve(best.choices, Deadline.after(10), np.random.default_rng(0), rounds=1)
        assert found is not None
        assert evaluate(problem, found).cost == best.cost == search.cost


@pytest.mark.parametrize("limit", [None, 300, 200])
def test_the_same_seed_gives_the_same_choice(limit: int | None) -> None:
    problem = dense(np.random.default_rng(1), nodes=12, states=5, limit=limit)
    first, second = (
        LocalSearch.of(problem).improve(
            None, Deadline.after(60), np.random.default_rng(7), rounds=2
        )
        for _ in range(2)
    )
    assert first is not None
    assert first == second


def test_better_choices_are_told_as_they_are_found() -> None:
    problem = dense(np.random.default_rng(2), nodes=10, states=4, limit=250)
    told: list[int] = []
    search = LocalSearch.of(problem, lambda choices, cost: told.append(cost))
    found = search.first(0, Deadline.after(60))
    assert found is not None
    assert told == sorted(told, reverse=True)
    assert told[-1] == evaluate(problem, found).cost


@several
@given(problem=problems(limited=True), seed=st.integers(0, 99))
def test_a_flat_problem_costs_and_uses_what_the_problem_does(problem: Problem, seed: int) -> None:
    flat = Flat.of(problem)
    sizes = np.diff(flat.at)
    states = np.random.default_rng(seed).integers(0, sizes) if len(sizes) else sizes
    choices = flat.expand(states)
    have = evaluate(problem, choices)
    over = flat.usage(states) - flat.capacity
    assert problem.usage_limit is not None
    assert bool((over > 0).any()) == (have.peak_usage > problem.usage_limit)
    if have.cost < 10**18:
        assert flat.cost(states) == pytest.approx(have.cost, rel=1e-9, abs=100)
        assert np.array_equal(flat.locate(choices), states) or flat.expand(
            flat.locate(choices)
        ) == pytest.approx(choices)


def test_importing_the_product_does_not_load_the_compiler() -> None:
    code = "import autoshard, autoshard.solvers, sys; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
