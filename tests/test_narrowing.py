"""What XLA:TPU keeps in half of its size: f32 that products alone read, at default precision."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, autoshard
from autoshard.cost_models.topology import Topology
from autoshard.partition import Partitioner

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


def test_what_is_only_converted_to_half_moves_in_half() -> None:
    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * w.astype(jnp.bfloat16)

    mesh = Topology("v5e:4x4").mesh({"data": 4, "model": 4})
    step = autoshard(scaled, mesh, in_shardings=(P(), P("data")), out_shardings=P())
    x, w = (jax.ShapeDtypeStruct((256, 1024), dtype) for dtype in ("bfloat16", "float32"))
    (gather,) = step.plan(x, w).collectives
    assert gather.nbytes == 2 * 256 * 1024


def test_what_something_else_reads_too_moves_whole() -> None:
    def products(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.dot(x, w), jnp.dot(2.0 * x, w, precision="highest")

    mesh = Topology("v5e:4x4").mesh({"data": 4, "model": 4})
    rows = P(("data", "model"), None)
    step = autoshard(products, mesh, in_shardings=(rows, P("data", None)), out_shardings=rows)
    (gather,) = step.plan(X, W).collectives
    assert gather.nbytes == 4 * 256 * 1024


def test_a_gathered_operand_is_held_in_half_too() -> None:
    held = [planned(precision).predicted.peak_bytes for precision in (None, "highest")]
    assert held[1] - held[0] == 2 * 256 * 1024


def test_weights_that_a_loop_slices_and_converts_are_held_converted_as_well() -> None:
    def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.dot(x, w.astype(jnp.bfloat16)), None

        return jax.lax.scan(layer, x, ws)[0]

    mesh = Topology("v5e:2x2").mesh({"data": 2, "model": 2})
    step = autoshard(layers, mesh, in_shardings=(P(), P()))
    x, ws = ((256, 512), "bfloat16"), ((16, 512, 512), "float32")
    plan = step.plan(*(jax.ShapeDtypeStruct(*kind) for kind in (x, ws)))
    (copy,) = [h for h in plan.holders if h.name.startswith("convert of ws")]
    assert copy.nbytes == 2 * 16 * 512 * 512


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("partitioner", ["xla", "shardy"])
def test_the_compiler_moves_halves_whoever_partitions(
    partitioner: Partitioner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh = Topology("v5e:2x2").mesh({"data": 2, "model": 2})
    rows = P(("data", "model"), None)
    step = autoshard(
        lambda x, w: jnp.dot(x, w),
        mesh,
        partitioner=partitioner,
        in_shardings=(rows, P("data", None)),
        out_shardings=rows,
    )
    report = step.validate(X, W)
    assert (report.partitioner, report.fallback_reason) == (partitioner, "")
    assert report.compiled.collective_bytes == report.predicted.collective_bytes
    assert report.predicted.collective_bytes is not None
    assert report.predicted.collective_bytes < 4 * 256 * 1024 / 2
