"""A module as bytes and back: copies, counts of ops, the mesh it is for."""

from __future__ import annotations

import io
from collections import Counter

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autoshard.program import TERMINATORS, operations
from autoshard.shardings import MeshShape


def to_bytes(module: ir.Module) -> bytes:
    """The module as MLIR bytecode, source locations included."""
    held = io.BytesIO()
    module.operation.write_bytecode(held)
    return held.getvalue()


def from_bytes(data: bytes | str, context: ir.Context) -> ir.Module:
    """The module that :func:`to_bytes` or a text holds."""
    with context:
        return ir.Module.parse(data)


def copy_of(module: ir.Module) -> ir.Module:
    """A module of its own with the same ops."""
    return from_bytes(to_bytes(module), module.context)


def op_counts(module: ir.Module) -> Counter[str]:
    """Ops of all functions by name, those of regions included, terminators left out."""
    counts = Counter(operation.name for operation in operations(module.body))
    for name in (*TERMINATORS, "func.func", "sdy.mesh"):
        counts.pop(name, None)
    return counts


def mesh_of(module: ir.Module) -> MeshShape | None:
    """The mesh that shardings in a module are for; None if it has none."""
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.operation.attributes["mesh"]).axes)
            named = [(axis.name, axis.size) for axis in axes]
            if named:
                return MeshShape(tuple(n for n, _ in named), tuple(s for _, s in named))
    return None
