"""Programs for what the zoo leaves out: control flow, recomputation, random numbers, odd types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.zoo import Program, f32, i32

SITUATIONS: dict[str, Program] = {}


def situation(
    *args: Any, donate: tuple[int, ...] = (), tolerance: float = 2e-5, name: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to :data:`SITUATIONS`."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        fn.__name__ = name or fn.__name__
        SITUATIONS[fn.__name__] = Program(fn, args, donate, tolerance)
        return fn

    return add


@situation(f32(16, 32), f32(3, 32, 32), i32(9, 3))
def scan_with_many_carries(x: Any, ws: Any, ns: Any) -> Any:
    def body(c: Any, a: Any) -> Any:
        x, y, n = c
        x = jnp.tanh(x @ a[0] / 8) + y
        return (x, y * 0.5 + x, n + a[1]), (x.sum(0), n)

    return lax.scan(body, (x, x * 2, jnp.int32(0)), (ws, ns))


@situation(f32(16, 32), f32(4, 32, 32))
def scan_reverse_grad(x: Any, ws: Any) -> Any:
    def loss(ws: Any) -> Any:
        y, ys = lax.scan(lambda x, w: (jnp.tanh(x @ w / 8), x * 2), x, ws, reverse=True)
        return jnp.sum(y**2) + jnp.sum(ys**2)

    return jax.grad(loss)(ws)


@situation(f32(16, 32), f32(4, 32, 32))
def scan_unrolled(x: Any, ws: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w / 8), x.sum()), x, ws, unroll=2)


@situation(f32(16, 32), f32(32, 32))
def scan_of_scans_of_branches(x: Any, w: Any) -> Any:
    def inner(c: Any, j: Any) -> Any:
        return lax.cond(j > 1, lambda c: jnp.tanh(c @ w), lambda c: c * 0.5, c), None

    def outer(c: Any, _: Any) -> Any:
        c, _ = lax.scan(inner, c, jnp.arange(3))
        return c, c.mean()

    return lax.scan(outer, x, jnp.arange(2))


@situation(f32(16, 32), f32(32, 32))
def fori_static_grad(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.sum(lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w / 8) + i, x))

    return jax.grad(loss)(w)


@situation(f32(16, 32), f32(32, 32), np.int32(2))
def fori_from_a_dynamic_bound(x: Any, w: Any, n: Any) -> Any:
    return lax.fori_loop(n, n + 2, lambda i, x: jnp.tanh(x @ w / 8), x)


@situation(f32(4, 16, 32), f32(4, 32, 32))
def while_under_vmap(x: Any, w: Any) -> Any:
    def one(x: Any, w: Any) -> Any:
        def more(c: Any) -> Any:
            return (c[1] < 5) & (jnp.abs(c[0]).sum() < 1e4)

        return lax.while_loop(more, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))

    return jax.vmap(one)(x, w)


@situation(f32(16, 32), f32(32, 32), np.bool_(False))
def cond_grad(x: Any, w: Any, flag: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.sum(lax.cond(flag, lambda w: jnp.tanh(x @ w), lambda w: x @ w.T, w))

    return jax.grad(loss)(w)


@situation(f32(16, 32), f32(3, 32, 32), np.int32(1))
def switch_in_scan(x: Any, ws: Any, n: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        x, i = c
        x = lax.switch(i % 3, [lambda x: x @ w, jnp.sin, lambda x: x + w[0]], x)
        return (x, i + 1), x[0]

    return lax.scan(body, (x, n), ws)


def _block(w: Any, x: Any) -> Any:
    h = checkpoint_name(x @ w[0] / 8, "hidden")
    return x + jnp.tanh(h) @ w[1] / 8  # tame: no error grows


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "plain_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "one_name": jax.checkpoint_policies.save_only_these_names("hidden"),
    "all_but_one_name": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
}


def recomputed(policy: str) -> Callable[..., Any]:
    """A gradient through scanned blocks of which ``policy`` says what is kept."""

    def grad(w: Any, x: Any) -> Any:
        block = jax.checkpoint(lambda x, w: (_block(w, x), None), policy=POLICIES[policy])
        return jax.grad(lambda w: jnp.mean(lax.scan(block, x, w)[0] ** 2))(w)

    return grad


for _policy in POLICIES:
    situation((f32(4, 32, 64), f32(4, 64, 32)), f32(16, 32), name=f"remat_{_policy}")(
        recomputed(_policy)
    )


@situation((f32(32, 64), f32(64, 32)), f32(16, 32))
def remat_without_a_loop(w: Any, x: Any) -> Any:
    block = jax.checkpoint(_block, policy=POLICIES["nothing"])
    return jax.grad(lambda w: jnp.mean(block(w, block(w, x)) ** 2))(w)


@situation(f32(16, 32), f32(32, 32))
def kept_by_the_host(x: Any, w: Any) -> Any:
    y = jax.device_put(x @ w, jax.memory.Space.Host)
    return jax.device_put(y, jax.memory.Space.Device) * 2, y


@situation(f32(16, 32), f32(32, 32))
def remat_offloaded(x: Any, w: Any) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(x @ w, "hidden")) @ w

    return jax.grad(lambda w: jnp.sum(jax.checkpoint(block, policy=policy)(x, w)))(w)


@situation(f32(16, 32), f32(32, 32))
def barriers(x: Any, w: Any) -> Any:
    a, b = lax.optimization_barrier((x @ w, x))
    return a + b


@jax.custom_jvp
def _softplus(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


_softplus.defjvp(lambda p, t: (_softplus(p[0]), t[0] * jax.nn.sigmoid(p[0])))


@situation(f32(16, 32), f32(32, 32))
def custom_jvp(x: Any, w: Any) -> Any:
    forward = jax.jvp(lambda x: _softplus(x @ w / 8), (x,), (x,))
    return jax.grad(lambda w: jnp.sum(_softplus(x @ w / 8)))(w), forward


for _impl, _words in (("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)):

    def _draws(x: Any, words: Any, impl: str = _impl) -> Any:
        a, b = jax.random.split(jax.random.wrap_key_data(words, impl=impl))
        return (
            x + jax.random.normal(a, x.shape),
            jax.random.uniform(b, (16,)),
            jax.random.permutation(b, 16),
            jax.random.key_data(jax.random.fold_in(b, 3)),
            jax.random.categorical(a, x),
        )

    situation(f32(16, 32), np.arange(1, _words + 1, dtype=np.uint32), name=f"rng_{_impl}")(_draws)


@situation(f32(16, 32), i32(50, 16, 32))
def sorts(x: Any, n: Any) -> Any:
    return (
        lax.sort((n, x), num_keys=1),
        jnp.sort(x, 0),
        jnp.argsort(n, 1, stable=True),
        lax.top_k(x, 4),
        lax.top_k(n, 3),
        jnp.median(x, 1),
    )


@situation(f32(32), f32(16, 32))
def searches(x: Any, y: Any) -> Any:
    return jnp.searchsorted(jnp.sort(x), y)


@situation(f32(16, 32))
def top_k_grad(x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(lax.top_k(x, 4)[0] ** 2))(x), lax.approx_max_k(x, 4)


@situation(f32(64, 32), i32(64, 16, 8), f32(2, 16, 8, 4, 8), f32(16, 8), i32(8, 16))
def gathers(table: Any, ids: Any, cache: Any, x: Any, at: Any) -> Any:
    rows = jnp.arange(16)
    return (
        table[ids].sum(1),
        jnp.take(table, ids, 0),
        cache[0, :, 3],
        x[rows, at],
        jnp.take_along_axis(x, at[:, None], 1),
        x.at[rows, at].set(0.0),
        table.at[ids].add(1.0),
    )


@situation(f32(16, 8, 4, 8), f32(16, 1, 4, 8), i32(8, 16), donate=(0,))
def cache_at_a_place_per_row(cache: Any, new: Any, at: Any) -> Any:
    def put(c: Any, n: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(c, n, (i, 0, 0))

    cache = jax.vmap(put)(cache, new, at)
    return cache, jnp.einsum("bqhk,bshk->bhqs", new, cache)


@situation(f32(16, 32), f32(8, 4), np.int32(3), np.int32(4))
def dynamic_places(x: Any, u: Any, i: Any, j: Any) -> Any:
    return (
        lax.dynamic_update_slice(x, u, (i, j)),
        lax.dynamic_slice(x, (i, j), (4, 8)),
        lax.dynamic_index_in_dim(x, i, 0),
        lax.dynamic_update_index_in_dim(x, x[0], i, 0),
        x[i],
        x.at[i].set(1.0),
        x.at[:, j].add(2.0),
        jax.grad(lambda x: lax.dynamic_slice(x, (i, j), (4, 8)).sum() * 2)(x),
    )


_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "strided": {"window_strides": (2, 2), "padding": "SAME"},
    "dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
    "transposed": {
        "window_strides": (1, 1),
        "padding": [(2, 2), (2, 2)],
        "lhs_dilation": (2, 2),
    },
    "grouped": {"window_strides": (1, 1), "padding": "VALID", "feature_group_count": 2},
}

for _name, _options in _CONVOLUTIONS.items():

    def _convolution(x: Any, w: Any, options: Any = _options) -> Any:
        w = w[:, :, : 8 // options.get("feature_group_count", 1)]

        def conv(x: Any, w: Any) -> Any:
            return lax.conv_general_dilated(
                x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
            )

        return conv(x, w), jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), argnums=(0, 1))(x, w)

    situation(f32(8, 16, 16, 8), f32(3, 3, 8, 16), name=f"conv_{_name}")(_convolution)


@situation(f32(8, 8, 8, 8, 4), f32(3, 3, 3, 4, 8))
def conv_in_space(x: Any, w: Any) -> Any:
    numbers = ("NDHWC", "DHWIO", "NDHWC")
    return lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=numbers)


@situation(f32(16, 32))
def cumulatives(x: Any) -> Any:
    def linear(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return (
        jnp.cumsum(x, 0),
        lax.cumlogsumexp(x, 1),
        lax.cummin(x, 0, reverse=True),
        lax.associative_scan(jnp.add, x, axis=0),
        lax.associative_scan(linear, (x, x), axis=1),
        jax.grad(lambda x: jnp.sum(jnp.cumsum(x, 1) ** 2))(x),
        jax.grad(lambda x: lax.cumlogsumexp(x, 0).sum())(x),
    )


@situation(f32(8, 16, 16, 4))
def pools(x: Any) -> Any:
    def largest(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def summed(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    grads = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (largest, summed))
    return largest(x), summed(x), *grads


@situation(f32(16, 8, 32), ("complex64", "16", "8", "8"))
def ffts(x: Any, c: Any) -> Any:
    return (
        jnp.fft.rfft(x),
        jnp.fft.fft2(c),
        jnp.fft.ifft(c, axis=0),
        jnp.fft.irfft(jnp.fft.rfft(x)),
        jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(x)) ** 2))(x),
    )


@situation(("complex64", "16", "32"), ("complex64", "32", "16"))
def complex_grads(x: Any, y: Any) -> Any:
    return (
        jax.grad(lambda x: jnp.abs(x @ y).sum())(x),
        jnp.exp(1j * x.real),
        x.conj().T @ x,
        lax.complex(x.real, y.T.real),
    )


@situation(i32(100, 16, 32), i32(100, 32, 16))
def four_bits(x: Any, y: Any) -> Any:
    a, b = (x % 8).astype(jnp.int4), (y % 8).astype(jnp.uint4)
    product = a.astype(jnp.int8) @ b.astype(jnp.int8)
    return a + a, b.astype(jnp.int32).sum(0), product.astype(jnp.int32)


@situation(f32(16, 32), f32(32, 16))
def eight_bit_floats(x: Any, y: Any) -> Any:
    a, b = x.astype(jnp.float8_e4m3fn), y.astype(jnp.float8_e5m2)
    return lax.dot(a, b, preferred_element_type=jnp.float32), a.astype(jnp.float32) * 2, a


@situation(f32(16, 32), tolerance=1e-2)
def sixteen_bit_floats(x: Any) -> Any:
    a = x.astype(jnp.float16)
    return a @ a.T, a.sum(0), jnp.exp(a)


@situation(f32(0, 16), f32(16, 32), f32(16, 0), f32())
def nothing_in_it(x: Any, w: Any, z: Any, s: Any) -> Any:
    return (
        jnp.sort(x, 0),
        x @ w,
        jnp.cumsum(z, 1),
        lax.scan(lambda c, a: (c + a.sum(), a), s, x),
        z @ x,
        jnp.concatenate([x, w[:, :16]]),
        s + 1,
        x.reshape(-1),
    )


@situation(f32(16, 32))
def special_functions(x: Any) -> Any:
    special = jax.scipy.special
    return (
        special.erfinv(jnp.tanh(x)),
        special.gammaln(jnp.abs(x) + 1),
        special.digamma(jnp.abs(x) + 1),
        special.i0e(x),
        jnp.sinh(x),
        jnp.nextafter(x, x + 1),
        lax.population_count(lax.bitcast_convert_type(x, jnp.int32)),
        lax.reduce_precision(x, 5, 10),
    )
