"""Small programs that between them use most of what people write in JAX."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Program:
    """A function and arguments for it.

    Attributes:
        fn: The function.
        args: Specifications of its arguments: a shape for normal floats, or an array.
        donate: Positions of donated arguments.
        tolerance: Largest relative error of its values.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    tolerance: float = 2e-5

    def values(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(zlib.crc32(self.fn.__name__.encode()))
        return tuple(jax.tree.map(lambda a: _value(a, rng), self.args, is_leaf=_is_spec))


def f32(*shape: int) -> tuple[str, ...]:
    return ("float32", *map(str, shape))


def bf16(*shape: int) -> tuple[str, ...]:
    return ("bfloat16", *map(str, shape))


def i32(high: int, *shape: int) -> tuple[str, ...]:
    return (f"<{high}", *map(str, shape))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and bool(leaf) and isinstance(leaf[0], str)


def _value(spec: Any, rng: np.random.Generator) -> Any:
    if not _is_spec(spec):
        return spec
    shape = tuple(map(int, spec[1:]))
    if spec[0].startswith("<"):
        return rng.integers(0, int(spec[0][1:]), shape).astype(np.int32)
    if spec[0] == "complex64":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)
    if spec[0] == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    return jnp.asarray(rng.normal(size=shape), spec[0])


PROGRAMS: dict[str, Program] = {}


def program(
    *args: Any, donate: tuple[int, ...] = (), tolerance: float = 2e-5
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = Program(fn, args, donate, tolerance)
        return fn

    return add


@program({"w1": f32(32, 64), "w2": f32(64, 32)}, f32(16, 32), f32(16, 32), donate=(0,))
def mlp_step(w: Any, x: Any, y: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ w["w1"]) @ w["w2"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def _attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[n]) for n in "qkv")
    s = jnp.einsum("bthk,bshk->bhts", q, k) / 4.0
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
    return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(s), v, w["o"])


_QKVO = {"q": f32(32, 8, 16), "k": f32(32, 8, 16), "v": f32(32, 8, 16), "o": f32(8, 16, 32)}


@program(_QKVO, f32(8, 16, 32))
def attention(w: Any, x: Any) -> Any:
    return _attention(w, x)


@program(_QKVO, f32(8, 16, 32))
def attention_grad(w: Any, x: Any) -> Any:
    return jax.grad(lambda w, x: jnp.sum(_attention(w, x) ** 2), argnums=(0, 1))(w, x)


def _layers(w: Any, x: Any, wrap: Callable[[Any], Any]) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w[0] / 8) @ w[1] / 8, None  # tame: no error grows

    return jnp.mean(lax.scan(wrap(layer), x, w)[0] ** 2)


@program((f32(4, 32, 64), f32(4, 64, 32)), f32(16, 32), donate=(0,))
def scan_layers_grad(w: Any, x: Any) -> Any:
    g = jax.grad(lambda w: _layers(w, x, lambda f: f))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, g)


@program((f32(4, 32, 64), f32(4, 64, 32)), f32(16, 32), donate=(0,))
def scan_remat_grad(w: Any, x: Any) -> Any:
    g = jax.grad(lambda w: _layers(w, x, jax.checkpoint))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, g)


@program(f32(8, 16, 64), f32(64, 128), f32(64, 32))
def grouped_heads(x: Any, wq: Any, wk: Any) -> Any:
    q = (x @ wq).reshape(8, 16, 2, 4, 16)
    k = (x @ wk).reshape(8, 16, 2, 16)
    s = jnp.einsum("btgrk,bsgk->bgrts", q, k)
    return jnp.einsum("bgrts,bsgk->btgrk", jax.nn.softmax(s), k).reshape(8, 16, 128)


@program(f32(64, 32), i32(64, 8, 16), f32(8, 16, 32))
def embedding_grad(table: Any, ids: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda t: jnp.mean((t[ids] - y) ** 2))(table)


@program(f32(16, 32), f32(32, 64), i32(64, 16))
def cross_entropy_grad(x: Any, w: Any, ids: Any) -> Any:
    def loss(w: Any) -> Any:
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logits, ids[:, None], axis=1))

    return jax.value_and_grad(loss)(w)


