"""An LSTM language model (arXiv:1409.2329) written with Haiku (needs the extra ``haiku``)."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from autoshard.experiments.arrays import ArraySpec, PyTree
from autoshard.experiments.workloads.haiku_lstm import LstmConfig
from autoshard.experiments.workloads.optax_training import adamw, optax_state_spec, optax_step

AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("embed", "embeddings"): ("vocab", "embed"),
    ("linear", "w"): ("embed", "mlp"),  # of an LSTM: input and state on one side, four gates
    ("linear", "b"): ("mlp",),
    ("head", "w"): ("embed", "vocab"),
    ("head", "b"): ("vocab",),
}
"""From the last name of a module and that of a weight to the logical axes of its dimensions."""


def logits_of(config: LstmConfig, tokens: jax.Array) -> jax.Array:
    """Logits ``[batch, seq, vocab]`` of ``tokens`` ``[batch, seq]``; to be transformed by Haiku."""
    x = hk.Embed(config.vocab, config.width, name="embed")(tokens)
    core = hk.DeepRNN([hk.LSTM(config.width) for _ in range(config.layers)])
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]), time_major=False)
    logits: jax.Array = hk.Linear(config.vocab, name="head")(outputs)
    return logits


def transformed(config: LstmConfig) -> Any:
    """The pair of functions ``init(key, tokens)`` and ``apply(params, tokens)``."""
    return hk.without_apply_rng(hk.transform(lambda tokens: logits_of(config, tokens)))


class Program:
    """The model and its optimizer as functions of plain pytrees.

    Args:
        config: Sizes of the model.
    """

    def __init__(self, config: LstmConfig) -> None:
        self._model = transformed(config)
        self._optimizer = adamw(config.learning_rate)
        self._tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
        self._abstract_params = jax.eval_shape(
            lambda tokens: self._model.init(jax.random.key(0), tokens), self._tokens
        )

    def train_step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        """``(state, batch) -> (state, loss)``; the state has ``params`` and ``optimizer``."""
        return optax_step(self._loss, self._optimizer, state, batch)

    def _loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        logits = self._model.apply(params, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    def init_state(self, seed: int) -> PyTree:
        """A fresh state, its weights drawn by Haiku's own initialisers."""
        tokens = jnp.zeros(self._tokens.shape, self._tokens.dtype)
        params = self._model.init(jax.random.key(seed), tokens)
        return {"params": params, "optimizer": self._optimizer.init(params)}

    def state_spec(self) -> PyTree:
        """The specs of the state."""
        params = {
            module: {
                name: ArraySpec(leaf.shape, AXES[module.split("/")[-1], name], str(leaf.dtype))
                for name, leaf in weights.items()
            }
            for module, weights in self._abstract_params.items()
        }
        return optax_state_spec(self._optimizer, self._abstract_params, params)
