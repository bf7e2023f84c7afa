"""A pass as another distribution has it."""

from __future__ import annotations

from jax.extend.mlir import ir

from autoshard.passes.registry import register_pass


@register_pass("test-elsewhere", summary="Comes from another distribution")
def elsewhere(module: ir.Module, *, times: int = 1) -> None:
    pass