@program(f32(8, 16, 32), f32(32), f32(32))
def layernorm_grad(x: Any, scale: Any, bias: Any) -> Any:
    def norm(x: Any, scale: Any, bias: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return jnp.sum(jnp.sin((x - mean) * lax.rsqrt(var + 1e-5) * scale + bias))

    return jax.grad(norm, argnums=(0, 1, 2))(x, scale, bias)


@program(f32(8, 16, 16, 8), f32(3, 3, 8, 16))
def conv_same(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@program(f32(8, 16, 16, 8), f32(3, 3, 8, 16))
def conv_grad(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: jnp.sum(jnp.tanh(conv_same(x, w))), argnums=(0, 1))(x, w)


@program(f32(8, 16, 16, 8), f32(3, 3, 1, 16))
def conv_depthwise_strided(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
    )


@program(f32(8, 16, 16, 8), f32(3, 3, 1, 16))
def conv_depthwise_grad(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: jnp.sum(jnp.tanh(conv_depthwise_strided(x, w))), argnums=(0, 1))(
        x, w
    )


@program(f32(8, 16, 32), f32(3, 4, 16), f32(5, 1, 32))
def conv_grouped_grad(x: Any, w: Any, each: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")

    def loss(x: Any, w: Any, each: Any) -> Any:
        y = lax.conv_general_dilated(
            x, w, (2,), "SAME", dimension_numbers=numbers, feature_group_count=8
        )
        z = lax.conv_general_dilated(
            x, each, (1,), "SAME", (1,), (2,), numbers, feature_group_count=32
        )
        batches = lax.conv_general_dilated(
            x, w[:, :1].repeat(32, 1), (1,), "SAME", dimension_numbers=numbers, batch_group_count=4
        )
        return jnp.sum(jnp.tanh(y)) + jnp.sum(z**2) + jnp.sum(jnp.sin(batches))

    return jax.grad(loss, argnums=(0, 1, 2))(x, w, each)


@program(f32(8, 16, 16), f32(1, 16, 32), f32(5, 16, 8))
def conv_one_dimension(x: Any, w: Any, dilated: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return (
        lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers),
        lax.conv_general_dilated(
            x, dilated, (1,), "SAME", rhs_dilation=(2,), dimension_numbers=numbers
        ),
        lax.conv_general_dilated(
            x, dilated, (1,), [(2, 2)], lhs_dilation=(2,), dimension_numbers=numbers
        ),
    )


@program(f32(16, 32))
def cumulative(x: Any) -> Any:
    return jnp.cumsum(x, 1), jnp.cumsum(x, 0), lax.cummax(x, 1), jnp.cumprod(x * 0.1 + 1, 0)


@program(f32(16, 32))
def sorting(x: Any) -> Any:
    return jnp.sort(x, 1), jnp.argsort(x, 0), lax.top_k(x, 8)


@program(f32(16, 32))
def extremes(x: Any) -> Any:
    return jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.max(x, 0), jnp.min(x), jnp.any(x > 2, 1)


@program(i32(32, 16), f32(32, 16))
def one_hot(ids: Any, w: Any) -> Any:
    return jax.nn.one_hot(ids, 32) @ w


@program(f32(8, 16, 4, 8), f32(8, 1, 4, 8), np.int32(5), donate=(0,))
def kv_cache(cache: Any, new: Any, at: Any) -> Any:
    cache = lax.dynamic_update_slice(cache, new, (0, at, 0, 0))
    s = jnp.einsum("bqhk,bshk->bhqs", new, cache)
    s = jnp.where(jnp.arange(16) <= at, s, -1e9)
    return cache, jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(s), cache)


@program(f32(16, 32), np.int32(3), np.int32(8))
def dynamic_slices(x: Any, i: Any, j: Any) -> Any:
    a = lax.dynamic_slice(x, (i, j), (8, 16))
    return a, lax.dynamic_slice_in_dim(x, i, 4, 0), lax.dynamic_update_slice(x, a, (j, i))


@program(f32(16, 32), f32(32, 32), np.bool_(True), np.int32(2))
def branches(x: Any, w: Any, flag: Any, which: Any) -> Any:
    y = lax.cond(flag, lambda x: x @ w, lambda x: x * 2.0, x)
    return lax.switch(which, [lambda y: y, lambda y: jnp.flip(y, 0), lambda y: (y @ w).T.T], y)


@program(f32(16, 32), f32(32, 32))
def while_until(x: Any, w: Any) -> Any:
    def body(c: Any) -> Any:
        x, n = c
        return jnp.tanh(x @ w / 8), n + 1

    return lax.while_loop(lambda c: (c[1] < 9) & (jnp.sum(c[0]) < 1e6), body, (x, 0))


@program(f32(16, 32), f32(32, 32), np.int32(3))
def fori_dynamic(x: Any, w: Any, n: Any) -> Any:
    return lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w / 8) + i, x)


