"""The decoder with a mixture of experts, without a capacity: tokens sorted by expert.

No token is dropped: the rows of all tokens are brought into the order of their experts, each expert
multiplies its own run of rows (``jax.lax.ragged_dot``), and the products are added up where they
came from, as in MegaBlocks (arXiv:2211.15841) and in MaxText's sparse path. Shape letters: T = B S
tokens, N choices, D model width, F hidden width, X experts.

On CPU JAX writes a ragged product as X masked ones: X times the FLOPs of what is needed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard.experiments.workloads.attention import Weights
from autoshard.experiments.workloads.moe import SIZES, MoeConfig, train
from autoshard.experiments.workloads.workload import Workload, configured


def ragged_mlp(config: MoeConfig, layer: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts' gated MLPs on ``x`` [B, S, D], and the load-balancing loss."""
    gates = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"].astype(jnp.float32))
    weight, choice = jax.lax.top_k(gates, config.choices)
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)

    tokens = x.reshape(-1, x.shape[-1])  # [T, D]
    expert = choice.reshape(-1)  # [T N]
    order = jnp.argsort(expert, stable=True)
    token = order // config.choices
    share = jnp.take(weight.reshape(-1), order)
    group_sizes = jnp.bincount(expert, length=config.experts)

    rows = jnp.take(tokens, token, axis=0)  # [T N, D], by expert
    gate = jax.lax.ragged_dot(rows, layer["w_gate"].astype(x.dtype), group_sizes)
    up = jax.lax.ragged_dot(rows, layer["w_up"].astype(x.dtype), group_sizes)
    hidden = jax.nn.silu(gate) * up
    out = jax.lax.ragged_dot(hidden, layer["w_down"].astype(x.dtype), group_sizes)
    summed = jnp.zeros_like(tokens).at[token].add(out * share[:, None].astype(x.dtype))

    first = jax.nn.one_hot(choice[..., 0], config.experts, dtype=jnp.float32)
    fraction = jnp.mean(first, axis=(0, 1))
    balance = config.experts * jnp.sum(fraction * jnp.mean(gates, axis=(0, 1)))
    return summed.reshape(x.shape), balance


def moe_ragged(size: str = "tiny", **overrides: object) -> Workload:
    """A train step of the decoder: ``(state, batch) -> (state, loss)``.

    Sizes are those of the workload ``moe``; nothing has a capacity here.
    """
    config = configured("moe_ragged", SIZES, size, overrides)
    return train(
        "moe_ragged",
        size,
        config,
        ragged_mlp,
        "Adam step of a decoder with routed experts, tokens sorted by expert (ragged_dot)",
    )
