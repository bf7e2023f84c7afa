"""What a flash-attention kernel costs: whole blocks, narrow heads, vector work per score.

Attention that is written as products and a soft-max needs no rule: its ops are priced one by one.
A kernel is a custom call, of which only its author knows what it computes; these are the figures to
give to :func:`autoshard.register_rule` as ``flops=``, or to use in a notebook.
"""

from __future__ import annotations

import math

from autoshard.cost_models.chips import Chip, find_chip

BLOCK = 2048
"""Queries and keys of a block of the attention kernel, which computes whole blocks.

Source: AI-Hypercomputer/tpu-recipes@c8cfe2f, training/trillium (block sizes of splash attention).
"""

SCORE_OPS = 9.0
"""Vector operations per score and pass: scale, mask, maximum, exponential, sums.

*Fitted* to the published runs of ``training/points.csv`` (``pair_ops``, in docs/accuracy.md).
"""


def attention_pairs(
    queries: float,
    keys: float,
    *,
    causal: bool = True,
    window: int | None = None,
    block: int = BLOCK,
) -> float:
    """Pairs of a query and a key that a kernel of whole blocks computes, of one head.

    Args:
        queries: Queries.
        keys: Keys; with ``causal``, as many as queries.
        causal: Whether a query sees earlier keys only: blocks that no query sees are left out.
        window: Keys that a query sees at most.
        block: Queries and keys of a block.

    Examples:
        >>> attention_pairs(8192, 8192, causal=False) == 8192**2
        True
        >>> attention_pairs(8192, 8192) / 8192**2
        0.625
    """
    size = min(block, keys)
    seen = (keys + size) / 2 if causal else float(keys)
    return queries * (seen if window is None else min(seen, window + size))


def flash_attention_flops(
    batch: float,
    heads: float,
    queries: float,
    keys: float,
    head_dim: float,
    *,
    causal: bool = True,
    window: int | None = None,
    block: int = BLOCK,
    backward: bool = False,
) -> float:
    """Work of a kernel's matrix products, masked parts of its blocks included [FLOP].

    Args:
        batch: Sequences.
        heads: Query heads.
        queries: Queries of a sequence.
        keys: Keys of a sequence.
        head_dim: Size of a head.
        causal: As in :func:`attention_pairs`.
        window: As in :func:`attention_pairs`.
        block: As in :func:`attention_pairs`.
        backward: Whether it is the backward pass in one kernel, which computes the scores again:
            five products of the size of the scores instead of two.

    Source:
        Dao et al. 2022, "FlashAttention", section 3.1 and algorithm 4 (products of both passes).
    """
    pairs = attention_pairs(queries, keys, causal=causal, window=window, block=block)
    return batch * heads * pairs * 2 * head_dim * (5 if backward else 2)


def flash_attention_s(
    chip: str | Chip,
    batch: float,
    heads: float,
    queries: float,
    keys: float,
    head_dim: float,
    *,
    kv_heads: float | None = None,
    causal: bool = True,
    window: int | None = None,
    block: int = BLOCK,
    backward: bool = False,
) -> float:
    """Time of a kernel in bf16 on one device [s]: the largest of its three loads.

    Products at the chip's share of the peak, heads padded to the width of a TPU's matrix unit;
    vector work on every score; queries, keys, values and results through memory once.

    Args:
        chip: A chip or its name.
        batch: As in :func:`flash_attention_flops`, as are those below.
        heads: Query heads.
        queries: Queries of a sequence.
        keys: Keys of a sequence.
        head_dim: Size of a head.
        kv_heads: Heads of keys and values; None: as many as query heads.
        causal: Whether a query sees earlier keys only.
        window: Keys that a query sees at most.
        block: Queries and keys of a block.
        backward: Whether it is the backward pass.

    Examples:
        >>> one = flash_attention_s("v5p", 1, 32, 8192, 8192, 128)
        >>> round(flash_attention_s("v5p", 1, 32, 16384, 16384, 128) / one, 1)  # blocks of 2048
        3.6
    """
    known = find_chip(chip) if isinstance(chip, str) else chip
    flops = flash_attention_flops(
        batch, heads, queries, keys, head_dim,
        causal=causal, window=window, block=block, backward=backward,
    )  # fmt: skip
    padding = 1.0
    if known.kind == "tpu":
        width = known.value("mxu_dim")
        padding = math.ceil(head_dim / width) * width / head_dim
    peak = known.value("peak_bf16") / known.devices * known.value("matmul_efficiency")
    pairs = attention_pairs(queries, keys, causal=causal, window=window, block=block)
    vector = known.value("peak_vector", "peak_fp32") / known.devices
    passes = 2 if backward else 1
    kv = heads if kv_heads is None else kv_heads
    nbytes = 2 * batch * head_dim * 2 * (heads * queries + kv * keys) * passes
    bandwidth = known.value("hbm_bw") / known.devices * known.value("hbm_efficiency")
    return max(
        flops * padding / peak,
        batch * heads * pairs * SCORE_OPS / vector,
        nbytes / bandwidth,
    )
