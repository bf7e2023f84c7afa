"""A plan keeps what it was asked for, and its totals are those of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost_models.protocol import MeshAxis, wire_bytes
from autoshard.errors import InfeasibleError, InputError
from autoshard.experiments.random_plans import RandomPlans
from autoshard.interpret import interpret
from autoshard.plan import Plan
from autoshard.planner import plan_module
from autoshard.pricing import Priced, price
from autoshard.problem import evaluate
from autoshard.shardings import Sharding, divides, local_shape
from autoshard.solvers import SOLVERS
from tests.lowering import MESH, Simple, boundaries, graph_of, lowered, module_of, shape_of
from tests.zoo import PROGRAMS

X, W = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)
MODEL = Simple()


def plan_of(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = MESH,
    ties: Any = (),
    solver: Any = None,
    memory_limit: int | None = None,
    **pins: Any,
) -> Plan:
    return plan_module(
        module_of(lowered(fn, *args)),
        *boundaries(fn, *args, **pins),
        mesh,
        ties=ties,
        solver=solver,
        cost_model=MODEL,
        memory_limit=memory_limit,
    )


def mlp(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("name", ["mlp_step", "nested_scans", "branches", "experts", "slicing"])
def test_totals_are_the_sums_of_the_parts(name: str) -> None:
    program = PROGRAMS[name]
    plan = plan_of(program.fn, *program.values(), solver=RandomPlans(3))
    moved = sum(wire_bytes(c.kind, c.nbytes, c.devices) * c.trips for c in plan.collectives)
    spoken = sum(c.seconds * c.trips for c in plan.collectives)
    assert plan.predicted.collective_bytes == pytest.approx(moved)
    assert plan.predicted.communication_s == pytest.approx(spoken)
    assert plan.predicted.step_s == pytest.approx(
        plan.predicted.compute_s + plan.predicted.communication_s
    )
    for c in plan.collectives:
        axes = tuple(MeshAxis(a, MESH.size((a,))) for a in c.axes)
        assert c.seconds == pytest.approx(MODEL.collective_s(c.kind, np.array([c.nbytes]), axes)[0])
        assert c.devices == MESH.size(c.axes)


def test_products_are_counted_per_device_by_hand() -> None:
    plan = plan_of(mlp, X, W, pins={0: (("a",), ()), 1: ((), ("b",))})
    assert plan.predicted.flops == 2 * (16 // 4) * 32 * (64 // 2)
    assert plan.predicted.collective_bytes == 0
    (dot,) = (op for op in plan.ops if op.name == "stablehlo.dot_general")
    assert dict(dot.factors) == {"i=16": ("a",), "j=64": ("b",)}


def test_a_split_contraction_costs_an_all_reduce_of_the_partial_result() -> None:
    pins: dict[int, Sharding] = {0: ((), ("a",)), 1: (("a",), ())}
    x, w = np.ones((8, 4096), np.float32), np.ones((4096, 8), np.float32)
    plan = plan_of(mlp, x, w, mesh=shape_of(4), pins=pins, result_pins={0: ((), ())})
    (c,) = plan.collectives
    assert (c.kind, c.axes, c.nbytes) == ("all_reduce", ("a",), 4 * 8 * 8)
    assert plan.predicted.collective_bytes == 2 * 0.75 * c.nbytes


def test_a_value_resharded_for_two_readers_is_moved_once() -> None:
    plan = plan_of(
        lambda x, w, v: (x @ w, x @ v),
        np.ones((512, 32), np.float32),
        np.ones((32, 8), np.float32),
        np.ones((32, 8), np.float32),
        mesh=shape_of(8),
        pins={0: (("a",), ()), 1: ((), ("a",)), 2: ((), ("a",))},
        result_pins={0: ((), ("a",)), 1: ((), ("a",))},
    )
    gathers = [c for c in plan.collectives if c.nbytes == 4 * 512 * 32]
    assert len(gathers) <= 1


@pytest.mark.parametrize("name", ["mlp_step", "attention", "scan_layers_grad", "kv_cache"])
def test_the_plan_costs_what_the_problem_says_or_less(name: str) -> None:
    """Less where a copy serves several readers, which the problem counts once per reader."""
    program = PROGRAMS[name]
    graph = graph_of(program.fn, *program.values())
    priced = price(graph, MESH, MODEL)
    solution = SOLVERS["exact"].solve(priced.problem, time_limit_s=20)
    plan, _ = interpret(graph, priced, MESH, MODEL, solution.choices)
    objective = evaluate(priced.problem, solution.choices).cost * 1e-12
    assert plan.predicted.step_s <= objective * (1 + 1e-6)


def test_without_sharing_the_plan_costs_exactly_what_the_problem_says() -> None:
    def chain(x: Any, w: Any) -> Any:
        return jnp.sum(mlp(x, w), axis=0)

    graph = graph_of(chain, X, W)
    priced = price(graph, MESH, MODEL)
    for seed in range(20):
        choices = RandomPlans(seed).solve(priced.problem, time_limit_s=5).choices
        plan, _ = interpret(graph, priced, MESH, MODEL, choices)
        cost = evaluate(priced.problem, choices).cost * 1e-12
        assert plan.predicted.step_s == pytest.approx(cost, abs=1e-9)


def test_no_random_plan_is_cheaper_than_the_chosen_one() -> None:
    program = PROGRAMS["attention"]
    best = plan_of(program.fn, *program.values())
    assert best.solver.gap == 0
    for seed in range(10):
        other = plan_of(program.fn, *program.values(), solver=RandomPlans(seed))
        assert best.solver.objective_s <= other.solver.objective_s


@pytest.mark.parametrize("sharding", [((), ()), (("a",), ()), (("b",), ("a",)), ((), ("a", "b"))])
def test_pins_are_honoured(sharding: Sharding) -> None:
    plan = plan_of(mlp, X, W, pins={0: sharding}, result_pins={0: sharding})
    assert plan.argument_shardings[0] == plan.result_shardings[0] == sharding
    assert plan.arguments[0].pinned
    assert not plan.arguments[1].pinned
    assert plan.results[0].pinned


@pytest.mark.parametrize("sharding", [(("c",), ()), (("a", "a"), ())], ids=str)
def test_a_pin_that_is_no_layout_of_the_mesh_is_refused(sharding: Sharding) -> None:
    with pytest.raises((InputError, ValueError)):
        plan_of(mlp, X, W, pins={0: sharding})


def test_a_pin_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be pinned"):
        plan_of(mlp, X[:6], W, pins={0: (("a",), ())})


def test_pins_of_a_donated_argument_and_of_what_replaces_it_must_agree() -> None:
    def update(x: Any) -> Any:
        return x * 2

    with pytest.raises(InputError, match="donated and pinned"):
        plan_of(update, X, ties=[(0, 0)], pins={0: (("a",), ())}, result_pins={0: ((), ("a",))})


def test_a_donated_state_and_its_successor_share_a_sharding() -> None:
    program = PROGRAMS["scan_layers_grad"]
    ties = [(0, 0), (1, 1)]
    for seed in range(3):
        plan = plan_of(program.fn, *program.values(), ties=ties, solver=RandomPlans(seed))
        assert plan.argument_shardings[:2] == plan.result_shardings


def test_constraints_inside_the_program_are_honoured() -> None:
    spec = jax.sharding.PartitionSpec("b", "a")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def fn(x: Any, w: Any) -> Any:
        return jnp.sin(lax.with_sharding_constraint(x @ w, sharding))

    plan = plan_of(fn, X, W)
    (constraint,) = (op for op in plan.ops if op.name == "sdy.sharding_constraint")
    assert constraint.results == ((("b",), ("a",)),)


@pytest.mark.parametrize("name", ["uneven", "size_zero", "scalars", "passing_through", "constants"])
@pytest.mark.parametrize("sizes", [(8,), (2, 4, 1), (1,), (2, 2, 2, 1)], ids=str)
def test_arguments_and_results_are_split_evenly_or_not_at_all(
    name: str, sizes: tuple[int, ...]
) -> None:
    program, mesh = PROGRAMS[name], shape_of(*sizes)
    plan = plan_of(program.fn, *program.values(), mesh=mesh, solver=RandomPlans(1))
    for boundary in (*plan.arguments, *plan.results):
        assert divides(boundary.shape, boundary.sharding, mesh)
        whole = int(np.prod(boundary.shape))
        part = int(np.prod(local_shape(boundary.shape, boundary.sharding, mesh)))
        assert part * mesh.size(a for d in boundary.sharding for a in d) == whole


def test_what_a_loop_reads_unchanged_is_moved_once_and_what_it_changes_each_round() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 7, lambda _, c: jnp.tanh(c @ w), x)

    square = np.ones((32, 32), np.float32)
    plan = plan_of(
        fn, X, square, mesh=shape_of(8), pins={1: (("a",), ())}, solver=RandomPlans(0, (0.0, 0.0))
    )
    for c in plan.collectives:
        assert c.trips == (1 if c.nbytes == 4 * 32 * 32 else c.trips)


def test_of_a_conditional_the_costliest_branch_counts() -> None:
    def fn(x: Any, w: Any, flag: Any) -> Any:
        return lax.cond(flag, lambda: jnp.tanh(x @ w) @ w.T, lambda: (x @ w[:, :32]) * 1.0)

    plan = plan_of(fn, X, W, np.bool_(True), mesh=shape_of(1))
    assert plan.predicted.flops == 2 * (2 * 16 * 32 * 64)


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda x, w: jnp.vdot(x[0], w[:, 0]), 0),
        (lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]), 0),
        (lambda x, w: x[0] @ w, 2 * 32 * 64),
    ],
    ids=["two vectors", "no sum", "vector and matrix"],
)
def test_a_product_that_xla_turns_into_something_else_is_none(fn: Any, flops: float) -> None:
    assert plan_of(fn, X, W, mesh=shape_of(1)).predicted.flops == flops


def test_what_cannot_fit_is_refused_with_the_bytes_it_needs() -> None:
    with pytest.raises(InfeasibleError, match="bytes per device") as caught:
        plan_of(mlp, X, W, memory_limit=100)
    assert "argument" in str(caught.value)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(InputError, match="not a solver"):
        plan_of(mlp, X, W, solver=3)


def test_every_argument_and_loop_value_is_a_decision() -> None:
    program = PROGRAMS["nested_scans"]
    graph = graph_of(program.fn, *program.values())
    priced: Priced = price(graph, MESH, MODEL)
    decided = {v for node in priced.nodes for v in node.values}
    for op in graph.ops:
        if op.name == "stablehlo.while":
            assert set(op.results) <= decided
    assert set(graph.arguments) <= decided
