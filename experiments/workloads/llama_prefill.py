"""Prefill of the Llama-style decoder: whole prompts at once, which fill the key/value cache.

Shape letters: L layers, B prompts, S positions of a prompt, T positions of the cache, D model
width, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, Fill, integers, zeros
from autoshard.experiments.experts import PREFILL_RULES, experts_of
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


@dataclass(frozen=True, slots=True)
class PrefillConfig(LlamaConfig):
    """Sizes of the decoder and of the prompts; ``seq`` is the length of the cache.

    Attributes:
        prompt: Positions of a prompt, padding included; at most ``seq``.
    """

    prompt: int = 16


def _prefilled(config: LlamaConfig, **sizes: Any) -> PrefillConfig:
    changed = replace(config, param_dtype=config.dtype)
    return PrefillConfig(**{**asdict(changed), **sizes})


SIZES: Mapping[str, PrefillConfig] = {
    "tiny": PrefillConfig(),
    "small": _prefilled(TRAIN_SIZES["small"], seq=256, prompt=128),
    "8b": _prefilled(TRAIN_SIZES["8b"], batch=16, seq=8192, prompt=4096),
    "70b": _prefilled(TRAIN_SIZES["70b"], batch=16, seq=8192, prompt=4096),
}
"""As for training, the weights in the dtype of the computation; prompts and cache chosen here."""


def prefill(
    config: PrefillConfig, params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array
) -> tuple[Any, jax.Array]:
    """All prompts' keys and values, and what follows each prompt.

    Args:
        config: The configuration.
        params: The weights, layers stacked.
        cache: Keys ``k`` and values ``v``, [L, B, T, K, E]; the first S positions are overwritten.
        tokens: The prompts [B, S], padded at their end.
        lengths: How many tokens of each prompt are no padding [B].

    Returns:
        The cache, where a prompt's padding has left keys that decoding overwrites before it looks
        at them, and the logits [B, vocab] that follow each prompt's last token.
    """
    positions = jnp.arange(config.prompt)
    mask = positions[None, :] <= positions[:, None]

    def layer_fn(
        x: jax.Array, layer_and_cache: tuple[Weights, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        layer, old = layer_and_cache
        normed = rms_norm(x, layer["attention_norm"])
        q, k, v = project_qkv(layer, normed, positions, config.rope_theta)
        heads = attend(q, k, v, mask)
        x = x + jnp.einsum("bshe,hed->bsd", heads, layer["wo"].astype(x.dtype))
        x = x + gated_mlp(layer, rms_norm(x, layer["mlp_norm"]))
        start = (0, 0, 0, 0)
        keys = jax.lax.dynamic_update_slice(old["k"], k.astype(old["k"].dtype), start)
        values = jax.lax.dynamic_update_slice(old["v"], v.astype(old["v"].dtype), start)
        return x, {"k": keys, "v": values}

    x = jnp.take(params["embed"], tokens, axis=0).astype(config.dtype)
    x, new_cache = jax.lax.scan(layer_fn, x, (params["layers"], cache))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    last = rms_norm(last, params["final_norm"])
    return new_cache, (last @ params["head"].astype(x.dtype)).astype(jnp.float32)


def _between(low: int, high: int) -> Fill:
    """Independent whole numbers from ``low`` to ``high``, both included."""
    return lambda rng, shape: rng.integers(low, high + 1, size=shape)


def llama_prefill(size: str = "tiny", **overrides: object) -> Workload:
    """``(params, cache, tokens, lengths) -> (cache, logits)``, the cache donated.

    Raises:
        InputError: The prompts do not fit into the cache.
        UnknownNameError: There is no such size or field.
    """
    config = configured("llama_prefill", SIZES, size, overrides)
    if config.prompt > config.seq:
        raise InputError(
            f"prompts of {config.prompt} positions do not fit into a cache of {config.seq}",
            fix="choose a prompt that is no longer than seq",
        )

    def step(
        params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[Any, jax.Array]:
        return prefill(config, params, cache, tokens, lengths)

    layers = stacked(layer_spec(config), config.layers)
    params = params_spec(config.width, config.vocab, config.param_dtype, layers)
    entry = ArraySpec(
        (config.layers, config.batch, config.seq, config.kv_heads, config.head_dim),
        ("layers", "cache_batch", "cache_seq", "kv_heads", "head_dim"),
        config.dtype,
        zeros,
    )
    cache = {"k": entry, "v": entry}
    tokens = ArraySpec(
        (config.batch, config.prompt), ("batch", "seq"), "int32", integers(config.vocab)
    )
    filled = _between(max(1, config.prompt // 2), config.prompt)
    lengths = ArraySpec((config.batch,), ("batch",), "int32", filled)
    logits = ArraySpec((config.batch, config.vocab), ("batch", "vocab"))
    arguments, results = (params, cache, tokens, lengths), (cache, logits)
    return Workload(
        name="llama_prefill",
        size=size,
        config=config,
        fn=step,
        arguments=arguments,
        results=results,
        donate_argnums=(1,),
        experts=experts_of(PREFILL_RULES, arguments, results),
        description="Prefill of prompts by a Llama-style decoder, which fills the key/value cache",
        source=config.source,
    )
