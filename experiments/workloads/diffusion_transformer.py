"""A diffusion transformer and its train step, which draws its own noise.

The blocks are DiT's (arXiv:2212.09748, section 3.2): attention and MLP, each normalised without
weights, scaled, shifted and gated by a vector that is made of the time and the class ("adaLN-Zero";
the modulation's weights begin small instead of at zero, so that the first step already uses every
weight). The model predicts the noise; the covariance is not learned. Shape letters: B images, S
patches, D model width, F hidden width, P values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, Fill, PyTree, constant, integers, normal, zeros
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.attention import Weights, attend
from autoshard.experiments.workloads.llama import stacked
from autoshard.experiments.workloads.training import Adam, TrainState
from autoshard.experiments.workloads.training import state_spec as train_state_spec
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """Sizes of the model.

    Attributes:
        width: Model width.
        layers: Number of blocks.
        heads: Attention heads; divides ``width``.
        hidden: Width inside the MLP.
        image: Rows and columns of a latent image.
        channels: Channels of a latent image.
        patch: Rows and columns of a patch; divides ``image``.
        classes: Classes of images.
        frequencies: Sines and cosines that the time is made of.
        times: Steps of the diffusion.
        batch: Images in a step.
        learning_rate: Adam's step size.
        dtype: Of the computation; weights are float32.
        source: Where the figures come from.
    """

    width: int = 64
    layers: int = 2
    heads: int = 8
    hidden: int = 256
    image: int = 8
    channels: int = 4
    patch: int = 2
    classes: int = 16
    frequencies: int = 32
    times: int = 1000
    batch: int = 8
    learning_rate: float = 1e-3
    dtype: str = "float32"
    source: str = "sizes chosen here, in the proportions of the published models"

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise InputError(
                f"an image of {self.image} rows is not a number of patches of {self.patch}",
                fix="choose a patch that divides image",
            )

    @property
    def seq(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


SIZES: Mapping[str, DiffusionConfig] = {
    "tiny": DiffusionConfig(),
    "small": DiffusionConfig(width=256, layers=4, hidden=1024, image=16, classes=128),
    "xl": DiffusionConfig(
        width=1152,
        layers=28,
        heads=16,
        hidden=4608,
        image=32,
        classes=1000,
        frequencies=256,
        batch=256,
        learning_rate=1e-4,
        dtype="bfloat16",
        source="DiT-XL/2: arXiv:2212.09748, table 1 and section 4; 256 frequencies from the "
        "published model",
    ),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DiffusionState:
    """What a train step carries from one step to the next.

    Attributes:
        train: Weights and optimizer.
        key: Data of the random key of the next step.
    """

    train: TrainState
    key: Any


def patchify(images: jax.Array, patch: int) -> jax.Array:
    """``images`` [B, H, W, C] as their patches [B, S, P], row by row."""
    b, h, w, c = images.shape
    cut = images.reshape(b, h // patch, patch, w // patch, patch, c)
    patches: jax.Array = cut.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, patch * patch * c)
    return patches


def waves(position: jax.Array, count: int, base: float = 10_000.0) -> jax.Array:
    """Cosines and sines [..., count] of ``position`` [...] (arXiv:1706.03762, section 3.5)."""
    half = count // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def places(config: DiffusionConfig) -> jax.Array:
    """The embedding of each patch's row and column [S, D]."""
    side = config.image // config.patch
    each = waves(jnp.arange(side), config.width // 2)
    rows = jnp.broadcast_to(each[:, None], (side, side, config.width // 2))
    columns = jnp.broadcast_to(each[None], (side, side, config.width // 2))
    return jnp.concatenate([rows, columns], axis=-1).reshape(side * side, config.width)


def layer_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Layer normalisation over the last dimension, without weights (arXiv:1607.06450)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    normal: jax.Array = (centred * inverse).astype(x.dtype)
    return normal


def modulation(layer: Weights, condition: jax.Array) -> jax.Array:
    """What the condition [B, D] makes of a block: [n, B, 1, D] shifts, scales and gates."""
    made = jnp.einsum("bd,dne->nbe", condition, layer["modulate"].astype(condition.dtype))
    return (made + layer["modulate_bias"].astype(condition.dtype)[:, None])[:, :, None]


def block(layer: Weights, x: jax.Array, condition: jax.Array) -> jax.Array:
    """Modulated attention and MLP on ``x`` [B, S, D]."""
    shift, scale, gate, shift2, scale2, gate2 = modulation(layer, condition)
    y = layer_norm(x) * (1 + scale) + shift
    q, k, v = (jnp.einsum("bsd,dhe->bshe", y, layer[w].astype(x.dtype)) for w in ("wq", "wk", "wv"))
    mask = jnp.ones((x.shape[1], x.shape[1]), dtype=bool)
    y = jnp.einsum("bshe,hed->bsd", attend(q, k, v, mask), layer["wo"].astype(x.dtype))
    x = x + gate * y
    y = layer_norm(x) * (1 + scale2) + shift2
    y = jax.nn.gelu(y @ layer["up"].astype(x.dtype) + layer["up_bias"].astype(x.dtype))
    y = y @ layer["down"].astype(x.dtype) + layer["down_bias"].astype(x.dtype)
    result: jax.Array = x + gate2 * y
    return result


def predict(
    config: DiffusionConfig, params: Any, patches: jax.Array, times: jax.Array, labels: jax.Array
) -> jax.Array:
    """The noise in ``patches`` [B, S, P] at ``times`` [B], for the classes ``labels`` [B]."""

    def layer_fn(x: jax.Array, layer: Weights) -> tuple[jax.Array, None]:
        return block(layer, x, condition), None

    dtype = jnp.dtype(config.dtype)
    time = waves(times, config.frequencies) @ params["time_in"] + params["time_bias"]
    time = jax.nn.silu(time) @ params["time_out"]
    condition = jax.nn.silu(time + jnp.take(params["classes"], labels, axis=0)).astype(dtype)
    x = patches.astype(dtype) @ params["patch_in"].astype(dtype)
    x = x + places(config).astype(dtype)
    x, _ = jax.lax.scan(jax.checkpoint(layer_fn), x, params["layers"])
    shift, scale = modulation(params["last"], condition)
    x = layer_norm(x) * (1 + scale) + shift
    noise: jax.Array = (x @ params["patch_out"].astype(dtype)).astype(jnp.float32)
    return noise


def diffusion_loss(config: DiffusionConfig, params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Mean squared error of the predicted noise (arXiv:2006.11239, equation 14).

    The noise is added under the linear schedule of section 4 of the same paper.
    """
    for_time, for_noise = jax.random.split(key)
    patches = patchify(batch["latents"], config.patch)
    times = jax.random.randint(for_time, (config.batch,), 0, config.times, dtype=jnp.int32)
    noise = jax.random.normal(for_noise, patches.shape, jnp.float32)
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, config.times, dtype=jnp.float32))[times]
    kept = kept[:, None, None]
    noisy = jnp.sqrt(kept) * patches + jnp.sqrt(1 - kept) * noise
    error = predict(config, params, noisy, times, batch["labels"]) - noise
    return jnp.mean(error * error)


def params_spec(config: DiffusionConfig) -> PyTree:
    """All weights."""
    d, f, h = config.width, config.hidden, config.heads
    patch = config.patch**2 * config.channels
    inward, outward = ("embed", "mlp"), ("mlp", "embed")

    def modulate(count: int) -> dict[str, ArraySpec]:
        fill = normal(0.1 * d**-0.5)
        axes = ("embed", "modulation", "mlp")
        return {
            "modulate": ArraySpec((d, count, d), axes, fill=fill),
            "modulate_bias": ArraySpec((count, d), axes[1:], fill=constant(0.1)),
        }

    def linear(shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> ArraySpec:
        return ArraySpec(shape, axes, fill=normal(fan_in**-0.5))

    def bias(size: int, axis: str, fill: Fill = zeros) -> ArraySpec:
        return ArraySpec((size,), (axis,), fill=fill)

    into_heads, out_of_heads = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")
    layer = {
        **modulate(6),
        **{name: linear((d, h, d // h), into_heads, d) for name in ("wq", "wk", "wv")},
        "wo": linear((h, d // h, d), out_of_heads, d),
        "up": linear((d, f), inward, d),
        "up_bias": bias(f, "mlp"),
        "down": linear((f, d), outward, f),
        "down_bias": bias(d, "embed"),
    }
    return {
        "patch_in": linear((patch, d), ("patch", "embed"), patch),
        "time_in": linear((config.frequencies, d), ("frequency", "mlp"), config.frequencies),
        "time_bias": bias(d, "mlp"),
        "time_out": linear((d, d), outward, d),
        "classes": ArraySpec((config.classes, d), ("vocab", "embed"), fill=normal(0.02)),
        "layers": stacked(layer, config.layers),
        "last": modulate(2),
        "patch_out": ArraySpec((d, patch), ("embed", "patch"), fill=normal(0.1 * d**-0.5)),
    }


def diffusion_transformer(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated."""
    config = configured("diffusion_transformer", SIZES, size, overrides)
    adam = Adam(learning_rate=config.learning_rate, beta2=0.999)

    def train_step(state: DiffusionState, batch: Any) -> tuple[DiffusionState, jax.Array]:
        key, used = jax.random.split(jax.random.wrap_key_data(state.key))

        def loss_fn(params: PyTree) -> jax.Array:
            return diffusion_loss(config, params, batch, used)

        loss, grads = jax.value_and_grad(loss_fn)(state.train.params)
        return DiffusionState(adam.update(state.train, grads), jax.random.key_data(key)), loss

    key = ArraySpec((2,), ("key",), "uint32", integers(2**32))
    state = DiffusionState(train_state_spec(params_spec(config)), key)
    latents = (config.batch, config.image, config.image, config.channels)
    axes = ("batch", "height", "width", "channel")
    batch = {
        "latents": ArraySpec(latents, axes, fill=normal(1.0)),
        "labels": ArraySpec((config.batch,), ("batch",), "int32", integers(config.classes)),
    }
    arguments, results = (state, batch), (state, ArraySpec((), ()))
    return Workload(
        name="diffusion_transformer",
        size=size,
        config=config,
        fn=train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="Adam step of a diffusion transformer that draws its own noise",
        source=config.source,
    )
