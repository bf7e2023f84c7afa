"""The gradient of picking one element per row is no array of its own on TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard import autoshard
from autoshard.cost_models.topology import Topology
from tests.lowering import mesh_of

X = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 8192), jnp.float32)
LABELS = jax.ShapeDtypeStruct((4096,), jnp.int32)


def loss(w: Any, x: Any, labels: Any) -> Any:
    scores = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def holds_a_scatter(fn: Any, mesh: Any, *args: Any) -> bool:
    rows = jax.P(mesh.axis_names)
    pins = (jax.P(), *(rows for _ in args[1:]))
    plan = autoshard(fn, mesh, in_shardings=pins, out_shardings=jax.P()).plan(*args)
    return any(holder.name.startswith("scatter") for holder in plan.holders)


def tpu() -> Any:
    return Topology("v5e:2x4").mesh({"data": 4, "model": 2})


def test_the_gradient_of_picking_a_label_is_held_on_cpu_alone() -> None:
    gradient = jax.grad(loss)
    held = [holds_a_scatter(gradient, mesh, W, X, LABELS) for mesh in (tpu(), mesh_of(4, 2))]
    assert held == [False, True]


def test_rows_that_are_added_up_are_held_on_tpu_too() -> None:
    def counted(w: Any, labels: Any) -> Any:
        table = jnp.zeros_like(w).at[labels % 256].add(jnp.ones((4096, 8192)))
        return table @ table.T

    assert holds_a_scatter(counted, tpu(), W, LABELS)
