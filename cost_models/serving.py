"""Sizes and rates of serving a transformer: caches, sequences that fit, servers for prefill."""

from __future__ import annotations


def cache_bytes(
    tokens: float, *, layers: int, kv_heads: int, head_dim: int, element_bytes: float = 2
) -> float:
    """Size of the keys and values of a sequence [bytes].

    Args:
        tokens: Tokens in it.
        layers: Decoder layers.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        element_bytes: 2 for bf16, 1 for int8 [bytes].

    Source:
        jax-ml/scaling-book, transformers.md, "KV caching".

    Examples:
        >>> cache_bytes(8192, layers=40, kv_heads=40, head_dim=128)  # LLaMA-2-13B
        6710886400
    """
    return 2 * tokens * layers * kv_heads * head_dim * element_bytes


def serving_bytes(weights_bytes: float, cache_bytes_per_token: float, tokens: float) -> float:
    """What a server holds: weights, and the caches of all tokens in its batch [bytes]."""
    return weights_bytes + cache_bytes_per_token * tokens


def chips_to_hold(m: float, h: float) -> float:
    """Chips whose memory of ``h`` bytes each holds ``m`` bytes, not rounded."""
    return m / h


def sequences_that_fit(free_bytes: float, cache_bytes_per_token: float, tokens: float) -> float:
    """Sequences of so many tokens whose caches fit into what the weights leave free."""
    return free_bytes / (cache_bytes_per_token * tokens)


def tokens_per_s_per_chip(batch: float, step_s: float, chips: float) -> float:
    """Tokens that one chip generates in a second, one per sequence and step."""
    return batch / step_s / chips


def tokens_evicted_per_step(batch: float, prompt: float, generated: float) -> float:
    """Cached tokens that go in a step when a sequence ends and its place is taken by a new one.

    Source:
        jax-ml/scaling-book, applied-inference.md, "disaggregated serving".
    """
    return batch * (prompt + generated) / generated


def prefill_servers(prefill_s: float, batch: float, step_s: float, generated: float) -> float:
    """Prefill servers that keep one generating server busy.

    It takes ``batch`` new sequences in the time that it generates the old ones' tokens.

    Source:
        jax-ml/scaling-book, applied-inference.md, "disaggregated serving".
    """
    return prefill_s * batch / (step_s * generated)
