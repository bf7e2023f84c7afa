"""MLP-Mixer (arXiv:2105.01601) written with Equinox (needs the extra ``equinox``)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from autoshard.experiments.arrays import ArraySpec, PyTree
from autoshard.experiments.workloads.equinox_mixer import MixerConfig
from autoshard.experiments.workloads.optax_training import adamw, optax_state_spec, optax_step

AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("embed", "weight"): ("embed", "pixels"),
    ("embed", "bias"): ("embed",),
    ("head", "weight"): ("vocab", "embed"),
    ("head", "bias"): ("vocab",),
    ("tokens_up", "weight"): ("mlp", "patches"),
    ("tokens_up", "bias"): ("mlp",),
    ("tokens_down", "weight"): ("patches", "mlp"),
    ("channels_up", "weight"): ("mlp", "embed"),
    ("channels_up", "bias"): ("mlp",),
    ("channels_down", "weight"): ("embed", "mlp"),
    ("channels_down", "bias"): ("embed",),
    **{
        (name, leaf): ("embed",)
        for name in ("tokens_norm", "channels_norm", "final_norm")
        for leaf in ("weight", "bias")
    },
}
"""From the last two names of a weight's path to the logical axes of its dimensions."""


class Block(eqx.Module):
    """A mix over patches and a mix over channels, each normalised in front and added."""

    tokens_norm: eqx.nn.LayerNorm
    tokens_up: eqx.nn.Linear
    tokens_down: eqx.nn.Linear
    channels_norm: eqx.nn.LayerNorm
    channels_up: eqx.nn.Linear
    channels_down: eqx.nn.Linear

    def __init__(self, config: MixerConfig, patches: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        width = config.width
        self.tokens_norm = eqx.nn.LayerNorm(width)
        self.tokens_up = eqx.nn.Linear(patches, config.tokens_hidden, key=keys[0])
        # Its bias would move all channels of a patch alike, which the next norm takes away again.
        self.tokens_down = eqx.nn.Linear(config.tokens_hidden, patches, use_bias=False, key=keys[1])
        self.channels_norm = eqx.nn.LayerNorm(width)
        self.channels_up = eqx.nn.Linear(width, config.channels_hidden, key=keys[2])
        self.channels_down = eqx.nn.Linear(config.channels_hidden, width, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream ``[patches, width]`` of one image after this block."""

        def mix_tokens(column: jax.Array) -> jax.Array:
            return self.tokens_down(jax.nn.gelu(self.tokens_up(column)))

        def mix_channels(row: jax.Array) -> jax.Array:
            return self.channels_down(jax.nn.gelu(self.channels_up(row)))

        x = x + jax.vmap(mix_tokens, 1, 1)(jax.vmap(self.tokens_norm)(x))
        return x + jax.vmap(mix_channels)(jax.vmap(self.channels_norm)(x))


class Mixer(eqx.Module):
    """A classifier of images cut into patches."""

    embed: eqx.nn.Linear
    blocks: list[Block]
    final_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, config: MixerConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 2 + config.layers)
        patches = (config.image // config.patch) ** 2
        pixels = config.channels * config.patch**2
        self.patch = config.patch
        self.embed = eqx.nn.Linear(pixels, config.width, key=keys[0])
        self.blocks = [Block(config, patches, key) for key in keys[2:]]
        self.final_norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, config.classes, key=keys[1])

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits ``[classes]`` of one image ``[channels, height, width]``."""
        c, h, w = image.shape
        p = self.patch
        cut = image.reshape(c, h // p, p, w // p, p).transpose(1, 3, 0, 2, 4)
        x = jax.vmap(self.embed)(cut.reshape(-1, c * p * p))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(jax.vmap(self.final_norm)(x), axis=0))


class Program:
    """The model and its optimizer as functions of pytrees.

    Args:
        config: Sizes of the model.
    """

    def __init__(self, config: MixerConfig) -> None:
        self._config = config
        self._optimizer = adamw(config.learning_rate)
        abstract = eqx.filter_eval_shape(lambda: Mixer(config, jax.random.key(0)))
        self._abstract_params, self._static = eqx.partition(
            abstract, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
        )

    def train_step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        """``(state, batch) -> (state, loss)``; the state has ``params`` and ``optimizer``."""
        return optax_step(self._loss, self._optimizer, state, batch)

    def _loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        model = eqx.combine(params, self._static)
        logits = jax.vmap(model)(batch["images"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses)

    def init_state(self, seed: int) -> PyTree:
        """A fresh state, its weights drawn by Equinox's own initialisers."""
        params = eqx.filter(Mixer(self._config, jax.random.key(seed)), eqx.is_array)
        return {"params": params, "optimizer": self._optimizer.init(params)}

    def state_spec(self) -> PyTree:
        """The specs of the state."""

        def spec(path: tuple[jax.tree_util.GetAttrKey, ...], leaf: PyTree) -> ArraySpec:
            return ArraySpec(leaf.shape, AXES[path[-2].name, path[-1].name], str(leaf.dtype))

        params = jax.tree_util.tree_map_with_path(spec, self._abstract_params)
        return optax_state_spec(self._optimizer, self._abstract_params, params)
