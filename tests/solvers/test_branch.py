"""Cases of what nodes hold: nothing cheaper is missed, and no bound is too high."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers.branch import Cases, Target
from autoshard.solvers.cpsat import excess, paid
from autoshard.solvers.dual import Dual
from autoshard.solvers.network import Network
from autoshard.solvers.polytope import Polytope
from autoshard.solvers.reduce import reduce
from autoshard.solvers.rows import Timeline, compact
from autoshard.solvers.solution import Deadline
from tests.solvers.problems import problems


def best_cost(problem: Problem) -> int:
    return min(
        found.cost
        for choices in itertools.product(*(range(len(cost)) for cost in problem.costs))
        if (found := evaluate(problem, choices)).feasible or found.cost == FORBIDDEN
    )


def limited_network(problem: Problem) -> Network:
    net = Network.of(problem)
    timeline = Timeline.of(problem)
    timeline.give(net, range(len(timeline.capacity)))
    reduce(net, Deadline.after(30))
    compact(net)
    return net


def told_apart(net: Network, start: int) -> tuple[bool, int, list[int]]:
    """Whether cases finished, the best cost from ``start`` on, and the bounds before it fell."""
    cost, bounds = [start], []

    def offer(part: Network, states: dict[int, int]) -> bool:
        if not (excess(part, states) > 0).any():
            cost[0] = min(cost[0], part.offset + paid(part, states))
        return True

    def bound(value: int) -> None:
        bounds.append(min(value, cost[0]))

    target = Target(lambda: cost[0], offer, bound, Deadline.after(60))
    return Cases(net, Dual.of(net), target, 0).run(), cost[0], bounds


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(problem=problems(limited=True), above=st.sampled_from([0, 1, 10, 10**6]))
def test_cases_find_the_best_choice_if_it_is_cheaper(problem: Problem, above: int) -> None:
    net = limited_network(problem)
    if net.impossible or not net.costs:
        return
    want = best_cost(problem)
    start = (net.offset if want == FORBIDDEN else want) + above
    finished, found, bounds = told_apart(net, start)
    assert finished
    assert found == min(want, start)
    assert all(value <= found for value in bounds)


def alike(seed: int) -> Problem:
    """Nodes that want to be in the same state on a dense graph; few fit in the cheapest."""
    rng = np.random.default_rng(seed)
    count, states = 8, 3
    pairs = [(i, j) for i in range(count) for j in range(i) if rng.random() < 0.6]
    return Problem(
        costs=tuple(np.array([60, 40, 0]) + rng.integers(0, 9, states) for _ in range(count)),
        usages=tuple(np.array([0, 7, 31]) for _ in range(count)),
        intervals=np.array([[0, 2]] * count),
        edges=np.array(pairs),
        edge_costs=tuple(
            rng.integers(20, 40, (states, states)) * (1 - np.eye(states, dtype=np.int64))
            for _ in pairs
        ),
        usage_limit=38,
    )


@pytest.mark.parametrize("seed", range(3))
def test_cases_close_a_gap_that_prices_leave_open(seed: int) -> None:
    problem = alike(seed)
    net = limited_network(problem)
    relaxed = Polytope(net).relax(Deadline.after(60))
    want = best_cost(problem)
    assert relaxed is not None
    assert relaxed.value < 0.95 * want
    before = {node: cost.copy() for node, cost in net.costs.items()}
    for start in (want, want + 1, 2 * want):
        finished, found, bounds = told_apart(net, start)
        assert finished
        assert found == want
        assert all(value <= want for value in bounds)
    assert all((net.costs[node] == cost).all() for node, cost in before.items())


def test_out_of_time_nothing_is_claimed() -> None:
    problem = alike(0)
    net = limited_network(problem)
    want = best_cost(problem)
    said: list[int] = []
    target = Target(lambda: want + 1, lambda part, states: True, said.append, Deadline.after(0.0))
    assert not Cases(net, Dual.of(net), target, 0).run()
    assert all(bound <= want for bound in said)
