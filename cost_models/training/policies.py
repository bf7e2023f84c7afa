"""Rematerialisation policies by their published names: what the backward pass computes again."""

from __future__ import annotations

import re

PARTS = ("qkv", "attention", "out", "up")
"""Parts of a layer whose results a rematerialisation policy saves or computes again."""

_SAVED_BY_NAME = {
    "qkv": "qkv",
    "query": "qkv",
    "qkv_proj": "qkv",
    "context": "attention",
    "out_proj": "out",
    "mlpwi": "up",
    "mlpwi_0": "up",
}
# Words in a policy's name, the first that fits, and the parts that are then computed again. Names
# are those of MaxText and axlearn; a flash attention is a custom call, which saves no product.
_RECOMPUTED_BY_WORD: tuple[tuple[str, frozenset[str]], ...] = (
    ("none", frozenset()),
    ("with_context_except_mlp", frozenset({"up"})),
    ("except_mlpwi", frozenset({"attention", "up"})),
    ("flash-attention output", frozenset()),
    ("minimal_flash", frozenset()),
    ("minimal_with_context", frozenset()),
    ("minimal", frozenset({"attention"})),
    ("dots_saveable", frozenset({"attention"})),
    ("attention projections", frozenset({"attention", "up"})),
    ("qkv_proj", frozenset({"attention", "out", "up"})),
    ("out_proj", frozenset({"qkv", "attention", "up"})),
)


def recomputed(policy: str) -> frozenset[str]:
    """The parts of a layer that the backward pass computes again under a policy.

    Args:
        policy: As published: a name of MaxText or axlearn, or ``save{...}``/``offload{...}`` with
            the names of the tensors that are kept. What is not known computes everything again.

    Examples:
        >>> sorted(recomputed("custom: offload{decoder_layer_input,out_proj,query,key,value}"))
        ['attention', 'up']
    """
    policy = policy.lower()
    named = re.search(r"(?:save|offload)\{([^}]*)\}", policy)
    if named:
        kept = {_SAVED_BY_NAME.get(name.strip(), "") for name in named[1].split(",")}
        return frozenset(PARTS) - kept
    if not policy.startswith("full"):
        for word, parts in _RECOMPUTED_BY_WORD:
            if word in policy:
                return parts
    return frozenset(PARTS)
