"""The naive integer program: right where it ends, honest where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.problem import Problem
from autoshard.solvers import SOLVERS, Status
from autoshard.solvers.ilp import PairIlp
from tests.solvers.fuzz import holds
from tests.solvers.problems import dense, problems


@settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(problem=problems())
def test_it_equals_the_table_of_all_choices(problem: Problem) -> None:
    holds(problem, SOLVERS["ilp"], "ilp", complete=True)


@pytest.mark.parametrize("limit", [None, 120])
def test_its_bound_is_true_when_time_runs_out(limit: int | None) -> None:
    problem = dense(np.random.default_rng(1), nodes=9, states=5, limit=limit)
    best = SOLVERS["exact"].solve(problem, time_limit_s=60)
    got = SOLVERS["ilp"].solve(problem, time_limit_s=0.3)
    assert got.lower_bound <= best.cost <= got.cost


def test_what_is_too_large_is_not_built() -> None:
    problem = dense(np.random.default_rng(1), nodes=9, states=5)
    got = PairIlp(most_entries=100).solve(problem, time_limit_s=5)
    assert (got.status, got.choices) == (Status.UNKNOWN, ())
