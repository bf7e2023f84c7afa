"""Random plans of small programs run as written: values, products, collectives."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import autoshard
from autoshard.errors import PlanMismatchError
from autoshard.experiments.random_plans import RandomPlans
from autoshard.plan import Plan
from autoshard.planner import plan_module
from autoshard.program import normalize
from autoshard.rewrite import rewrite
from autoshard.validate import Validation
from tests.lowering import MESH, Simple, boundaries, lowered, mesh_of, module_of
from tests.zoo import PROGRAMS

QUICK = (
    *("mlp_step", "attention_grad", "scan_remat_grad", "grouped_heads", "embedding_grad"),
    *(
        "kv_cache",
        "branches",
        "moving",
        "reshaping",
        "half_precision",
        "passing_through",
        "scatters",
    ),
)
OTHERS = ((8,), (3, 2), (2, 4, 1), (5,), (1,), (7,), (2, 2, 2, 1))


def check(name: str, sizes: tuple[int, ...], seed: int) -> None:
    """A random plan is followed to the byte, and gives the values of the function."""
    program = PROGRAMS[name]
    solver = RandomPlans(seed)
    step = autoshard(program.fn, mesh_of(*sizes), donate_argnums=program.donate, solver=solver)
    found: Validation = step.validate(*program.values(), repeats=1)
    assert found.max_relative_error is not None
    assert found.max_relative_error <= program.tolerance, found.worst_value
    assert found.involuntary_remat == 0
    assert found.unnamed_collectives == ()
    for figure in ("flops", "collective_bytes"):
        predicted, compiled = (getattr(f, figure) for f in (found.predicted, found.compiled))
        assert predicted == pytest.approx(compiled, rel=1e-3), figure


@pytest.mark.parametrize("name", QUICK)
def test_a_random_plan_runs_as_written(name: str) -> None:
    check(name, (4, 2), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_random_plans_run_as_written_on_three_axes_and_another_mesh(name: str) -> None:
    check(name, (2, 2, 2), 2)
    check(name, OTHERS[zlib.crc32(name.encode()) % len(OTHERS)], 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_chosen_plan_runs_as_written(name: str) -> None:
    program = PROGRAMS[name]
    step = autoshard(program.fn, mesh_of(4, 2), donate_argnums=program.donate)
    found = step.validate(*program.values(), repeats=1)
    assert found.max_relative_error is not None
    assert found.max_relative_error <= program.tolerance
    assert found.unnamed_collectives == found.absent_collectives == ()
    assert found.predicted.flops == pytest.approx(found.compiled.flops, rel=1e-3)
    assert found.predicted.collective_bytes == pytest.approx(
        found.compiled.collective_bytes, rel=1e-3
    )


X, W = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)


def planned(fn: Callable[..., Any], *args: Any) -> Plan:
    module = module_of(lowered(fn, *args))
    return plan_module(module, *boundaries(fn, *args), MESH, cost_model=Simple())


def mlp(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda x, w: jnp.sin(x @ w), "op 1 is stablehlo.sine"),
        (lambda x, w: x @ w, "it has 1 ops, the plan 2"),
        (lambda x, w: jnp.sin(jnp.tanh(x @ w)), "op 2 is stablehlo.sine"),
    ],
    ids=["another op", "fewer ops", "more ops"],
)
def test_another_program_is_refused_with_the_first_difference(other: Any, difference: str) -> None:
    with pytest.raises(PlanMismatchError, match=difference):
        rewrite(module_of(lowered(other, X, W)), planned(mlp, X, W))


def test_every_op_of_a_rewritten_module_has_a_constrained_result() -> None:
    module = module_of(lowered(mlp, X, W))
    rewrite(module, planned(mlp, X, W))
    text = str(module)
    assert "sdy.sharding_rule" not in text
    for name in ("stablehlo.dot_general", "stablehlo.tanh"):
        (line,) = (i for i, text_line in enumerate(text.splitlines()) if name in text_line)
        assert "sdy.sharding_constraint" in text.splitlines()[line + 1]


def test_rewriting_leaves_the_values_of_a_module_alone() -> None:
    lowering = lowered(mlp, X, W)
    rewrite(module_of(lowering), planned(mlp, X, W))
    again = lowered(mlp, X, W)
    normalize(module_of(again))
    assert str(module_of(again)).count("stablehlo.") < str(module_of(lowering)).count("sdy.")


def test_a_constraint_inside_the_function_is_respected_and_an_open_one_is_closed() -> None:
    mesh = mesh_of(4, 2)
    spec: Any = jax.sharding.PartitionSpec

    def fn(x: Any, w: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, spec("b", spec.UNCONSTRAINED))
        return jnp.sin(y)

    step = autoshard(fn, mesh)
    text = step.lower(X, W).as_text()
    assert '[{"b"}, {}]' in text
    assert "?" not in text
    np.testing.assert_allclose(step(X, W), np.sin(X @ W), rtol=1e-5)


def test_a_shard_map_inside_the_function_runs_on_its_own_shardings() -> None:
    mesh = mesh_of(4, 2)
    spec: Any = jax.sharding.PartitionSpec

    def fn(x: Any, w: Any) -> Any:
        inner: Any = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "b"),
            mesh=mesh,
            in_specs=(spec("a", "b"), spec("b")),
            out_specs=spec("a"),
        )
        return jnp.sin(inner(x, w) + 1)

    np.testing.assert_allclose(autoshard(fn, mesh)(X, W), np.sin(X @ W + 1), rtol=1e-4)
