"""A ResNet with bottleneck blocks and its train step: batch statistics, momentum SGD.

The architecture is ResNet-50's (arXiv:1512.03385, table 1) with the stride of a stage's first block
in its 3x3 convolution, as in the models that are trained for reference today. Shape letters: B
images, H rows, W columns, C channels, K rows and columns of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import InputError
from autoshard.experiments.arrays import ArraySpec, PyTree, integers, normal, zeros
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.batch_norm import affine_spec, batch_norm, statistics_spec
from autoshard.experiments.workloads.training import cross_entropy
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class ResnetConfig:
    """Sizes of the network.

    Attributes:
        blocks: Blocks of each stage; from the second stage on, the first block halves the image.
        width: Channels of the stem, and inside the blocks of the first stage.
        expansion: Channels between blocks, as a multiple of those inside.
        image: Rows and columns of an image.
        classes: Classes of images.
        batch: Images in a step.
        learning_rate: Step size.
        momentum: What is kept of the velocity.
        weight_decay: Pull of the kernels towards zero.
        dtype: Of the computation; weights and statistics are float32.
        source: Where the figures come from.
    """

    blocks: tuple[int, ...] = (1, 1)
    width: int = 16
    expansion: int = 4
    image: int = 16
    classes: int = 16
    batch: int = 16
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    dtype: str = "float32"
    source: str = "sizes chosen here, in the proportions of the published models"

    def __post_init__(self) -> None:
        step = 4 * 2 ** (len(self.blocks) - 1)
        if self.image % step:
            raise InputError(
                f"an image of {self.image} rows cannot be halved {int(math.log2(step))} times",
                fix=f"choose an image that {step} divides, or fewer stages",
            )

    def inside(self, stage: int) -> int:
        """Channels inside the blocks of a stage."""
        return self.width * int(2**stage)


SIZES: Mapping[str, ResnetConfig] = {
    "tiny": ResnetConfig(),
    "small": ResnetConfig(blocks=(2, 2, 2), width=32, image=64, classes=128, batch=32),
    "resnet50": ResnetConfig(
        blocks=(3, 4, 6, 3),
        width=64,
        image=224,
        classes=1000,
        batch=2048,
        learning_rate=0.8,
        dtype="bfloat16",
        source="ResNet-50: arXiv:1512.03385, table 1 and section 3.4; 0.1 per 256 images: "
        "arXiv:1706.02677, section 2.1; batch chosen here",
    ),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ResnetState:
    """What a train step carries from one step to the next.

    Attributes:
        params: The weights.
        velocity: A tree like the weights.
        statistics: Running averages of every batch normalisation.
    """

    params: PyTree
    velocity: PyTree
    statistics: PyTree


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve ``x`` [B, H, W, C] with ``kernel`` [K, K, C, C'], its borders padded by zeros."""
    edge = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        [(edge, edge)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def max_pool(x: jax.Array) -> jax.Array:
    """The largest of each 3x3 window of ``x`` [B, H, W, C], every second row and column."""
    pooled: jax.Array = jax.lax.reduce_window(
        x,
        np.array(-np.inf, x.dtype),
        jax.lax.max,
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        ((0, 0), (1, 1), (1, 1), (0, 0)),
    )
    return pooled


def block_stride(stage: int, number: int) -> int:
    """The stride of a block, given its number in its stage."""
    return 2 if stage and not number else 1


def bottleneck(
    params: PyTree, statistics: PyTree, x: jax.Array, stride: int
) -> tuple[jax.Array, PyTree]:
    """1x1, 3x3 and 1x1 convolutions of ``x`` [B, H, W, C], each normalised, added to a shortcut."""
    kept = {}

    def unit(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        unit = params[name]
        y = convolve(x, unit["kernel"], stride)
        y, kept[name] = batch_norm(y, unit["scale"], unit["bias"], statistics[name])
        return y

    y = jax.nn.relu(unit("reduce", x))
    y = jax.nn.relu(unit("window", y, stride))
    y = unit("expand", y)
    shortcut = unit("shortcut", x, stride) if "shortcut" in params else x
    return jax.nn.relu(y + shortcut), kept


def forward(
    config: ResnetConfig, params: PyTree, statistics: PyTree, images: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Logits [B, classes] of ``images`` [B, H, W, 3], and the new running averages."""
    stem = params["stem"]
    x = convolve(images.astype(config.dtype), stem["kernel"], 2)
    x, stem_kept = batch_norm(x, stem["scale"], stem["bias"], statistics["stem"])
    x = max_pool(jax.nn.relu(x))
    stages = []
    for stage, blocks in enumerate(params["stages"]):
        kept = []
        for number, block in enumerate(blocks):
            stride = block_stride(stage, number)
            x, new = bottleneck(block, statistics["stages"][stage][number], x, stride)
            kept.append(new)
        stages.append(kept)
    x = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
    return x @ params["head"] + params["head_bias"], {"stem": stem_kept, "stages": stages}


def _units(config: ResnetConfig) -> tuple[Mapping[str, Any], Sequence[Sequence[Mapping[str, Any]]]]:
    """Every convolution as (K, its channels in and out, their logical axes)."""
    stem = (7, (3, config.width), ("color", "embed"))
    stages, before = [], config.width
    for stage, count in enumerate(config.blocks):
        inside, blocks = config.inside(stage), []
        outside = config.expansion * inside
        for _ in range(count):
            block = {
                "reduce": (1, (before, inside), ("embed", "inside")),
                "window": (3, (inside, inside), ("embed", "mlp")),
                "expand": (1, (inside, outside), ("mlp", "embed")),
            }
            if before != outside:
                block["shortcut"] = (1, (before, outside), ("embed", "shortcut"))
            blocks.append(block)
            before = outside
        stages.append(blocks)
    return {"stem": stem}, stages


def _unit_params(unit: tuple[int, tuple[int, int], tuple[str, str]]) -> dict[str, ArraySpec]:
    size, (inner, outer), axes = unit
    # He et al., arXiv:1502.01852, equation 10.
    fill = normal(math.sqrt(2 / (size * size * inner)))
    kernel = ArraySpec((size, size, inner, outer), ("row", "column", *axes), fill=fill)
    return {"kernel": kernel, **affine_spec(outer, axes[1])}


def _unit_statistics(unit: tuple[int, tuple[int, int], tuple[str, str]]) -> dict[str, ArraySpec]:
    _, (_, outer), axes = unit
    return statistics_spec(outer, axes[1])


def state_spec(config: ResnetConfig) -> ResnetState:
    """The specs of a fresh state."""
    stem, stages = _units(config)
    outside = config.expansion * config.inside(len(config.blocks) - 1)

    def every(make: Any) -> dict[str, Any]:
        each = [[{n: make(unit) for n, unit in block.items()} for block in s] for s in stages]
        return {"stem": make(stem["stem"]), "stages": each}

    params = every(_unit_params)
    params["head"] = ArraySpec(
        (outside, config.classes), ("embed", "vocab"), fill=normal(outside**-0.5)
    )
    params["head_bias"] = ArraySpec((config.classes,), ("vocab",), fill=zeros)
    velocity = jax.tree.map(lambda spec: ArraySpec(spec.shape, spec.axes), params)
    return ResnetState(params, velocity, every(_unit_statistics))


def resnet(size: str = "tiny", **overrides: object) -> Workload:
    """A train step ``(state, batch) -> (state, loss)``, the state donated."""
    config = configured("resnet", SIZES, size, overrides)

    def train_step(state: ResnetState, batch: Any) -> tuple[ResnetState, jax.Array]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            logits, statistics = forward(config, params, state.statistics, batch["images"])
            return cross_entropy(logits, batch["labels"]), statistics

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)

        def accelerate(p: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            decay = config.weight_decay if p.ndim > 1 else 0.0  # kernels only
            return config.momentum * v + g + decay * p

        velocity = jax.tree.map(accelerate, state.params, state.velocity, grads)
        params = jax.tree.map(lambda p, v: p - config.learning_rate * v, state.params, velocity)
        return ResnetState(params, velocity, statistics), loss

    state = state_spec(config)
    shape = (config.batch, config.image, config.image, 3)
    batch = {
        "images": ArraySpec(shape, ("batch", "height", "width", "color"), fill=normal(1.0)),
        "labels": ArraySpec((config.batch,), ("batch",), "int32", integers(config.classes)),
    }
    arguments, results = (state, batch), (state, ArraySpec((), ()))
    return Workload(
        name="resnet",
        size=size,
        config=config,
        fn=train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="Momentum SGD step of a ResNet with batch statistics",
        source=config.source,
    )