@program(f32(16, 32), f32(3, 32, 32), f32(2, 16))
def nested_scans(x: Any, ws: Any, cs: Any) -> Any:
    def outer(x: Any, w: Any) -> Any:
        def inner(x: Any, c: Any) -> Any:
            return jnp.sin(x @ w / 8) + c[:, None], x.sum(1)

        return lax.scan(inner, x, cs)

    return lax.scan(outer, x, ws)


@program(f32(8, 16), f32(6, 16, 16))
def scan_reverse(x: Any, ws: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.sin(x @ w / 8), x[0]), x, ws, reverse=True)


@program(f32(16, 32), f32(16, 32))
def moving(x: Any, y: Any) -> Any:
    return (
        jnp.roll(x, 3, 1),
        jnp.concatenate([x, y], 0),
        jnp.concatenate([x, y[:, :8]], 1),
        jnp.pad(x, ((1, 2), (0, 8))),
        x[::-1],
        jnp.flip(y, 1),
    )


@program(f32(16, 32))
def slicing(x: Any) -> Any:
    return x[4:12], x[:, 8:24], x[::2], x[1::3, 5], x[3], lax.slice(x, (0, 1), (16, 17))


@program(f32(16, 32), f32(16, 8, 4))
def reshaping(x: Any, y: Any) -> Any:
    return (
        x.reshape(16, 4, 8).transpose(1, 0, 2),
        x.reshape(512),
        x.reshape(4, 4, 32).sum(1),
        y.reshape(16, 32) + x,
        x.T.reshape(8, 64),
        jnp.broadcast_to(x[:, None], (16, 8, 32)),
    )


@program(f32(16, 32), np.array([3, 7], np.uint32))
def random_inside(x: Any, key: Any) -> Any:
    key = jax.random.wrap_key_data(key)
    a, b = jax.random.split(key)
    keep = jax.random.bernoulli(a, 0.5, x.shape)
    return jnp.where(keep, x, 0.0) + jax.random.normal(b, x.shape), jax.random.randint(
        a, (16,), 0, 9
    )


