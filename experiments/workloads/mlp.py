"""A classifier of residual two-layer blocks, trained by gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.experiments.arrays import ArraySpec, integers, normal
from autoshard.experiments.experts import TRAIN_RULES, experts_of
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Sizes of the classifier.

    Attributes:
        features: Width of the input and of the residual stream.
        hidden: Width inside a block.
        blocks: Number of blocks.
        classes: Number of labels.
        batch: Examples in a step.
        learning_rate: Step size of the descent.
    """

    features: int = 64
    hidden: int = 256
    blocks: int = 2
    classes: int = 16
    batch: int = 64
    learning_rate: float = 0.05


SIZES: Mapping[str, MlpConfig] = {
    "tiny": MlpConfig(),
    "small": MlpConfig(features=512, hidden=2048, blocks=4, classes=1024, batch=512),
    "large": MlpConfig(features=8192, hidden=32768, blocks=8, classes=8192, batch=4096),
}


def forward(params: Any, x: jax.Array) -> jax.Array:
    """Logits ``[batch, classes]`` of inputs ``[batch, features]``."""
    for block in params["blocks"]:
        hidden = jax.nn.relu(x @ block["up"] + block["up_bias"])
        x = x + hidden @ block["down"] + block["down_bias"]
    logits: jax.Array = x @ params["head"] + params["head_bias"]
    return logits


def mlp(size: str = "tiny", **overrides: object) -> Workload:
    """A train step of the classifier: ``(params, batch) -> (params, loss)``, params donated."""
    config = configured("mlp", SIZES, size, overrides)
    d, f, c = config.features, config.hidden, config.classes

    def train_step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            log_probs = jax.nn.log_softmax(forward(params, batch["inputs"]))
            return -jnp.mean(jnp.take_along_axis(log_probs, batch["labels"][:, None], axis=1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), loss

    block = {
        "up": ArraySpec((d, f), ("embed", "mlp"), fill=normal(d**-0.5)),
        "up_bias": ArraySpec((f,), ("mlp",)),
        "down": ArraySpec((f, d), ("mlp", "embed"), fill=normal(f**-0.5)),
        "down_bias": ArraySpec((d,), ("embed",)),
    }
    params = {
        "blocks": [block] * config.blocks,
        "head": ArraySpec((d, c), ("embed", "vocab"), fill=normal(d**-0.5)),
        "head_bias": ArraySpec((c,), ("vocab",)),
    }
    batch = {
        "inputs": ArraySpec((config.batch, d), ("batch", "features"), fill=normal(1.0)),
        "labels": ArraySpec((config.batch,), ("batch",), "int32", integers(c)),
    }
    arguments, results = (params, batch), (params, ArraySpec((), ()))
    return Workload(
        name="mlp",
        size=size,
        config=config,
        fn=train_step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(TRAIN_RULES, arguments, results),
        description="SGD step of a residual MLP classifier",
        source="widths chosen here; hidden = 4 * features as in arXiv:1706.03762",
    )
