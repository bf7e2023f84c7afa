"""Batch normalisation: statistics of the whole batch, and their running averages."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, ones, zeros

Statistics = Mapping[str, jax.Array]
"""Running ``mean`` and ``variance`` of each channel."""


def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    running: Statistics,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, Statistics]:
    """Normalise each channel over all other dimensions (arXiv:1502.03167, algorithm 1).

    Args:
        x: Activations [..., channels].
        scale: Of each channel.
        bias: Of each channel.
        running: Averages over earlier steps.
        momentum: What is kept of these averages.
        epsilon: Added to the variance.

    Returns:
        The normalised activations, and the averages that include this batch.
    """
    wide = x.astype(jnp.float32)
    others = tuple(range(x.ndim - 1))
    mean = jnp.mean(wide, axis=others)
    # From two sums that do not wait for each other, so that a mesh can add them up in one go.
    variance = jnp.mean(wide * wide, axis=others) - mean * mean
    normal = (wide - mean) * (jax.lax.rsqrt(variance + epsilon) * scale) + bias
    kept = {
        name: momentum * running[name] + (1.0 - momentum) * jax.lax.stop_gradient(batch)
        for name, batch in (("mean", mean), ("variance", variance))
    }
    return normal.astype(x.dtype), kept


def affine_spec(channels: int, axis: str) -> dict[str, ArraySpec]:
    """Scale and bias of the channels, whose logical axis is ``axis``."""
    return {
        "scale": ArraySpec((channels,), (axis,), fill=ones),
        "bias": ArraySpec((channels,), (axis,), fill=zeros),
    }


def statistics_spec(channels: int, axis: str) -> dict[str, ArraySpec]:
    """The running averages before the first step."""
    return {
        "mean": ArraySpec((channels,), (axis,), fill=zeros),
        "variance": ArraySpec((channels,), (axis,), fill=ones),
    }
