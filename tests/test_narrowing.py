"""What XLA:TPU keeps in half of its size: f32 that products alone read, at default precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, autoshard
from autoshard.cost_models.topology import Topology

P = jax.P
X = jax.ShapeDtypeStruct((2**16, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 1024), jnp.float32)


def planned(precision: str | None, dtype: str = "float32") -> Plan:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, precision=precision)

    mesh = Topology("v5e:4x4").mesh({"data": 4, "model": 4})
    rows = P(("data", "model"), None)
    shapes = [jax.ShapeDtypeStruct(s.shape, dtype) for s in (X, W)]
    step = autoshard(product, mesh, in_shardings=(rows, P("data", None)), out_shardings=rows)
    return step.plan(*shapes)


@pytest.mark.parametrize(("precision", "share"), [(None, 0.5), ("highest", 1.0), ("high", 1.0)])
def test_what_a_product_reads_is_gathered_in_half_unless_it_asks_for_more(
    precision: str | None, share: float
) -> None:
    (gather,) = [c for c in planned(precision).collectives if c.kind == "all_gather"]
    assert gather.nbytes == share * 4 * 256 * 1024


def test_what_is_half_already_stays_as_it_is() -> None:
    (gather,) = [c for c in planned(None, "bfloat16").collectives if c.kind == "all_gather"]
    assert gather.nbytes == 2 * 256 * 1024


def test_a_gathered_operand_is_held_in_half_too() -> None:
    held = [planned(precision).predicted.peak_bytes for precision in (None, "highest")]
    assert held[1] - held[0] == 2 * 256 * 1024
