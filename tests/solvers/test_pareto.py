"""The front of cost against memory: true, monotone, and its prices add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.problem import Problem, evaluate
from autoshard.solvers import Status
from autoshard.solvers.pareto import GIB, front
from tests.solvers.problems import dense, problems


def whole_front(problem: Problem) -> list[tuple[int, int]]:
    """Every (peak, cost) that no other choice matches in both, cheapest first."""
    free = replace(problem, usage_limit=None)
    every = [evaluate(free, c) for c in itertools.product(*[range(len(c)) for c in free.costs])]
    best: list[tuple[int, int]] = []
    for peak, cost in sorted({(e.peak_usage, e.cost) for e in every if e.feasible}):
        if not best or cost < best[-1][1]:
            best.append((peak, cost))
    return best[::-1]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(most_nodes=4, most_states=3))
def test_with_points_enough_the_front_is_the_whole_one(problem: Problem) -> None:
    found = front(problem, points=100, time_limit_s=60)
    assert [(p.peak_usage, p.cost) for p in found] == whole_front(problem)
    assert all(p.status is Status.OPTIMAL for p in found)


@pytest.mark.parametrize("seed", range(3))
def test_few_points_lie_on_the_front_and_are_priced(seed: int) -> None:
    problem = dense(
        np.random.default_rng(seed), nodes=6, states=4, limit=3
    )  # its limit is left out
    found, whole = front(problem, points=4, time_limit_s=60), whole_front(problem)
    assert 2 <= len(found) <= 4
    assert {(p.peak_usage, p.cost) for p in found} <= set(whole)
    assert (found[0].peak_usage, found[0].cost) == whole[0]
    for rich, lean in itertools.pairwise(found):
        assert rich.peak_usage > lean.peak_usage
        assert rich.cost < lean.cost
        assert rich.cost_per_gib is not None
        spared = (rich.peak_usage - lean.peak_usage) / GIB
        assert rich.cost_per_gib * spared == pytest.approx(lean.cost - rich.cost)
    assert found[-1].cost_per_gib is None
    for point in found:
        counted = evaluate(problem, point.choices)
        assert (counted.cost, counted.peak_usage) == (point.cost, point.peak_usage)


def test_without_time_the_front_is_still_true() -> None:
    problem = dense(np.random.default_rng(7), nodes=30, states=8)
    found = front(problem, points=3, time_limit_s=1.5)
    for rich, lean in itertools.pairwise(found):
        assert rich.cost < lean.cost
        assert rich.lower_bound <= lean.lower_bound
    assert all(p.lower_bound <= p.cost for p in found)


def test_what_cannot_be_met_at_all_has_no_front() -> None:
    problem = dense(np.random.default_rng(0), nodes=3, states=2)
    never = tuple(np.full(2, 10**18) for _ in range(3))
    assert front(replace(problem, costs=never), time_limit_s=5) == ()
