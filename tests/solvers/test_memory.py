"""What memory is needed at least."""

from __future__ import annotations

from hypothesis import given, settings

from autoshard.problem import FORBIDDEN, Problem
from autoshard.solvers.memory import least_usages
from tests.solvers.problems import problems


@settings(deadline=None, max_examples=50)
@given(problems())
def test_the_least_usage_is_that_of_the_leanest_strategy_that_is_allowed(problem: Problem) -> None:
    want = []
    for cost, usage in zip(problem.costs, problem.usages, strict=True):
        allowed = [int(u) for c, u in zip(cost, usage, strict=True) if c < FORBIDDEN]
        want.append(min(allowed) if allowed else int(usage.min()))
    assert least_usages(problem).tolist() == want
