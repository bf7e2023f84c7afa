"""The solver's parts against slow, obvious ways to say the same."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers.cpsat import excess, paid, solve_network
from autoshard.solvers.dual import Dual
from autoshard.solvers.eliminate import Elimination, plan_elimination
from autoshard.solvers.network import INF, Network
from autoshard.solvers.polytope import Polytope
from autoshard.solvers.reduce import min_plus, reduce
from autoshard.solvers.rows import Timeline
from autoshard.solvers.solution import Deadline
from autoshard.solvers.walk import Walk, ball
from tests.solvers.problems import dense, problems

some = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def best_cost(problem: Problem) -> int:
    sizes = [range(len(cost)) for cost in problem.costs]
    return min(
        found.cost
        for choices in itertools.product(*sizes)
        if (found := evaluate(problem, choices)).feasible or found.cost == FORBIDDEN
    )


def limited_network(problem: Problem) -> Network:
    net = Network.of(problem)
    timeline = Timeline.of(problem)
    timeline.give(net, range(len(timeline.capacity)))
    return net


@some
@given(problem=problems(limited=False))
def test_reductions_keep_the_best_cost_and_lead_back_to_it(problem: Problem) -> None:
    net = Network.of(problem)
    reduce(net, Deadline.after(30))
    want = best_cost(problem)
    if net.impossible:
        assert want == FORBIDDEN
        return
    sizes = {node: range(net.size(node)) for node in net.costs}
    states = min(
        (dict(zip(sizes, c, strict=True)) for c in itertools.product(*sizes.values())),
        key=lambda s: paid(net, s),
    )
    full = net.complete(states)
    if want < FORBIDDEN:
        assert net.offset + paid(net, states) == want
        assert evaluate(problem, [full[n] for n in range(len(full))]).cost == want
    else:
        assert paid(net, states) >= INF


@some
@given(problem=problems(limited=False))
def test_elimination_finds_the_best_cost_without_any_reduction(problem: Problem) -> None:
    net = Network.of(problem)
    buckets = plan_elimination(net)
    assert buckets is not None
    ran = Elimination.run(net, buckets, Deadline.after(30))
    assert ran is not None
    value, run = ran
    want = best_cost(problem)
    if want == FORBIDDEN:
        assert value >= INF
    else:
        assert value == paid(net, run.best()) == want - net.offset


@some
@given(problem=problems(limited=True), prices=st.lists(st.integers(0, 5000), max_size=4))
def test_a_bound_holds_at_any_prices_and_for_every_state(
    problem: Problem, prices: list[int]
) -> None:
    net = limited_network(problem)
    if net.impossible:
        return
    dual = Dual.of(net)
    rng = np.random.default_rng(0)
    for price in [0, *prices]:
        dual.set_prices(rng.random(len(net.capacity)) * price * dual.scale / 1000)
        for _ in range(3):
            dual.sweep()
    feasible = [
        (found.cost, choices)
        for choices in itertools.product(*(range(len(c)) for c in problem.costs))
        if (found := evaluate(problem, choices)).feasible
    ]
    assert not (dual.impossible and feasible)
    for cost, choices in feasible:
        assert dual.bound <= cost
        for node in net.costs:
            assert dual.floor(node)[choices[node]] <= (cost - net.offset) * dual.scale


@some
@given(problem=problems(limited=True), sweeps=st.integers(0, 3))
def test_the_duals_of_the_linear_program_bound_what_it_bounds(
    problem: Problem, sweeps: int
) -> None:
    net = limited_network(problem)
    if net.impossible or any((cost >= INF).any() for cost in net.costs.values()):
        return
    found = Polytope(net).relax(Deadline.after(30))
    if found is None:
        return
    dual = Dual.of(net)
    for _ in range(sweeps):
        dual.sweep()
    assert dual.install(found.prices, found.messages)
    dual.sweep()
    spread = sum(int(cost.max()) for cost in net.costs.values()) + 1
    assert dual.bound >= found.value - 1 - 1e-5 * spread
    feasible = [
        evaluated.cost
        for choices in itertools.product(*(range(len(c)) for c in problem.costs))
        if (evaluated := evaluate(problem, choices)).feasible
    ]
    assert dual.bound <= min(feasible, default=INF)


@some
@given(problem=problems(limited=True))
def test_memory_rows_allow_what_the_problem_allows(problem: Problem) -> None:
    net = limited_network(problem)
    for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
        found = evaluate(problem, choices)
        states = dict(enumerate(choices))
        allowed = (
            not net.impossible and paid(net, states) < INF and not (excess(net, states) > 0).any()
        )
        assert allowed == found.feasible


@some
@given(problem=problems(limited=True))
def test_cpsat_alone_finds_the_best_cost(problem: Problem) -> None:
    net = limited_network(problem)
    if net.impossible:
        return
    want = min(
        (
            found.cost
            for choices in itertools.product(*(range(len(c)) for c in problem.costs))
            if (found := evaluate(problem, choices)).feasible
        ),
        default=None,
    )
    got = solve_network(net, Deadline.after(30), seed=0, workers=1)
    assert got.complete
    if want is None:
        assert got.states is None
    else:
        assert got.states is not None
        assert net.offset + paid(net, got.states) == got.bound == want
        upper = solve_network(net, Deadline.after(30), seed=0, workers=1, upper=want)
        assert upper.states is None
        assert upper.complete


def test_a_walk_keeps_its_books_and_blocks_only_gain() -> None:
    rng = np.random.default_rng(0)
    problem = dense(rng, nodes=14, states=6, limit=250)
    net = limited_network(problem)
    assert len(net.capacity)
    walk = Walk.at(net, {node: int(rng.integers(net.size(node))) for node in net.costs})
    for _ in range(20):
        node = int(rng.integers(14))
        walk.move(node, int(rng.integers(net.size(node))))
        np.testing.assert_array_equal(walk.over, excess(net, walk.states))
        fresh = Walk.at(net, walk.states)
        np.testing.assert_array_equal(walk.local_costs(node), fresh.local_costs(node))
        np.testing.assert_array_equal(walk.overflow(node), fresh.overflow(node))
    prices = np.zeros(len(net.capacity))
    walk.repair(prices, Deadline.after(10))
    assert walk.feasible
    cost = walk.paid
    for _ in range(20):
        walk.improve_block(ball(net, 3, 4, rng), prices, Deadline.after(10))
        assert walk.feasible
        assert walk.paid <= cost
        cost = walk.paid
    np.testing.assert_array_equal(walk.over, excess(net, walk.states))


@some
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 90)),
    kinds=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_min_plus_equals_its_definition(shape: tuple[int, int, int], kinds: int, seed: int) -> None:
    a, x, b = shape
    rng = np.random.default_rng(seed)
    left = rng.integers(0, 9, (kinds, x))[rng.integers(kinds, size=a)]
    right = rng.integers(0, 9, (x, kinds))[:, rng.integers(kinds, size=b)]
    left[rng.random(left.shape) < 0.2] = INF
    want = [[min(int((row + column).min()), INF) for column in right.T] for row in left]
    np.testing.assert_array_equal(min_plus(left, right), want)
