"""A small train step, planned with a cost model of a chip: what tests of questions ask about."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import Plan, autoshard
from tests.lowering import mesh_of

PARAMS = {
    "up": jax.ShapeDtypeStruct((256, 512), np.float32),
    "down": jax.ShapeDtypeStruct((512, 256), np.float32),
}
BATCH = {
    "x": jax.ShapeDtypeStruct((1024, 256), np.float32),
    "y": jax.ShapeDtypeStruct((1024, 256), np.float32),
}


def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(fn: Any = train_step, *, sizes: tuple[int, ...] = (4, 2), **options: Any) -> Plan:
    options = {"donate_argnums": 0, "cost_model": "cpu", **options}
    plan: Plan = autoshard(fn, mesh_of(*sizes), **options).plan(PARAMS, BATCH)
    return plan
