"""The pieces of a Llama-style attention block, in plain JAX.

Shape letters: B sequences, S positions, D model width, H query heads, K key/value heads, G = H / K
query heads per key/value head, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, normal, ones

Weights = Mapping[str, jax.Array]
"""The weights of one layer by name."""


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Root-mean-square normalisation over the last dimension (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of ``x`` [B, S, heads, E] at ``positions`` [S] (arXiv:2104.09864).

    The two halves of a head rotate against each other, as in the Llama models that are published
    for the transformers library.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def project_qkv(
    layer: Weights, x: jax.Array, positions: jax.Array, theta: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [B, S, H, E] and keys, and values, [B, S, K, E] of ``x`` [B, S, D]."""
    q = jnp.einsum("bsd,dhe->bshe", x, layer["wq"].astype(x.dtype))
    k = jnp.einsum("bsd,dke->bske", x, layer["wk"].astype(x.dtype))
    v = jnp.einsum("bsd,dke->bske", x, layer["wv"].astype(x.dtype))
    return rope(q, positions, theta), rope(k, positions, theta), v


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention (arXiv:2305.13245).

    Args:
        q: Queries [B, S, H, E].
        k: Keys [B, T, K, E].
        v: Values [B, T, K, E].
        mask: Which of the T positions each of the S may see, [S, T].

    Returns:
        The heads' outputs [B, S, H, E].
    """
    b, s, h, e = q.shape
    grouped = q.reshape(b, s, k.shape[2], h // k.shape[2], e)
    scores = jnp.einsum("bskge,btke->bkgst", grouped, k).astype(jnp.float32) * e**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btke->bskge", weights, v).reshape(b, s, h, e)


def self_attention(layer: Weights, x: jax.Array, theta: float) -> jax.Array:
    """Causal self-attention of ``x`` [B, S, D] and its output projection."""
    length = x.shape[1]
    q, k, v = project_qkv(layer, x, jnp.arange(length), theta)
    mask = jnp.tril(jnp.ones((length, length), dtype=bool))
    return jnp.einsum("bshe,hed->bsd", attend(q, k, v, mask), layer["wo"].astype(x.dtype))


def attention_spec(width: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, ArraySpec]:
    """The weights of one attention block with the norm in front of it."""
    kv_axes = ("embed", "kv_heads", "head_dim")
    std = normal(width**-0.5)
    return {
        "attention_norm": ArraySpec((width,), ("embed",), fill=ones),
        "wq": ArraySpec((width, heads, head_dim), ("embed", "heads", "head_dim"), fill=std),
        "wk": ArraySpec((width, kv_heads, head_dim), kv_axes, fill=std),
        "wv": ArraySpec((width, kv_heads, head_dim), kv_axes, fill=std),
        "wo": ArraySpec(
            (heads, head_dim, width),
            ("heads", "head_dim", "embed"),
            fill=normal((heads * head_dim) ** -0.5),
        ),
    }
