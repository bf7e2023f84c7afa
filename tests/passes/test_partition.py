"""Passes on the program of one device, in a pipeline of ``autoshard``: what is measured is run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import FallbackWarning, InputError, autoshard
from autoshard.passes.collectives import Savings
from autoshard.passes.context import PassContext
from autoshard.passes.manager import run_pipeline
from tests.lowering import Simple, lowered, mesh_of, module_of


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def accumulated(w: Any, batches: Any) -> Any:
    """The gradient over several batches, one after another."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(total: Any, x: Any) -> Any:
        return total + jax.grad(loss)(w, x), None

    return lax.scan(step, jnp.zeros_like(w), batches)[0]


PINS = {"w": P(), "batches": P(None, "a")}


def test_gradients_of_an_accumulation_are_reduced_once() -> None:
    args = f32(8, 16), f32(3, 512, 8)
    options: Any = {"in_shardings": PINS, "out_shardings": P(), "cost_model": Simple()}
    plain = autoshard(accumulated, mesh_of(8), partitioner="shardy", **options)
    improved = autoshard(
        accumulated, mesh_of(8), pipeline="flatten-calls,shard,partition,collectives", **options
    )
    before = plain.validate(*args, repeats=1).compiled.collective_bytes
    found = improved.lower(*args).results["collectives"]
    assert isinstance(found, Savings)
    assert found.rewrites == {"sink": 1}
    assert found.before.sent_bytes == before == 3 * 2 * 7 / 8 * 8 * 16 * 4
    checked = improved.validate(*args, repeats=1)
    assert (checked.partitioner, checked.fallback_reason) == ("shardy", "")
    assert checked.compiled.collective_bytes == found.after.sent_bytes == before / 3
    assert checked.max_relative_error is not None
    assert checked.max_relative_error < 1e-5


def test_products_wait_for_no_whole_operand() -> None:
    """Pins that make the plan gather the rows which the product reads."""
    args = f32(64, 16), f32(16, 256)
    options: Any = {
        "in_shardings": {"x": P("a"), "w": P(None, "a")},
        "out_shardings": P(None, "a"),
        "cost_model": Simple(),
        "pipeline": "flatten-calls,shard,partition,collective-matmul{always=true}",
    }
    step = autoshard(lambda x, w: jnp.tanh(x @ w), mesh_of(8), **options)
    assert "collective_permute" in step.lower(*args).as_text()
    checked = step.validate(*args, repeats=1)
    assert checked.compiled.collective_bytes == checked.predicted.collective_bytes
    assert checked.max_relative_error is not None
    assert checked.max_relative_error < 1e-5


def test_what_shardy_cannot_partition_runs_without_the_passes_after_it() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.callback(lambda total: None, x.sum())
        return x * 2

    step = autoshard(noisy, mesh_of(8), pipeline="flatten-calls,shard,partition,collectives")
    with pytest.warns(FallbackWarning, match="callback"):
        assert step.compile(f32(16, 8)).partitioner == "xla"
    np.testing.assert_allclose(step(f32(16, 8)), 2 * f32(16, 8))


def test_a_program_without_a_plan_cannot_be_partitioned() -> None:
    module = module_of(lowered(lambda x: x + 1, f32(4)))
    with pytest.raises(InputError, match="finds no plan"):
        run_pipeline("flatten-calls,partition", module, PassContext())
    with pytest.raises(InputError, match="there twice"):
        autoshard(jnp.sin, mesh_of(8), pipeline="flatten-calls,shard,partition,partition")
