from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.attention import (
    attention_pairs,
    flash_attention_flops,
    flash_attention_s,
)


def counted(queries: int, keys: int, causal: bool, window: int | None, block: int) -> int:
    """Pairs in all blocks of which some pair is seen."""
    pairs = 0
    for q in range(0, queries, block):
        for k in range(0, keys, block):
            seen = any(
                (not causal or key <= query) and (window is None or query - key < window)
                for query in range(q, min(q + block, queries))
                for key in range(k, min(k + block, keys))
            )
            pairs += seen * block * block
    return pairs


@given(st.integers(1, 6), st.sampled_from([2, 4]))
def test_a_causal_kernel_computes_every_block_that_some_query_sees(blocks: int, block: int) -> None:
    length = blocks * block
    assert attention_pairs(length, length, block=block) == counted(
        length, length, True, None, block
    )


def test_a_window_leaves_out_blocks_before_it() -> None:
    # On average a query's block sees its window and one block more; the first ones see less.
    length, block, window = 64, 4, 8
    exact = counted(length, length, True, window, block)
    model = attention_pairs(length, length, window=window, block=block)
    assert model == pytest.approx(exact, rel=0.1)


def test_all_pairs_are_computed_without_a_mask() -> None:
    assert attention_pairs(10, 20, causal=False) == 200
    assert flash_attention_flops(2, 3, 10, 20, 8, causal=False) == 2 * 3 * 200 * 4 * 8
    assert flash_attention_flops(1, 1, 4, 4, 2, backward=True) == 2.5 * flash_attention_flops(
        1, 1, 4, 4, 2
    )


def test_narrow_heads_fill_a_wide_matrix_unit_half() -> None:
    # Long heads, so that products take longest: 128 of 256 on v6e, all of 128 on v5p.
    one, two = (flash_attention_s("v6e", 1, 8, 8192, 8192, d, causal=False) for d in (384, 512))
    assert one == pytest.approx(two)


def test_decoding_reads_the_cache() -> None:
    step = flash_attention_s("v5e", 16, 32, 1, 8192, 128, kv_heads=8, causal=False)
    cache = 2 * 2 * 16 * 8192 * 8 * 128
    assert step == pytest.approx(cache / (819e9 * 0.85), rel=0.01)


@given(
    st.sampled_from(["v4", "v5e", "v5p", "v6e", "v7x", "h100"]),
    st.integers(1, 4),
    st.sampled_from([1024, 4096, 16384]),
    st.sampled_from([64, 128, 256]),
)
def test_longer_sequences_and_backward_passes_take_longer(
    chip: str, heads: int, length: int, head_dim: int
) -> None:
    once = flash_attention_s(chip, 1, heads, length, length, head_dim)
    assert flash_attention_s(chip, 1, heads, 2 * length, 2 * length, head_dim) > once
    assert flash_attention_s(chip, 1, heads, length, length, head_dim, backward=True) > once
    assert flash_attention_s(chip, 1, heads, length, length, head_dim, window=512) <= once
