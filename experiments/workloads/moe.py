"""A decoder with a mixture of experts in each layer, and its train step.

Routing is GShard's (arXiv:2006.16668): each token goes to its best two experts, an expert takes at
most ``capacity`` tokens of a sequence, and tokens move by einsums with one-hot masks. Shape
letters: B sequences, S positions, D model width, F hidden width, X experts, C capacity, N choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, normal, ones
from autoshard.experiments.experts import MOE_RULES, experts_of
from autoshard.experiments.workloads.attention import (
    Weights,
    attention_spec,
    rms_norm,
    self_attention,
)
from autoshard.experiments.workloads.llama import batch_spec, params_spec, stacked
from autoshard.experiments.workloads.training import adam_step, cross_entropy, state_spec
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of the mixture-of-experts decoder.

    Attributes:
        width: Model width.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Key/value heads; divides ``heads``.
        head_dim: Width of a head.
        hidden: Width inside an expert.
        experts: Experts of a layer.
        choices: Experts that a token goes to.
        capacity_factor: Room in an expert, as a multiple of its even share of the tokens.
        balance_weight: Weight of the load-balancing loss.
        vocab: Number of tokens.
        batch: Sequences in a step.
        seq: Positions of a sequence.
        rope_theta: Base of the rotary frequencies.
        dtype: Of the computation.
        param_dtype: Of the weights.
        remat: Whether the backward pass computes each layer again.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    hidden: int = 128
    experts: int = 8
    choices: int = 2
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
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
        if self.choices > self.experts:
            raise InputError(
                f"a token cannot go to {self.choices} of {self.experts} experts",
                fix="choose at most as many choices as experts",
            )

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that an expert takes; a multiple of 4 keeps the arrays regular."""
        share = self.capacity_factor * self.choices * self.seq / self.experts
        return 4 * math.ceil(share / 4)


SIZES: Mapping[str, MoeConfig] = {
    "tiny": MoeConfig(),
    "small": MoeConfig(
        width=256, layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, vocab=2048, seq=128
    ),
    "8x7b": MoeConfig(
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        vocab=32_000,
        batch=64,
        seq=4096,
        rope_theta=1_000_000.0,
        dtype="bfloat16",
        source="Mixtral 8x7B: arXiv:2401.04088, table 1, and the published model's rope_theta; "
        "capacity, batch and sequence chosen here",
    ),
}


ExpertsMlp = Callable[[MoeConfig, Weights, jax.Array], tuple[jax.Array, jax.Array]]
"""The experts of a layer on ``x`` [B, S, D]: their output [B, S, D], the load-balancing loss."""


def route(config: MoeConfig, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which token goes where in which expert.

    Tokens' first choices are placed before any second choice, each in order of position; what
    does not fit is dropped.

    Args:
        config: The configuration.
        gates: Probability of each expert for each token [B, S, X].

    Returns:
        The weight of each token's share of each place of each expert [B, S, X, C] (zero where it
        has none; a token's weights sum to 1 if nothing of it was dropped), and the load-balancing
        loss.
    """
    weight, choice = jax.lax.top_k(gates, config.choices)
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(choice, config.experts, dtype=jnp.float32)  # [B, S, N, X]
    b, s, n, x = chosen.shape
    in_order = jnp.swapaxes(chosen, 1, 2).reshape(b, n * s, x)
    before = (jnp.cumsum(in_order, axis=1) - in_order).reshape(b, n, s, x)
    place = jnp.einsum("bnsx,bsnx->bsn", before, chosen).astype(jnp.int32)
    place_mask = jax.nn.one_hot(place, config.capacity, dtype=jnp.float32)  # 0 where too late
    combine = jnp.einsum("bsn,bsnx,bsnc->bsxc", weight, chosen, place_mask)
    fraction = jnp.mean(chosen[:, :, 0], axis=(0, 1))
    balance = x * jnp.sum(fraction * jnp.mean(gates, axis=(0, 1)))
    return combine, balance


def moe_mlp(config: MoeConfig, layer: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts' gated MLPs on ``x`` [B, S, D], and the load-balancing loss."""
    gates = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"].astype(jnp.float32))
    combine, balance = route(config, gates)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("bsxc,bsd->xbcd", dispatch, x)
    gate = jnp.einsum("xbcd,xdf->xbcf", inputs, layer["w_gate"].astype(x.dtype))
    up = jnp.einsum("xbcd,xdf->xbcf", inputs, layer["w_up"].astype(x.dtype))
    hidden = jax.nn.silu(gate) * up
    outputs = jnp.einsum("xbcf,xfd->xbcd", hidden, layer["w_down"].astype(x.dtype))
    return jnp.einsum("bsxc,xbcd->bsd", combine.astype(x.dtype), outputs), balance


def forward(
    config: MoeConfig, experts_mlp: ExpertsMlp, params: Any, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits [B, S, vocab] of ``tokens`` [B, S], and the layers' mean load-balancing loss."""

    def layer_fn(x: jax.Array, layer: Weights) -> tuple[jax.Array, jax.Array]:
        x = x + self_attention(layer, rms_norm(x, layer["attention_norm"]), config.rope_theta)
        y, balance = experts_mlp(config, layer, rms_norm(x, layer["mlp_norm"]))
        return x + y, balance

    x = jnp.take(params["embed"], tokens, axis=0).astype(config.dtype)
    scanned = jax.checkpoint(layer_fn) if config.remat else layer_fn
    x, balance = jax.lax.scan(scanned, x, params["layers"])
    x = rms_norm(x, params["final_norm"])
    return x @ params["head"].astype(x.dtype), jnp.mean(balance)


def layer_spec(config: MoeConfig) -> dict[str, ArraySpec]:
    """The weights of one layer."""
    d, f, x = config.width, config.hidden, config.experts
    inward, outward = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    layer = {
        **attention_spec(d, config.heads, config.kv_heads, config.head_dim),
        "mlp_norm": ArraySpec((d,), ("embed",), fill=ones),
        "router": ArraySpec((d, x), ("embed", "router"), fill=normal(d**-0.5)),
        "w_gate": ArraySpec((x, d, f), inward, fill=normal(d**-0.5)),
        "w_up": ArraySpec((x, d, f), inward, fill=normal(d**-0.5)),
        "w_down": ArraySpec((x, f, d), outward, fill=normal(f**-0.5)),
    }
    return {name: replace(spec, dtype=config.param_dtype) for name, spec in layer.items()}


def moe(size: str = "tiny", **overrides: object) -> Workload:
    """A train step of the decoder with experts: ``(state, batch) -> (state, loss)``."""
    config = configured("moe", SIZES, size, overrides)
    return train("moe", size, config, moe_mlp, "Adam step of a decoder with top-2 routed experts")


def train(
    name: str, size: str, config: MoeConfig, experts_mlp: ExpertsMlp, description: str
) -> Workload:
    """A train step of the decoder around one way to run its experts."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits, balance = forward(config, experts_mlp, params, batch["tokens"])
        return cross_entropy(logits, batch["targets"]) + config.balance_weight * balance

    layers = stacked(layer_spec(config), config.layers)
    outer = params_spec(config.width, config.vocab, config.param_dtype, layers)
    state = state_spec(outer)
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
        experts=experts_of(MOE_RULES, arguments, results),
        description=description,
        source=config.source,
    )
