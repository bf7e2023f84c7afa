"""A GPT-2-style transformer written with Flax NNX (needs the extra ``flax``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx

from autoshard.experiments.arrays import ArraySpec, PyTree
from autoshard.experiments.workloads.flax_transformer import FlaxConfig
from autoshard.experiments.workloads.optax_training import adamw, optax_state_spec, optax_step

AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("tokens", "embedding"): ("vocab", "embed"),
    ("positions", "embedding"): ("positions", "embed"),
    **{(name, "kernel"): ("embed", "heads", "head_dim") for name in ("query", "key", "value")},
    ("out", "kernel"): ("heads", "head_dim", "embed"),
    ("up", "kernel"): ("embed", "mlp"),
    ("up", "bias"): ("mlp",),
    ("down", "kernel"): ("mlp", "embed"),
    ("down", "bias"): ("embed",),
    **{
        (name, leaf): ("embed",)
        for name in ("attention_norm", "mlp_norm", "final_norm")
        for leaf in ("scale", "bias")
    },
}
"""From the last two names of a weight's path to the logical axes of its dimensions."""


class Block(nnx.Module):
    """Attention and MLP, each normalised in front and added to the stream."""

    def __init__(self, config: FlaxConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.heads,
            in_features=config.width,
            use_bias=False,  # a key's bias has no effect on a softmax: its gradient is rounding
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """The stream ``[batch, seq, width]`` after this block."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        y: jax.Array = x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))
        return y


class Transformer(nnx.Module):
    """A decoder with learned positions whose output head is its token embedding."""

    def __init__(self, config: FlaxConfig, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.seq, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.final_norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``[batch, seq, vocab]`` of ``tokens`` ``[batch, seq]``."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits: jax.Array = self.tokens.attend(self.final_norm(x))
        return logits


class Program:
    """The model and its optimizer as functions of plain pytrees.

    Args:
        config: Sizes of the model.
    """

    def __init__(self, config: FlaxConfig) -> None:
        self._config = config
        self._optimizer = adamw(config.learning_rate)
        abstract = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
        self._graphdef, params = nnx.split(abstract, nnx.Param)
        self._abstract_params = nnx.to_pure_dict(params)

    def train_step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        """``(state, batch) -> (state, loss)``; the state has ``params`` and ``optimizer``."""
        return optax_step(self._loss, self._optimizer, state, batch)

    def _loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        logits = nnx.merge(self._graphdef, params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    def init_state(self, seed: int) -> PyTree:
        """A fresh state, its weights drawn by Flax's own initialisers."""
        model = Transformer(self._config, nnx.Rngs(seed))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return {"params": params, "optimizer": self._optimizer.init(params)}

    def state_spec(self) -> PyTree:
        """The specs of the state."""

        def spec(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> ArraySpec:
            return ArraySpec(leaf.shape, AXES[path[-2].key, path[-1].key], str(leaf.dtype))

        params = jax.tree_util.tree_map_with_path(spec, self._abstract_params)
        return optax_state_spec(self._optimizer, self._abstract_params, params)
