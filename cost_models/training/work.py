"""What one device does in a step of a recipe: products, attention, traffic, collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost_models.attention import attention_pairs
from autoshard.cost_models.layout import Layout
from autoshard.cost_models.protocol import CollectiveKind
from autoshard.cost_models.routes import route
from autoshard.cost_models.training.recipe import Attention, Recipe

WEIGHT_BYTES, MOMENTS_BYTES = 2, 8
"""What a parameter takes in memory: a weight in bf16, two moments of Adam in f32 [bytes].

Source: jax-ml/scaling-book, training.md, "What do we mean by scaling?".
"""

OPTIMIZER_BYTES = 28
"""Traffic of Adam per parameter [bytes]: weight and two moments read and written, gradient read."""

LOGITS_PASSES = 6
"""Times that logits in f32 pass through memory: product, soft-max and loss, and their gradients."""

GRADIENT_BYTES = 4
"""Size of an element of a gradient that is summed over copies [bytes]."""

MICROBATCHES = 4
"""Microbatches per stage of a pipeline.

Source: Huang et al. 2019, "GPipe", section 2.3: bubbles are negligible from 4 x stages on.
"""


@dataclass(frozen=True, slots=True)
class Product:
    """Equal matrix products.

    Attributes:
        m: Rows, contracted size and columns on one device.
        k: The contracted size.
        n: The columns.
        times: How many there are in a step's forward pass.
        again: Forward passes that the backward pass adds: 0, or 1 where the result is not kept.
        kind: ``dense``, ``expert`` (of ragged rows) or ``logits``.
    """

    m: float
    k: float
    n: float
    times: float
    again: int
    kind: str

    @property
    def forward_flops(self) -> float:
        """Of the forward pass [FLOP]."""
        return 2 * self.m * self.k * self.n * self.times


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one device does in a step.

    Attributes:
        products: Matrix products.
        attention: Pairs of a query and a key, and the head's size, by kind of layer.
        attention_passes: Products of the size of a pair's in attention: forward 2; backward 5 in
            one kernel, or 3 and 4 in two that both compute the scores again; and 2 where the
            forward pass is computed again.
        attention_kernels: How often scores go through the vector units.
        activation_bytes: Size of the residual stream of all layers [bytes].
        hidden_bytes: Size of the MLPs' inner results of all layers [bytes].
        logits_bytes: Traffic of the logits [bytes].
        optimizer_bytes: Traffic of the optimizer [bytes].
        routed_bytes: Size of what is sent to experts [bytes].
        weights_s: Gathers of weights and scatters of gradients [s].
        copies_s: Sums of gradients over copies within a slice [s].
        context_s: Exchanges of keys and values [s].
        tensor_s: Gathers and scatters of activations in tensor parallelism [s].
        expert_s: Exchanges of tokens among experts [s].
        slices_s: Sums of gradients over slices [s].
        bubble: Time over that of a full pipeline.
        model_flops: Useful work, causal attention counted half [FLOP].
    """

    products: tuple[Product, ...]
    attention: tuple[tuple[float, float], ...]
    attention_passes: int
    attention_kernels: int
    activation_bytes: float
    hidden_bytes: float
    logits_bytes: float
    optimizer_bytes: float
    routed_bytes: float
    weights_s: float
    copies_s: float
    context_s: float
    tensor_s: float
    expert_s: float
    slices_s: float
    bubble: float
    model_flops: float


