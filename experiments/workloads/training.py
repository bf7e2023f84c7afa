"""What the train steps written in plain JAX share: the state, Adam, the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, PyTree, zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TrainState:
    """What a train step carries from one step to the next.

    Attributes:
        params: The weights.
        m: Adam's first moments, a tree like the weights.
        v: Adam's second moments, likewise.
        step: Steps done, a whole number.
    """

    params: PyTree
    m: PyTree
    v: PyTree
    step: Any


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with bias correction (arXiv:1412.6980, algorithm 1).

    Defaults of the betas and epsilon are those of Llama 2 (arXiv:2307.09288, section 2.2).

    Attributes:
        learning_rate: Step size.
        beta1: Decay of the first moments.
        beta2: Decay of the second moments.
        epsilon: Added to the root of the second moments.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-5

    def update(self, state: TrainState, grads: PyTree) -> TrainState:
        """The state after one step along ``grads``."""
        step = state.step + 1
        count = step.astype(jnp.float32)
        correction1 = 1.0 - self.beta1**count
        correction2 = 1.0 - self.beta2**count
        m = jax.tree.map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: self.beta2 * v + (1 - self.beta2) * g * g, state.v, grads)

        def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / correction2) + self.epsilon
            moved: jax.Array = p - self.learning_rate * (m / correction1) / root
            return moved

        return TrainState(jax.tree.map(move, state.params, m, v), m, v, step)


def state_spec(params: PyTree) -> TrainState:
    """The specs of a fresh state, given those of the weights."""
    moments = jax.tree.map(lambda spec: replace(spec, fill=zeros), params)
    return TrainState(params, moments, moments, ArraySpec((), (), "int32"))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log-probability of ``targets`` [...] under ``logits`` [..., vocab]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


def adam_step(
    loss_fn: Callable[[PyTree, PyTree], jax.Array], adam: Adam | None = None
) -> Callable[[TrainState, PyTree], tuple[TrainState, jax.Array]]:
    """The train step ``(state, batch) -> (state, loss)`` of ``loss_fn(params, batch)``."""
    optimizer = adam or Adam()

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return optimizer.update(state, grads), loss

    return train_step
