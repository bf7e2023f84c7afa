"""A Llama-style decoder and its train step, scanned over its layers or unrolled.

Token embedding, RMSNorm, grouped-query attention with rotary positions, gated MLP, untied output
head, cross-entropy, Adam. Shape letters: B sequences, S positions, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, PyTree, integers, normal, ones
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.attention import (
    Weights,
    attention_spec,
    rms_norm,
    self_attention,
)
from autoshard.experiments.workloads.training import adam_step, cross_entropy, state_spec
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the decoder.

    Attributes:
        width: Model width.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Key/value heads; divides ``heads``.
        head_dim: Width of a head.
        hidden: Width inside the gated MLP.
        vocab: Number of tokens.
        batch: Sequences in a step.
        seq: Positions of a sequence; for decoding, of the cache.
        rope_theta: Base of the rotary frequencies.
        dtype: Of the computation, and of the cache.
        param_dtype: Of the weights.
        remat: Whether the backward pass computes each layer again instead of keeping what is in it.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    hidden: int = 128
    vocab: int = 256
    batch: int = 8
    seq: int = 32
    rope_theta: float = 10_000.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = True
    source: str = "sizes chosen here, in the proportions of the published models"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} key/value heads",
                fix="choose kv_heads that divides heads",
            )


LLAMA_3_1_8B = LlamaConfig(
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=14336,
    vocab=128_256,
    batch=64,
    seq=8192,
    rope_theta=500_000.0,
    dtype="bfloat16",
    source="Llama 3.1 8B: arXiv:2407.21783, table 3, and meta-llama/llama-models; batch and "
    "sequence chosen here (the context of pre-training is 8192)",
)
SIZES: Mapping[str, LlamaConfig] = {
    "tiny": LlamaConfig(),
    "small": LlamaConfig(
        width=256, layers=4, heads=8, kv_heads=4, head_dim=32, hidden=768, vocab=2048, seq=128
    ),
    "8b": LLAMA_3_1_8B,
    "70b": replace(
        LLAMA_3_1_8B,
        width=8192,
        layers=80,
        heads=64,
        hidden=28672,
        source=LLAMA_3_1_8B.source.replace("8B", "70B"),
    ),
}


def gated_mlp(layer: Weights, x: jax.Array) -> jax.Array:
    """SwiGLU MLP of ``x`` [B, S, D] (arXiv:2002.05202)."""
    gate = jax.nn.silu(x @ layer["w_gate"].astype(x.dtype))
    return (gate * (x @ layer["w_up"].astype(x.dtype))) @ layer["w_down"].astype(x.dtype)


def decoder_layer(layer: Weights, x: jax.Array, theta: float) -> jax.Array:
    """One layer: attention and gated MLP, each normalised in front and added to ``x`` [B, S, D]."""
    x = x + self_attention(layer, rms_norm(x, layer["attention_norm"]), theta)
    return x + gated_mlp(layer, rms_norm(x, layer["mlp_norm"]))


def forward(config: LlamaConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """Logits [B, S, vocab] of ``tokens`` [B, S].

    ``params["layers"]`` is either one tree whose arrays have the layers in front, which is scanned,
    or a list with a tree for each layer.
    """

    def layer_fn(layer: Weights, x: jax.Array) -> jax.Array:
        return decoder_layer(layer, x, config.rope_theta)

    if config.remat:
        layer_fn = jax.checkpoint(layer_fn)
    x = jnp.take(params["embed"], tokens, axis=0).astype(config.dtype)
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x = layer_fn(layer, x)
    else:
        x, _ = jax.lax.scan(lambda x, layer: (layer_fn(layer, x), None), x, params["layers"])
    x = rms_norm(x, params["final_norm"])
    logits: jax.Array = x @ params["head"].astype(x.dtype)
    return logits


def layer_spec(config: LlamaConfig) -> dict[str, ArraySpec]:
    """The weights of one layer."""
    d, f = config.width, config.hidden
    layer = {
        **attention_spec(d, config.heads, config.kv_heads, config.head_dim),
        "mlp_norm": ArraySpec((d,), ("embed",), fill=ones),
        "w_gate": ArraySpec((d, f), ("embed", "mlp"), fill=normal(d**-0.5)),
        "w_up": ArraySpec((d, f), ("embed", "mlp"), fill=normal(d**-0.5)),
        "w_down": ArraySpec((f, d), ("mlp", "embed"), fill=normal(f**-0.5)),
    }
    return {name: replace(spec, dtype=config.param_dtype) for name, spec in layer.items()}


def stacked(layer: PyTree, layers: int) -> PyTree:
    """The specs of ``layers`` layers as one tree of arrays with the layers in front."""
    return jax.tree.map(
        lambda spec: replace(spec, shape=(layers, *spec.shape), axes=("layers", *spec.axes)), layer
    )


def params_spec(width: int, vocab: int, dtype: str, layers: PyTree) -> PyTree:
    """All weights, with ``layers`` as they are to be held."""
    return {
        "embed": ArraySpec((vocab, width), ("vocab", "embed"), dtype, normal(1.0)),
        "layers": layers,
        "final_norm": ArraySpec((width,), ("embed",), dtype, ones),
        "head": ArraySpec((width, vocab), ("embed", "vocab"), dtype, normal(width**-0.5)),
    }


def batch_spec(batch: int, seq: int, vocab: int) -> dict[str, ArraySpec]:
    """Tokens and the tokens that follow them."""
    spec = ArraySpec((batch, seq), ("batch", "seq"), "int32", integers(vocab))
    return {"tokens": spec, "targets": spec}


def llama(size: str = "tiny", **overrides: object) -> Workload:
    """A train step with the layers stacked and scanned: ``(state, batch) -> (state, loss)``."""
    config = configured("llama", SIZES, size, overrides)
    return _train(
        "llama",
        size,
        config,
        stacked(layer_spec(config), config.layers),
        "Adam step of a Llama-style decoder, scanned over its layers",
    )


def llama_unrolled(size: str = "tiny", **overrides: object) -> Workload:
    """The same train step with a list of layers and a Python loop over it."""
    config = configured("llama_unrolled", SIZES, size, overrides)
    return _train(
        "llama_unrolled",
        size,
        config,
        [layer_spec(config)] * config.layers,
        "Adam step of a Llama-style decoder, its layers unrolled",
    )


def _train(name: str, size: str, config: LlamaConfig, layers: PyTree, description: str) -> Workload:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(forward(config, params, batch["tokens"]), batch["targets"])

    state = state_spec(params_spec(config.width, config.vocab, config.param_dtype, layers))
    arguments = (state, batch_spec(config.batch, config.seq, config.vocab))
    results = (state, ArraySpec((), ()))
    return Workload(
        name=name,
        size=size,
        config=config,
        fn=adam_step(loss_fn),
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description=description,
        source=config.source,
    )
