"""A plan's time by source line beside XLA's estimates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard import autoshard
from autoshard.cost_models.hlo_cycles import XlaEstimate
from autoshard.cost_models.topology import Topology
from autoshard.estimates import line_estimates


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def test_lines_are_told_with_both_times_the_farthest_apart_first() -> None:
    mesh = Topology("v5e:2x2").mesh({"data": 2, "model": 2})
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (512, 1024))]
    plan = autoshard(product, mesh).plan(*shapes)
    (line,) = {op.source for op in plan.ops if op.flops}
    found = (
        XlaEstimate("fusion.1", "fusion", "dot_general", line, 3000, 2),
        XlaEstimate("fusion.2", "fusion", "tanh", line, 1500, 1),
        XlaEstimate("copy", "copy", "", "", 3_000_000, 1),
    )
    unnamed, named = line_estimates(plan, found, 1.5e9)
    assert (unnamed.source, unnamed.predicted_s, unnamed.xla_s) == ("", 0.0, 2e-3)
    assert (named.source, named.cycles, named.fusions, named.xla_s) == (line, 7500, 2, 5e-6)
    assert named.predicted_s == sum(op.seconds for op in plan.ops) > 0
