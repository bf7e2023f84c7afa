"""One decoding step of the Llama-style decoder, with a key/value cache.

Shape letters: L layers, B sequences, T positions of the cache, D model width, K key/value heads,
E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, constant, integers, normal
from autoshard.experiments.experts import DECODE_RULES, experts_of
from autoshard.experiments.workloads.attention import Weights, attend, project_qkv, rms_norm
from autoshard.experiments.workloads.llama import (
    SIZES as TRAIN_SIZES,
)
from autoshard.experiments.workloads.llama import (
    LlamaConfig,
    gated_mlp,
    layer_spec,
    params_spec,
    stacked,
)
from autoshard.experiments.workloads.workload import Workload, configured

SIZES: Mapping[str, LlamaConfig] = {
    name: config
    if name == "tiny"
    else replace(config, batch=64, param_dtype=config.dtype, seq=max(1024, config.seq))
    for name, config in TRAIN_SIZES.items()
}
"""As for training, with 64 sequences and the weights in the dtype of the computation."""


def decode_step(
    config: LlamaConfig, params: Any, cache: Any, tokens: jax.Array, position: jax.Array
) -> tuple[Any, jax.Array]:
    """One token for every sequence.

    Args:
        config: The configuration.
        params: The weights, layers stacked.
        cache: Keys ``k`` and values ``v`` of the positions so far, [L, B, T, K, E].
        tokens: The sequences' last tokens [B].
        position: Their position, the same for all; below T.

    Returns:
        The cache with this position filled, and the next token's logits [B, vocab].
    """
    positions = position[None]
    mask = (jnp.arange(config.seq) <= position)[None, :]

    def layer_fn(
        x: jax.Array, layer_and_cache: tuple[Weights, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        layer, old = layer_and_cache
        normed = rms_norm(x, layer["attention_norm"])
        q, k, v = project_qkv(layer, normed, positions, config.rope_theta)
        start = (0, position, 0, 0)
        keys = jax.lax.dynamic_update_slice(old["k"], k.astype(old["k"].dtype), start)
        values = jax.lax.dynamic_update_slice(old["v"], v.astype(old["v"].dtype), start)
        heads = attend(q, keys, values, mask)
        x = x + jnp.einsum("bshe,hed->bsd", heads, layer["wo"].astype(x.dtype))
        x = x + gated_mlp(layer, rms_norm(x, layer["mlp_norm"]))
        return x, {"k": keys, "v": values}

    x = jnp.take(params["embed"], tokens[:, None], axis=0).astype(config.dtype)
    x, new_cache = jax.lax.scan(layer_fn, x, (params["layers"], cache))
    x = rms_norm(x[:, 0], params["final_norm"])
    return new_cache, (x @ params["head"].astype(x.dtype)).astype(jnp.float32)


def llama_decode(size: str = "tiny", **overrides: object) -> Workload:
    """``(params, cache, tokens, position) -> (cache, logits)``, the cache donated.

    The cache starts as if it had been filled by earlier steps, the position in its middle.
    """
    config = configured("llama_decode", SIZES, size, overrides)

    def step(
        params: Any, cache: Any, tokens: jax.Array, position: jax.Array
    ) -> tuple[Any, jax.Array]:
        return decode_step(config, params, cache, tokens, position)

    layers = stacked(layer_spec(config), config.layers)
    params = params_spec(config.width, config.vocab, config.param_dtype, layers)
    entry = ArraySpec(
        (config.layers, config.batch, config.seq, config.kv_heads, config.head_dim),
        ("layers", "cache_batch", "cache_seq", "kv_heads", "head_dim"),
        config.dtype,
        normal(1.0),
    )
    cache = {"k": entry, "v": entry}
    tokens = ArraySpec((config.batch,), ("batch",), "int32", integers(config.vocab))
    position = ArraySpec((), (), "int32", constant(config.seq // 2))
    logits = ArraySpec((config.batch, config.vocab), ("batch", "vocab"))
    arguments, results = (params, cache, tokens, position), (cache, logits)
    return Workload(
        name="llama_decode",
        size=size,
        config=config,
        fn=step,
        arguments=arguments,
        results=results,
        donate_argnums=(1,),
        experts=experts_of(DECODE_RULES, arguments, results),
        description="One decoding step of a Llama-style decoder with a key/value cache",
        source=config.source,
    )
