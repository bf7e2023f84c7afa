"""A recommendation model in the manner of DLRM (arXiv:1906.00091), and its train step.

Categorical features are looked up in embedding tables, dense features go through the bottom MLP,
the dot products of all pairs go through the top MLP to one logit: will this be clicked on? Tables
of similar size are held as one array, as libraries for embeddings do; the smaller ones are arrays
of their own. A step of gradient descent reads and writes only those rows of the large tables that
its examples name. Shape letters: B examples, N large tables, R rows, H lookups of an example in a
large table, D embedding width, F features with an embedding each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.experiments.arrays import ArraySpec, integers, normal
from autoshard.experiments.experts import DLRM_RULES, experts_of
from autoshard.experiments.workloads.workload import Workload, configured


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """Sizes of the recommendation model.

    Attributes:
        large_tables: Number of large tables, held as one array.
        rows: Rows of each large table.
        lookups: Rows of a large table that an example names; their sum is its embedding.
        small_tables: Rows of each other table; an example names one.
        width: Width of an embedding.
        dense: Number of dense features.
        bottom: Widths inside the bottom MLP, which ends in ``width``.
        top: Widths inside the top MLP, which ends in one logit.
        batch: Examples in a step.
        learning_rate: Step size of the descent.
        source: Where the figures come from.
    """

    large_tables: int = 8
    rows: int = 512
    lookups: int = 2
    small_tables: tuple[int, ...] = (3, 24, 100)
    width: int = 16
    dense: int = 13
    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (64, 32)
    batch: int = 64
    learning_rate: float = 0.1
    source: str = "sizes chosen here, in the proportions of the published model"

    @property
    def features(self) -> int:
        """Embeddings of an example: one of each table, and the bottom MLP's output."""
        return 1 + self.large_tables + len(self.small_tables)


SIZES: Mapping[str, DlrmConfig] = {
    "tiny": DlrmConfig(),
    "small": DlrmConfig(
        rows=16_384,
        lookups=4,
        small_tables=(3, 24, 100, 1000),
        width=64,
        bottom=(512, 256),
        top=(512, 256),
        batch=1024,
    ),
    "criteo1t": DlrmConfig(
        large_tables=5,
        rows=40_000_000,
        lookups=1,
        small_tables=(
            *(39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 2_953_546, 403_346, 10),
            *(2_208, 11_938, 155, 4, 976, 14, 585_935, 12_972, 108, 36),
        ),
        width=128,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        batch=65_536,
        source="The Criteo Terabyte model of MLPerf Training: facebookresearch/dlrm, "
        "bench/run_and_time.sh, with indices below 40 million; its five tables of more than 25 "
        "million rows padded to 40 million; batch and step size chosen here",
    ),
}


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    """Linear layers with a ReLU after each but the last."""
    for number, layer in enumerate(layers):
        x = x @ layer["w"] + layer["b"]
        x = jax.nn.relu(x) if number < len(layers) - 1 else x
    return x


def look_up(tables: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows [B, N, H, D] of ``tables`` [N, R, D] that ``ids`` [B, N, H] name."""
    rows: jax.Array = jax.vmap(lambda table, of_table: table[of_table], (0, 1), 1)(tables, ids)
    return rows


def click_logits(config: DlrmConfig, params: Any, large_rows: jax.Array, batch: Any) -> jax.Array:
    """One logit per example [B], given its rows of the large tables [B, N, H, D]."""
    bottom = mlp(params["bottom"], batch["dense"])
    small = [
        table[ids] for table, ids in zip(params["small_tables"], batch["small_ids"], strict=True)
    ]
    pooled = jnp.sum(large_rows, axis=2)
    features = jnp.concatenate([bottom[:, None], pooled, *(s[:, None] for s in small)], axis=1)
    products = jnp.einsum("bfd,bgd->bfg", features, features)
    first, second = np.tril_indices(config.features, -1)
    pairs = products[:, first, second]
    logit: jax.Array = mlp(params["top"], jnp.concatenate([bottom, pairs], axis=1))
    return logit[:, 0]


def train_step(config: DlrmConfig, params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of gradient descent, and the mean cross-entropy of the clicks before it."""
    others = {name: value for name, value in params.items() if name != "large_tables"}
    tables, ids = params["large_tables"], batch["large_ids"]

    def loss_fn(others: Any, large_rows: jax.Array) -> jax.Array:
        logits = click_logits(config, others, large_rows, batch)
        clicks = batch["clicks"]
        return jnp.mean(jax.nn.softplus(logits) - clicks * logits)

    loss, (grads, row_grads) = jax.value_and_grad(loss_fn, (0, 1))(others, look_up(tables, ids))
    step = config.learning_rate
    moved = jax.tree.map(lambda p, g: p - step * g, others, grads)

    def add(table: jax.Array, of_table: jax.Array, change: jax.Array) -> jax.Array:
        return table.at[of_table].add(change)

    moved["large_tables"] = jax.vmap(add, (0, 1, 1))(tables, ids, -step * row_grads)
    return moved, loss


def _mlp_spec(widths: tuple[int, ...]) -> list[dict[str, ArraySpec]]:
    return [
        {
            "w": ArraySpec((m, n), ("mlp_in", "mlp"), fill=normal((2 / (m + n)) ** 0.5)),
            "b": ArraySpec((n,), ("mlp",)),
        }
        for m, n in itertools.pairwise(widths)
    ]


def dlrm(size: str = "tiny", **overrides: object) -> Workload:
    """A train step of the model: ``(params, batch) -> (params, loss)``, params donated."""
    config = configured("dlrm", SIZES, size, overrides)
    d, f = config.width, config.features

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        return train_step(config, params, batch)

    params = {
        "large_tables": ArraySpec(
            (config.large_tables, config.rows, d),
            ("tables", "rows", "embed"),
            fill=normal(d**-0.5),
        ),
        "small_tables": [
            ArraySpec((rows, d), ("small_rows", "small_embed"), fill=normal(d**-0.5))
            for rows in config.small_tables
        ],
        "bottom": _mlp_spec((config.dense, *config.bottom, d)),
        "top": _mlp_spec((d + f * (f - 1) // 2, *config.top, 1)),
    }
    large_ids = (config.batch, config.large_tables, config.lookups)
    batch = {
        "dense": ArraySpec((config.batch, config.dense), ("batch", "dense"), fill=normal(1.0)),
        "large_ids": ArraySpec(
            large_ids, ("batch", "lookup_tables", "lookups"), "int32", integers(config.rows)
        ),
        "small_ids": [
            ArraySpec((config.batch,), ("batch",), "int32", integers(rows))
            for rows in config.small_tables
        ],
        "clicks": ArraySpec((config.batch,), ("batch",), "float32", integers(2)),
    }
    arguments, results = (params, batch), (params, ArraySpec((), ()))
    return Workload(
        name="dlrm",
        size=size,
        config=config,
        fn=step,
        arguments=arguments,
        results=results,
        donate_argnums=(0,),
        experts=experts_of(DLRM_RULES, arguments, results),
        description="SGD step of a recommendation model with large embedding tables",
        source=config.source,
    )