def step_work(recipe: Recipe) -> StepWork:
    """What one device does in a step.

    Products, parameters and useful work are counted from the configuration, as in
    jax-ml/scaling-book, transformers.md; collectives go where the mesh lies best on the slice.

    Raises:
        InputError: The mesh cannot be laid onto the slice.
    """
    r = recipe
    tensor, context, expert = (
        r.axis("tensor"),
        r.axis("context"),
        r.axis("expert"),
    )
    shards = r.axis("fsdp", "fsdp_transpose")
    products = _products(r, tensor, expert)
    dense, routed = parameters(r)
    stages = r.stages
    along = r.axis("tensor_transpose")
    held = (dense + routed / expert) / (shards * context * tensor * along * stages)
    pairs = tuple((layer.layers * _pairs(r, layer.window), layer.head_dim) for layer in _kinds(r))
    useful = sum(3 * p.forward_flops for p in _products(r, tensor, expert, useful=True))
    useful += sum(
        12 * layer.layers * _seen(r, layer.window) * layer.head_dim for layer in _kinds(r)
    )
    activation = residual_bytes(r.tokens, r.d_model, r.layers)
    times = _Times(r)
    gathered = (dense + routed / expert) / (tensor * along)
    slices = r.topology.slices // stages
    assert r.topology.chip is not None
    dcn = 0.0
    if slices > 1:
        rate = r.topology.chip.value("dcn_per_chip") / r.topology.devices_per_chip
        dcn = held * GRADIENT_BYTES * 2 * (slices - 1) / slices / rate
    kv = r.tokens * context * 2 * r.kv_heads * r.head_dim * 2 * r.layers
    return StepWork(
        products=products,
        attention=pairs,
        attention_passes=(7 if r.fused_backward else 9) + 2 * ("attention" in r.recomputed),
        attention_kernels=(2 if r.fused_backward else 3) + ("attention" in r.recomputed),
        activation_bytes=activation,
        hidden_bytes=r.tokens * r.d_ff * 2 * r.dense_layers,
        logits_bytes=r.tokens * r.vocab * 4 * LOGITS_PASSES,
        optimizer_bytes=held * OPTIMIZER_BYTES,
        routed_bytes=r.tokens * r.experts_per_token * r.d_model * 2 * (r.layers - r.dense_layers),
        # Gathered in bf16 for the forward and the backward pass, gradients scattered: 6 bytes.
        weights_s=6 * gathered * r.accumulation * times.per_byte("all_gather", *_SHARDED),
        copies_s=GRADIENT_BYTES * held * times.per_byte("all_reduce", "data"),
        context_s=3 * kv * times.per_byte("all_gather", "context"),
        # Two gathers and two scatters of a layer, forward and backward; or sums of partial results.
        tensor_s=8 * activation * tensor * times.per_byte("all_gather", "tensor")
        + _partial_bytes(r, products) * times.per_byte("all_reduce", "tensor_transpose"),
        # There and back, forward and backward.
        expert_s=4 * 2 * activation * times.per_byte("all_to_all", "expert"),
        slices_s=dcn,
        bubble=1 + (stages - 1) / (MICROBATCHES * stages),
        model_flops=r.model_flops or useful,
    )


_SHARDED = ("fsdp", "fsdp_transpose", "context")
"""Axes over which weights are cut and gathered."""


class _Times:
    """Time of collectives per byte, where the recipe's mesh lies best."""

    def __init__(self, recipe: Recipe) -> None:
        slices = recipe.topology.slices
        sizes = {**({"slices": slices} if slices > 1 else {}), **recipe.axes}
        self._layout: Layout | None = None
        if sizes:
            fixed = {"slices": slices} if slices > 1 else None
            self._layout = recipe.topology.layouts(sizes, dcn=fixed)[0]

    def per_byte(self, kind: CollectiveKind, *axes: str) -> float:
        """Of the larger side on one device [s/byte]."""
        if self._layout is None:
            return 0.0
        there = tuple(axis for axis in axes if axis in self._layout.sizes)
        if not there:
            return 0.0
        return float(route(self._layout, there).seconds(kind, np.array(1e9))) / 1e9


def residual_bytes(tokens: float, d_model: float, layers: float) -> float:
    """Size of one tensor in bf16 as wide as the model, of all layers [bytes]."""
    return 2 * tokens * d_model * layers


def _kinds(r: Recipe) -> tuple[Attention, ...]:
    """Attention layers by kind; latent attention as heads of the mean of its two sizes."""
    if r.latent is None:
        return r.attention
    size = (r.latent.plain_dim + r.latent.rotary_dim + r.latent.value_dim) / 2
    return tuple(replace(kind, head_dim=size) for kind in r.attention)


def _seen(r: Recipe, window: int | None) -> float:
    """Pairs of query and key that count as useful, of one layer on one device."""
    whole = r.sequence / 2 if r.causal else r.sequence
    return r.tokens * r.heads * (whole if window is None else min(whole, window))


