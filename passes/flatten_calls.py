"""``flatten-calls``: the one shape that the planner and most passes read."""

from __future__ import annotations

from jax.extend.mlir import ir

from autoshard.passes.registry import register_pass
from autoshard.program import normalize


@register_pass(
    "flatten-calls",
    summary="Inlines every call, removes repeated and unread ops, makes loops carry what they read",
    preserves=("numerics", "boundary", "shardings", "effects"),
)
def flatten_calls(module: ir.Module) -> None:
    """See :func:`autoshard.program.normalize`."""
    normalize(module)
