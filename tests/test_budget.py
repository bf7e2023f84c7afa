"""Plans under a memory limit: what fits is found, what cannot fit is refused with figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.budget import Prices, priced_problem, windows
from autoshard.errors import InfeasibleError
from autoshard.interpret import interpret
from autoshard.plan import Plan
from autoshard.planner import plan_module
from autoshard.pricing import price
from autoshard.problem import FORBIDDEN
from autoshard.solvers import Status
from autoshard.solvers.exact import ExactSolver
from tests.lowering import MESH, Simple, boundaries, graph_of, lowered, mesh_of, module_of

# Splitting the weights costs time, so without a limit every device holds them whole.
W = np.ones((64, 64), np.float32)
X = np.ones((8, 64), np.float32)


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


ARGUMENTS = (X, W, W, W)


def plan(limit: int | None, fn: Callable[..., Any] = layers, *args: Any) -> Plan:
    args = args or ARGUMENTS
    given = boundaries(fn, *args)
    module = module_of(lowered(fn, *args))
    return plan_module(module, *given, MESH, memory_limit=limit, cost_model=Simple())


def test_a_limit_that_the_best_plan_meets_changes_nothing() -> None:
    free = plan(None)
    limited = plan(free.predicted.peak_bytes)
    assert limited.predicted == free.predicted
    assert limited.solver.gap == 0


def test_under_a_limit_the_plan_changes_until_it_fits_and_costs_no_less() -> None:
    free = plan(None)
    limit = int(0.5 * free.predicted.peak_bytes)
    limited = plan(limit)
    assert limited.predicted.peak_bytes <= limit
    assert limited.predicted.step_s >= free.predicted.step_s
    assert limited.solver.gap is not None
    bound = limited.solver.objective_s * (1 - limited.solver.gap)
    assert bound == pytest.approx(free.solver.objective_s)
    assert limited.memory_limit == limit


def moments(w: Any, m: Any, x: jax.Array) -> Any:
    """A step of gradient descent with momentum, through three layers."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(layers(x, *w) ** 2))(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return jax.tree.map(lambda w, m: w - m, w, m), m, loss


@pytest.mark.slow
def test_a_limit_is_met_wherever_a_plan_under_a_lower_one_would_meet_it() -> None:
    arguments = ([W, W, W], [W, W, W], X)
    step = autoshard(moments, mesh_of(8), donate_argnums=(0, 1))
    peak = step.plan(*arguments).predicted.peak_bytes
    met = []
    for limit in range(peak - 1, peak // 3, -peak // 20):
        limited = autoshard(moments, mesh_of(8), donate_argnums=(0, 1), memory_limit=limit)
        try:
            met.append(limited.plan(*arguments).predicted.peak_bytes <= limit)
        except InfeasibleError:
            met.append(False)
    assert met[0]
    assert met == sorted(met, reverse=True)


def test_arguments_that_cannot_fit_are_named_before_anything_is_solved() -> None:
    with pytest.raises(InfeasibleError, match=r"limit of 3,000 bytes.*at least 6,400 bytes") as e:
        plan(3000)
    assert "argument 1 (2,048 bytes)" in str(e.value)


def test_a_limit_between_the_bound_and_the_leanest_plan_names_both() -> None:
    with pytest.raises(InfeasibleError, match=r"at least 6,400 .*leanest plan found needs") as e:
        plan(6500)
    assert "held at the fullest moment" in str(e.value)


def test_prices_rise_where_too_much_is_held_and_only_there() -> None:
    graph = graph_of(layers, *ARGUMENTS)
    priced = price(graph, MESH, Simple())
    _, memory = interpret(graph, priced, MESH, Simple(), [0] * len(priced.nodes))
    zero = Prices(0.0, np.zeros(len(graph.values)), np.zeros(len(graph.values)))
    enough = zero.raised(graph, memory, memory.peak_bytes, 1.0)
    assert enough.arguments == enough.made.max() == enough.moved.max() == 0
    raised = zero.raised(graph, memory, memory.peak_bytes // 2, 1.0)
    assert raised.arguments == pytest.approx(1.0, rel=0.01)
    assert raised.made.max() > 0
    half = zero.towards(raised, 0.5)
    np.testing.assert_allclose(half.made, raised.made / 2)


def test_a_price_is_paid_per_byte_that_a_choice_holds() -> None:
    graph = graph_of(layers, *ARGUMENTS)
    priced = price(graph, MESH, Simple())
    count = len(graph.values)
    prices = Prices(7.0, np.zeros(count), np.full(count, 5.0))
    problem = priced_problem(graph, priced, priced.problem, prices)
    argument = next(n for n, node in enumerate(priced.nodes) if node.kind == "argument")
    extra = problem.costs[argument] - priced.problem.costs[argument]
    assert extra.max() == 7 * X.nbytes
    assert extra.min() == 7 * X.nbytes // 8
    for old, new in zip(priced.problem.edge_costs, problem.edge_costs, strict=True):
        assert ((new >= FORBIDDEN) == (old >= FORBIDDEN)).all()
        assert (new >= old).all()
    assert any(
        (new > old).any()
        for old, new in zip(priced.problem.edge_costs, problem.edge_costs, strict=True)
    )


def test_a_value_is_needed_from_where_it_is_made_to_its_last_reader() -> None:
    graph = graph_of(lambda x: (x @ x) @ jnp.sin(x @ x @ x), W)
    priced = price(graph, MESH, Simple())
    _, memory = interpret(graph, priced, MESH, Simple(), [0] * len(priced.nodes))
    found = windows(graph, memory)
    steps = len(memory.timeline)
    assert found[graph.arguments[0]][0] == 0
    assert found[graph.results[0]][1] == steps
    for op in graph.ops:
        for value in op.operands:
            assert found[value][0] <= found[op.results[0]][0]


def test_prices_of_any_size_leave_costs_that_can_be_added_up() -> None:
    graph = graph_of(layers, *ARGUMENTS)
    priced = price(graph, MESH, Simple())
    high = np.full(len(graph.values), 1e13)
    problem = priced_problem(graph, priced, priced.problem, Prices(1e13, high, high))
    tables = (*problem.costs, *problem.edge_costs)
    assert sum(int(t[t < FORBIDDEN].max(initial=0)) for t in tables) <= 1 << 55
    for table, before in zip(problem.costs, priced.problem.costs, strict=True):
        assert ((table >= FORBIDDEN) == (before >= FORBIDDEN)).all()
    found = ExactSolver().solve(problem, time_limit_s=10.0)
    assert found.status is Status.OPTIMAL
    _, memory = interpret(graph, priced, MESH, Simple(), found.choices)
    with pytest.raises(InfeasibleError):
        plan(int(0.9 * memory.peak_bytes))