def _pairs(r: Recipe, window: int | None) -> float:
    """Pairs of query and key that a kernel of blocks computes, of one layer on one device."""
    each = attention_pairs(r.sequence, r.sequence, causal=r.causal, window=window)
    return r.tokens / r.sequence * r.heads * each


def _products(r: Recipe, tensor: int, expert: int, *, useful: bool = False) -> tuple[Product, ...]:
    """The products of a step; ``useful``: without the room that experts leave empty."""
    along = r.axis("tensor_transpose")
    rows = r.tokens * tensor * along / r.accumulation
    times = r.accumulation
    again = {part: int(part in r.recomputed) for part in ("qkv", "out", "up")}
    up = 2 if r.gated else 1
    found = []

    def add(
        m: float, k: float, n: float, count: float, part: str = "", kind: str = "dense"
    ) -> None:
        if m and k and n and count:
            k, n = (size / along if size == r.d_model else size for size in (k, n))
            found.append(Product(m, k, n, count * times, again.get(part, 0), kind))

    d, q = r.d_model, r.heads * r.head_dim
    if r.latent is None:
        add(rows, d, (q + 2 * r.kv_heads * r.head_dim) / tensor, r.layers, "qkv")
        add(rows, q / tensor, d, r.layers, "out")
    else:
        a, h = r.latent, r.heads
        add(rows, d, a.q_rank, r.layers, "qkv")
        add(rows, a.q_rank, h * (a.plain_dim + a.rotary_dim) / tensor, r.layers, "qkv")
        add(rows, d, a.kv_rank + a.rotary_dim, r.layers, "qkv")
        add(rows, a.kv_rank, h * (a.plain_dim + a.value_dim) / tensor, r.layers, "qkv")
        add(rows, h * a.value_dim / tensor, d, r.layers, "out")
    add(rows, d, up * r.d_ff / tensor, r.dense_layers, "up")
    add(rows, r.d_ff / tensor, d, r.dense_layers)
    if r.experts:
        routed = r.layers - r.dense_layers
        room = 1.0 if useful or r.capacity is None else r.capacity
        each = rows * r.experts_per_token * room * expert / r.experts
        kind = "expert" if r.capacity is None else "dense"
        add(each, d, up * r.expert_d_ff / tensor, routed * r.experts / expert, "up", kind)
        add(each, r.expert_d_ff / tensor, d, routed * r.experts / expert, "", kind)
        add(rows, d, up * r.shared_d_ff / tensor, routed, "up")
        add(rows, r.shared_d_ff / tensor, d, routed)
    if r.vocab:
        m, k, n = rows, d / along, r.vocab / tensor
        found.append(Product(m, k, n, times, int(r.logits_again), "logits"))
    return tuple(found)


def _partial_bytes(r: Recipe, products: tuple[Product, ...]) -> float:
    """Size of the partial results where the model's width is cut, in a step [bytes].

    Products that sum over the width give partial results, and so do the gradients of those whose
    result is as wide as the model.

    Source:
        Derived here. That MaxText's axis ``tensor_transpose`` cuts the width, of weights and
        activations, is remembered from its logical axis rules and was not read again.
    """
    width = r.d_model / r.axis("tensor_transpose")
    forward = sum(p.m * p.n * p.times * (1 + p.again) for p in products if p.k == width)
    backward = sum(p.m * p.k * p.times for p in products if p.n == width)
    return 2 * (forward + backward)


def parameters(r: Recipe) -> tuple[float, float]:
    """Parameters outside of routed experts, and in them."""
    d, q = r.d_model, r.heads * r.head_dim
    if r.latent is None:
        attention = 2 * d * q + 2 * d * r.kv_heads * r.head_dim
    else:
        a, h = r.latent, r.heads
        attention = (
            d * (a.q_rank + a.kv_rank + a.rotary_dim)
            + a.q_rank * h * (a.plain_dim + a.rotary_dim)
            + a.kv_rank * h * (a.plain_dim + a.value_dim)
            + h * a.value_dim * d
        )
    mlp = 3 if r.gated else 2
    routed = (r.layers - r.dense_layers) if r.experts else 0
    dense = r.layers * attention + mlp * d * (r.dense_layers * r.d_ff + routed * r.shared_d_ff)
    return dense + r.vocab * d * (1 if r.tied else 2), float(
        routed * r.experts * mlp * d * r.expert_d_ff
    )
