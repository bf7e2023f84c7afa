"""A few hundred of the random problems that ``python -m tests.solvers.fuzz`` tries by thousands."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.problem import Problem
from autoshard.solvers import SOLVERS
from tests.solvers.fuzz import best_cost, holds
from tests.solvers.problems import problems, structured


@pytest.mark.parametrize("name", ["exact", "local"])
@settings(
    max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(problem=st.one_of(problems(), structured()))
def test_every_answer_and_every_moment_before_it_is_true(name: str, problem: Problem) -> None:
    holds(problem, SOLVERS[name], name, complete=name == "exact")


@settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(problem=problems(most_nodes=4))
def test_the_oracle_is_brute_force(problem: Problem) -> None:
    answer = SOLVERS["brute"].solve(problem, time_limit_s=10)
    want = best_cost(problem)
    assert (answer.cost if answer.choices else None) == want
