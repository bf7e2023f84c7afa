"""Old solutions start new problems: another limit, a pin, other strategies, other nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.problem import FORBIDDEN, evaluate
from autoshard.solvers import SOLVERS, Status
from autoshard.solvers.hints import adapted
from tests.solvers.problems import dense

PROBLEM = dense(np.random.default_rng(4), nodes=8, states=4)
BEST = SOLVERS["exact"].solve(PROBLEM, time_limit_s=30)


@pytest.mark.parametrize("name", ["exact", "local", "ilp"])
def test_a_solution_starts_the_problem_under_another_limit(name: str) -> None:
    tight = replace(PROBLEM, usage_limit=BEST.peak_usage - 1)
    want = SOLVERS["exact"].solve(tight, time_limit_s=30)
    got = SOLVERS[name].solve(tight, time_limit_s=5, hint=BEST.choices)  # no longer feasible
    assert want.cost <= got.cost
    back = SOLVERS[name].solve(PROBLEM, time_limit_s=5, hint=want.choices)
    assert back.cost <= want.cost


def test_a_solution_starts_the_problem_with_a_pin() -> None:
    costs = list(PROBLEM.costs)
    pinned = np.arange(4) != BEST.choices[0]
    costs[0] = np.where(pinned, costs[0], FORBIDDEN)
    changed = replace(PROBLEM, costs=tuple(costs))
    got = SOLVERS["exact"].solve(changed, time_limit_s=30, hint=BEST.choices)
    assert got.status is Status.OPTIMAL
    assert got.choices[0] != BEST.choices[0]
    assert got.cost >= BEST.cost


def test_a_feasible_hint_is_kept_when_there_is_no_time() -> None:
    got = SOLVERS["exact"].solve(PROBLEM, time_limit_s=0.0, hint=BEST.choices)
    assert (got.cost, got.choices) == (BEST.cost, BEST.choices)


def test_strategies_that_are_gone_are_replaced_by_what_fits_best() -> None:
    wild = list(BEST.choices)
    wild[3] = 99
    assert adapted(PROBLEM, BEST.choices) == BEST.choices
    found = adapted(PROBLEM, wild)
    costs = [evaluate(PROBLEM, (*BEST.choices[:3], s, *BEST.choices[4:])).cost for s in range(4)]
    assert found[3] == int(np.argmin(costs))
    assert found[:3] + found[4:] == BEST.choices[:3] + BEST.choices[4:]


def test_nodes_are_matched_by_name_in_order() -> None:
    names = ("a", "b", "b", "c", "d", "e", "f", "g")
    named = replace(PROBLEM, names=names)
    found = adapted(named, (1, 2, 3, 1), ("b", "x", "a", "b"))
    assert (found[0], found[1], found[2]) == (3, 1, 1)
    with pytest.raises(InputError, match="one name per choice"):
        adapted(named, (1, 2), ("b",))


def test_nodes_that_cannot_be_matched_are_refused() -> None:
    with pytest.raises(InputError, match="7 choices for 8 nodes"):
        adapted(PROBLEM, BEST.choices[1:])