@jax.custom_vjp
def _clip(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


_clip.defvjp(lambda x: (_clip(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0.1 * g),))


@program(f32(16, 32), f32(32, 32))
def custom_vjp(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(_clip(x @ w) ** 2))(w)


@jax.jit
def _inner(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@program(f32(16, 32), f32(32, 32))
def nested_jit(x: Any, w: Any) -> Any:
    return jax.vmap(jax.grad(lambda r: jnp.sum(_inner(_inner(r, w), w))))(x)


@program(f32(7, 12), f32(12, 10), f32(1, 10))
def uneven(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x @ w + b), (x @ w).sum(0, keepdims=True), x.max()


@program(f32(0, 16), f32(16, 32), f32(16, 0))
def size_zero(x: Any, w: Any, z: Any) -> Any:
    return x @ w, jnp.concatenate([w, z.T @ w[:16]], 0), z.sum(), x.T @ x


@program(bf16(16, 32), bf16(32, 32), tolerance=3e-2)
def half_precision(x: Any, w: Any) -> Any:
    y = jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.float32)
    return jax.nn.silu(y).astype(jnp.bfloat16), jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


@program(i32(100, 16, 32), i32(100, 32, 16))
def integers(x: Any, y: Any) -> Any:
    a, b = x.astype(jnp.int8), y.astype(jnp.int8)
    return lax.dot(a, b, preferred_element_type=jnp.int32), a.sum(0), (x // 7) % 5, x[0] << 2


@program(("complex64", "16", "32"), ("complex64", "32", "16"))
def complex_numbers(x: Any, y: Any) -> Any:
    return x @ y, jnp.abs(x), jnp.conj(x).sum(0), jnp.fft.fft(x, axis=1), x.real


@program(("bool", "16", "32"), f32(16, 32))
def booleans(m: Any, x: Any) -> Any:
    return m & (x > 0), jnp.all(m, 0), jnp.where(m, x, -x), m.sum(1), ~m


@program(
    f32(
        16,
    )
)
def constants(x: Any) -> Any:
    return jnp.arange(16), jnp.ones((8, 16)) * 3.0, np.float32(2.0), jnp.eye(16)


@program(
    f32(16, 32),
    f32(
        4,
    ),
    f32(8, 8),
)
def passing_through(x: Any, unused: Any, y: Any) -> Any:
    z = y * 2.0
    return x, {"same": z, "again": z}, x, ()


@program({"a": f32(), "b": {}}, np.float32(3.0), np.int32(4))
def scalars(tree: Any, x: Any, n: Any) -> Any:
    return tree["a"] * x + n, {}, jnp.sin(x), n


@program(
    f32(16, 32),
    f32(
        32,
    ),
    donate=(0,),
)
def donated(x: Any, b: Any) -> Any:
    return jnp.roll(x, 1, 0) * b, x.sum()


@program(f32(8, 4, 16), i32(16, 4, 8))
def batched_gather(x: Any, ids: Any) -> Any:
    picked = jnp.take_along_axis(x.transpose(1, 0, 2), ids[..., None], axis=2)
    return picked, jax.vmap(lambda r, i: r[i], in_axes=(0, 1))(x[:, 0], ids)


@program(f32(16, 8), i32(16, 32), f32(32, 8))
def scatters(x: Any, ids: Any, u: Any) -> Any:
    return (
        x.at[ids].add(u),
        x.at[ids].max(u),
        x.at[ids[0]].set(u[0]),
        jax.ops.segment_sum(u, ids, 16),
        x.at[3:7].set(1.0),
    )


@program(f32(8, 16, 16))
def windows(x: Any) -> Any:
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")
    smooth = lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME")
    return pooled, smooth


@program(f32(8, 16, 16))
def max_pool_grad(x: Any) -> Any:
    def pooled(x: Any) -> Any:
        return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID") ** 2)

    return jax.grad(pooled)(x)


@program(f32(8, 16, 16), f32(8, 16, 8))
def linear_algebra(a: Any, b: Any) -> Any:
    s = a @ a.swapaxes(1, 2) + 16 * jnp.eye(16)
    return jnp.linalg.cholesky(s), lax.linalg.triangular_solve(
        jnp.linalg.cholesky(s), b, left_side=True, lower=True
    )


@program(f32(16, 32), f32(32, 16))
def outer_products(x: Any, y: Any) -> Any:
    return jnp.einsum("i,j->ij", x[0], y[:, 0]), jnp.vdot(x.ravel(), x.ravel()), (x @ y).trace()


@program(f32(16, 8), f32(16, 32), f32(4, 32, 64), f32(4, 64, 32))
def experts(gate: Any, x: Any, w1: Any, w2: Any) -> Any:
    probs, which = lax.top_k(jax.nn.softmax(gate[:, :4]), 2)
    mask = jax.nn.one_hot(which, 4)
    place = jnp.cumsum(mask.reshape(-1, 4), 0).reshape(mask.shape) * mask - mask
    slots = jax.nn.one_hot(place.astype(jnp.int32), 8) * mask[..., None]
    dispatch = slots.sum(1)
    combine = (slots * probs[..., None, None]).sum(1)
    y = jnp.einsum("tec,td->ecd", dispatch, x)
    y = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", y, w1)), w2)
    return jnp.einsum("tec,ecd->td", combine, y)


@program(f32(16, 32), f32(32, 64), f32(64, 32))
def shared_operands(x: Any, w: Any, v: Any) -> Any:
    h = x @ w
    return h @ v + x, h @ w.T, (x * x).sum(), jnp.dot(x, x.T) + jnp.dot(x, x.T).T


@program(f32(16, 32), f32(4, 32))
def carried_cache(x: Any, ys: Any) -> Any:
    def body(i: Any, c: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(c, ys[i][None] + c[i][None], i * 2, 0)

    return lax.fori_loop(0, 4, body, x)


@program(f32(8, 32))
def reductions(x: Any) -> Any:
    variadic = lax.reduce(
        (x, x * 2),
        (np.float32(0), np.float32(0)),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (1,),
    )
    return variadic, jnp.prod(x, 1), x.sum((0, 1)), jax.nn.logsumexp(x, 0), jnp.var(x, 1)
