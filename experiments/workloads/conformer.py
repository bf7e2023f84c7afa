"""A Conformer encoder and its train step.

A block (arXiv:2005.08100, section 2) is half a feed-forward step, self-attention, a convolution
module (gated pointwise convolution, depthwise convolution over time, batch normalisation) and
another half feed-forward step. Departures: positions are rotary instead of relative embeddings, the
encoder reads frames that are subsampled already, and it predicts a code for every frame, as BEST-RQ
does (arXiv:2202.01855), instead of a transcript. Shape letters: B utterances, S frames, D model
width, F hidden width, K width of the depthwise kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, PyTree, integers, normal, ones
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.attention import (
    Weights,
    attend,
    attention_spec,
    project_qkv,
    rms_norm,
)
from autoshard.experiments.workloads.batch_norm import (
    Statistics,
    affine_spec,
    batch_norm,
    statistics_spec,
)
from autoshard.experiments.workloads.llama import stacked
from autoshard.experiments.workloads.training import (
    Adam,
    TrainState,
    cross_entropy,
    state_spec,
)
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class ConformerConfig:
    """Sizes of the encoder.

    Attributes:
        width: Model width.
        layers: Number of blocks.
        heads: Attention heads; divides ``width``.
        hidden: Width inside the feed-forward steps.
        kernel: Frames that the depthwise convolution sees, an odd number.
        features: Features of a frame.
        codes: Codes that a frame may have.
        batch: Utterances in a step.
        seq: Frames of an utterance.
        rope_theta: Base of the rotary frequencies.
        dtype: Of the computation; weights and statistics are float32.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    heads: int = 8
    hidden: int = 256
    kernel: int = 7
    features: int = 32
    codes: int = 64
    batch: int = 8
    seq: int = 32
    rope_theta: float = 10_000.0
    dtype: str = "float32"
    source: str = "sizes chosen here, in the proportions of the published models"


SIZES: Mapping[str, ConformerConfig] = {
    "tiny": ConformerConfig(),
    "small": ConformerConfig(
        width=256, layers=4, heads=4, hidden=1024, kernel=31, features=80, codes=1024, seq=128
    ),
    "l": ConformerConfig(
        width=512,
        layers=17,
        heads=8,
        hidden=2048,
        kernel=31,
        features=80,
        codes=8192,
        batch=512,
        seq=512,
        dtype="bfloat16",
        source="Conformer (L): arXiv:2005.08100, table 1, with an odd kernel instead of 32; 8192 "
        "codes: arXiv:2202.01855, section 4.1; batch and frames chosen here",
    ),
}


def feed_forward(layer: Weights, x: jax.Array, name: str) -> jax.Array:
    """The feed-forward step called ``name`` of ``x`` [B, S, D]."""
    y = rms_norm(x, layer[f"{name}_norm"])
    y = jax.nn.silu(y @ layer[f"{name}_up"].astype(x.dtype))
    return y @ layer[f"{name}_down"].astype(x.dtype)


def attention(layer: Weights, x: jax.Array, theta: float) -> jax.Array:
    """Self-attention of all frames of ``x`` [B, S, D] to each other."""
    y = rms_norm(x, layer["attention_norm"])
    length = x.shape[1]
    q, k, v = project_qkv(layer, y, jnp.arange(length), theta)
    mask = jnp.ones((length, length), dtype=bool)
    return jnp.einsum("bshe,hed->bsd", attend(q, k, v, mask), layer["wo"].astype(x.dtype))


def depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve each channel of ``x`` [B, S, D] over time with its own ``kernel`` [K, 1, D]."""
    edge = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (1,),
        [(edge, edge)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )


def convolution(layer: Weights, running: Statistics, x: jax.Array) -> tuple[jax.Array, Statistics]:
    """The convolution module of ``x`` [B, S, D], and its new running averages."""
    y = rms_norm(x, layer["conv_norm"])
    value = y @ layer["conv_value"].astype(x.dtype)
    y = value * jax.nn.sigmoid(y @ layer["conv_gate"].astype(x.dtype))
    y = depthwise(y, layer["conv_kernel"])
    y, kept = batch_norm(y, layer["conv_scale"], layer["conv_bias"], running)
    return jax.nn.silu(y) @ layer["conv_out"].astype(x.dtype), kept


def block(
    layer: Weights, running: Statistics, x: jax.Array, theta: float
) -> tuple[jax.Array, Statistics]:
    """One block on ``x`` [B, S, D], and its new running averages."""
    x = x + 0.5 * feed_forward(layer, x, "first")
    x = x + attention(layer, x, theta)
    y, kept = convolution(layer, running, x)
    x = x + y
    x = x + 0.5 * feed_forward(layer, x, "second")
    return rms_norm(x, layer["final_norm"]), kept


def forward(
    config: ConformerConfig, params: Any, running: Statistics, frames: jax.Array
) -> tuple[jax.Array, Statistics]:
    """Logits [B, S, codes] of ``frames`` [B, S, features], and the new running averages."""

    def layer_fn(x: jax.Array, given: tuple[Weights, Statistics]) -> tuple[jax.Array, Statistics]:
        return block(*given, x, config.rope_theta)

    x = frames.astype(config.dtype) @ params["project"].astype(config.dtype)
    x, kept = jax.lax.scan(jax.checkpoint(layer_fn), x, (params["layers"], running))
    logits: jax.Array = x @ params["head"].astype(x.dtype)
    return logits, kept


def layer_spec(config: ConformerConfig) -> dict[str, ArraySpec]:
    """The weights of one block."""
    d, f, k = config.width, config.hidden, config.kernel
    inward, outward = ("embed", "mlp"), ("mlp", "embed")
    norm = ArraySpec((d,), ("embed",), fill=ones)
    layer = attention_spec(d, config.heads, config.heads, d // config.heads)
    for name in ("first", "second"):
        layer |= {
            f"{name}_norm": norm,
            f"{name}_up": ArraySpec((d, f), inward, fill=normal(d**-0.5)),
            f"{name}_down": ArraySpec((f, d), outward, fill=normal(f**-0.5)),
        }
    channels = affine_spec(d, "mlp")
    return {
        **layer,
        "conv_norm": norm,
        "conv_value": ArraySpec((d, d), inward, fill=normal(d**-0.5)),
        "conv_gate": ArraySpec((d, d), inward, fill=normal(d**-0.5)),
        "conv_kernel": ArraySpec((k, 1, d), ("frame", "one", "mlp"), fill=normal(k**-0.5)),
        "conv_scale": channels["scale"],
        "conv_bias": channels["bias"],
        "conv_out": ArraySpec((d, d), outward, fill=normal(d**-0.5)),
        "final_norm": norm,
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ConformerState:
    """What a train step carries from one step to the next.

    Attributes:
        train: Weights and optimizer.
        statistics: Running averages of every block's batch normalisation.
    """

    train: TrainState
    statistics: PyTree


def conformer(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated."""
    config = configured("conformer", SIZES, size, overrides)
    adam = Adam()

    def train_step(state: ConformerState, batch: Any) -> tuple[ConformerState, jax.Array]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            logits, kept = forward(config, params, state.statistics, batch["frames"])
            return cross_entropy(logits, batch["codes"]), kept

        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, kept), grads = gradient(state.train.params)
        return ConformerState(adam.update(state.train, grads), kept), loss

    d, layers = config.width, config.layers
    params = {
        "project": ArraySpec(
            (config.features, d), ("feature", "embed"), fill=normal(config.features**-0.5)
        ),
        "layers": stacked(layer_spec(config), layers),
        "head": ArraySpec((d, config.codes), ("embed", "vocab"), fill=normal(d**-0.5)),
    }
    state = ConformerState(state_spec(params), stacked(statistics_spec(d, "mlp"), layers))
    frames = (config.batch, config.seq, config.features)
    batch = {
        "frames": ArraySpec(frames, ("batch", "seq", "feature"), fill=normal(1.0)),
        "codes": ArraySpec(frames[:2], ("batch", "seq"), "int32", integers(config.codes)),
    }
    arguments, results = (state, batch), (state, ArraySpec((), ()))
    return Workload(
        name="conformer",
        size=size,
        config=config,
        fn=train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="Adam step of a Conformer encoder, scanned over its blocks",
        source=config.source,
    )
