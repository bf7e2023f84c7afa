"""Programs that hand part of their work to others: devices, Python, kernels, linear algebra."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

from tests.situations import SITUATIONS, situation
from tests.zoo import f32, i32

__all__ = ["HEARD", "SITUATIONS"]

HEARD: list[Any] = []
"""What callbacks of these programs were called with."""


@situation(f32(16, 32), f32(32, 32))
def shard_map_between(x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "b") * 0.5

    specs = (P("a", "b"), P("b", None))
    y = jax.shard_map(body, in_specs=specs, out_specs=P("a", None))(x * 2, w)
    return jnp.tanh(y) @ w


@situation(f32(16, 32), f32(32, 32))
def shard_map_of_all_collectives(x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        y = x @ lax.all_gather(w, "a", tiled=True)
        return (
            y + lax.ppermute(y, "a", [(i, (i + 1) % 4) for i in range(4)]),
            lax.psum_scatter(y, "b", scatter_dimension=1, tiled=True),
            lax.all_to_all(y, "b", 1, 0, tiled=True),
            lax.pmax(y, ("a", "b")),
        )

    out = (P("a"), P("a", "b"), P(("a", "b")), P())
    mapped: Any = jax.shard_map(body, in_specs=(P("a"), P("a")), out_specs=out, check_vma=False)
    return mapped(x, w)


@situation(f32(16, 32), f32(4, 32, 32))
def shard_map_with_a_loop(x: Any, ws: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w), "b") / 2, None

    def body(x: Any, ws: Any) -> Any:
        return lax.scan(layer, x, ws)[0]

    specs = (P("a"), P())
    return jax.shard_map(body, in_specs=specs, out_specs=P("a"), check_vma=False)(x, ws)


@situation(f32(16, 32), f32(4, 32, 32))
def shard_map_in_a_loop(x: Any, ws: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "b") / 8

    mapped: Any = jax.shard_map(body, in_specs=(P("a", "b"), P("b")), out_specs=P("a"))
    return lax.scan(lambda x, w: (jnp.tanh(mapped(x, w)), None), x, ws)[0]


@situation(f32(16, 32), f32(32, 32))
def shard_map_of_one_axis(x: Any, w: Any) -> Any:
    mapped: Any = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "b"),
        in_specs=(P(None, "b"), P("b")),
        out_specs=P(),
        axis_names={"b"},
    )
    return mapped(x, w).sum(0)


@situation(f32(16, 32), f32(32, 32))
def shard_map_grad(x: Any, w: Any) -> Any:
    mapped: Any = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "b"), in_specs=(P("a", "b"), P("b")), out_specs=P("a")
    )
    return jax.grad(lambda w: jnp.sum(mapped(x, w) ** 2))(w)


@situation(f32(16, 32), f32(32, 32), np.int32(1))
def shard_map_with_branches(x: Any, w: Any, which: Any) -> Any:
    def body(x: Any, w: Any, which: Any) -> Any:
        one = [lambda: lax.psum(x @ w, "b"), lambda: lax.pmean(x[:, :1] + w[:1], "b")]
        return lax.switch(which, one)

    mapped: Any = jax.shard_map(
        body, in_specs=(P("a", "b"), P("b"), P()), out_specs=P("a"), check_vma=False
    )
    return mapped(x, w, which)


def _double_sine(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.sin(x_ref[...]) * 2


@situation(f32(16, 32))
def pallas_interpreted(x: Any) -> Any:
    spec = pl.BlockSpec((4, 32), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = pl.pallas_call(
        _double_sine, out_shape=shape, grid=(4,), in_specs=[spec], out_specs=spec, interpret=True
    )
    return kernel(x * 2).sum(0)


def _softmax(x: Any) -> Any:
    return jax.nn.softmax(x, -1)


_partitioned = custom_partitioning(_softmax)
_partitioned.def_partition(
    partition=lambda mesh, arguments, result: (
        mesh,
        _softmax,
        arguments[0].sharding,
        (arguments[0].sharding,),
    ),
    infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
    sharding_rule="i j -> i j",
    need_replication_factors=("j",),
)


@situation(f32(16, 32), f32(32, 32))
def custom_partitioned(x: Any, w: Any) -> Any:
    return _partitioned(x @ w / 8) @ w


@situation(f32(16, 32), f32(32, 32))
def pure_callback(x: Any, w: Any) -> Any:
    y = x @ w
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jax.pure_callback(np.sin, shape, y, vmap_method="sequential") @ w


@situation(f32(16, 32))
def pure_callback_of_two(x: Any) -> Any:
    shapes = (jax.ShapeDtypeStruct((16, 32), x.dtype), jax.ShapeDtypeStruct((16,), np.int32))

    def both(x: Any) -> Any:
        return np.cos(x), np.argmax(x, 1).astype(np.int32)

    a, b = jax.pure_callback(both, shapes, x + 1, vmap_method="sequential")
    return a * 2, b + 1


@situation(f32(16, 32), f32(3, 32, 32))
def effects_in_any_order(x: Any, ws: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        jax.debug.callback(HEARD.append, x.sum())
        return x @ w / 8, None

    y, _ = lax.scan(body, x, ws)
    io_callback(HEARD.append, None, y.sum())
    return y


@situation(f32(16, 32), f32(3, 32, 32))
def effects_in_order(x: Any, ws: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        x, n = c
        io_callback(HEARD.append, None, n, ordered=True)
        return (x @ w / 8, n + 1), None

    (y, n), _ = lax.scan(body, (x, 0), ws)
    io_callback(HEARD.append, None, n, ordered=True)
    total = jax.ShapeDtypeStruct((), np.float32)
    return y + io_callback(np.float32, total, y.sum(), ordered=True)


@situation(f32(8, 16, 16), f32(8, 16, 4), tolerance=3e-4)
def decompositions(a: Any, b: Any) -> Any:
    s = a @ a.swapaxes(1, 2) + 16 * jnp.eye(16)
    q, r = jnp.linalg.qr(a)
    return (
        jnp.linalg.cholesky(s),
        q @ r,
        jnp.linalg.svd(a, compute_uv=False),
        jnp.linalg.eigvalsh(s),
        lax.linalg.triangular_solve(jnp.linalg.cholesky(s), b, left_side=True, lower=True),
    )


@situation(f32(8, 8, 8), f32(8, 8, 4), tolerance=3e-4)
def systems(a: Any, b: Any) -> Any:
    s = a @ a.swapaxes(1, 2) + 16 * jnp.eye(8)
    return jnp.linalg.solve(s, b), jnp.linalg.inv(s), jnp.linalg.slogdet(s)


@situation(f32(8, 16, 16), tolerance=3e-4)
def decomposition_grads(a: Any) -> Any:
    def spd(a: Any) -> Any:
        return a @ a.swapaxes(1, 2) + 16 * jnp.eye(16)

    return (
        jax.grad(lambda a: jnp.sum(jnp.linalg.cholesky(spd(a))))(a),
        jax.grad(lambda a: jnp.sum(jnp.linalg.eigh(spd(a))[0]))(a),
    )


@situation(f32(16, 16), f32(16, 4), tolerance=3e-4)
def one_matrix(a: Any, b: Any) -> Any:
    s = a @ a.T + 16 * jnp.eye(16)
    return jnp.linalg.solve(s, b), jnp.linalg.svd(a)[1], jnp.linalg.eigh(s)[0]


@situation(f32(64, 8), i32(64, 16), f32(8, 8))
def everything_at_once(table: Any, ids: Any, w: Any) -> Any:
    """A sorted look-up in a remat'd loop around a shard_map."""
    mapped: Any = jax.shard_map(
        lambda x: lax.pmean(x, "a"), in_specs=P("a"), out_specs=P(), check_vma=False
    )

    def body(x: Any, _: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y + lax.top_k(y, 8)[0], mapped(y).sum()

    def loss(table: Any) -> Any:
        y, means = lax.scan(jax.checkpoint(body), table[ids], None, length=2)
        return jnp.sum(y**2) + jnp.sum(means**2)

    return jax.value_and_grad(loss)(table)
