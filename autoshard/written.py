"""Collectives that a program contains itself, in the bodies of its ``shard_map``s."""

from __future__ import annotations

import re

import numpy as np
from jax.extend.mlir import ir

from autoshard.graph import WrittenCollective, WrittenKind
from autoshard.shardings import MeshShape

_KINDS: dict[str, WrittenKind] = {
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_broadcast": "all_gather",  # what a device sends is the same
    "stablehlo.collective_permute": "permute",
    "stablehlo.reduce_scatter": "reduce_scatter",
}
_AXIS = re.compile(r'name = "([^"]+)"')
_DIMENSIONS = ("all_gather_dim", "scatter_dimension", "concat_dimension")


def collective_of(operation: ir.Operation, mesh: MeshShape) -> WrittenCollective | None:
    """What an op of a ``shard_map`` sends; None if it is no collective among several devices."""
    if operation.name not in _KINDS:
        return None
    kind = _KINDS[operation.name]
    attribute = operation.attributes[
        "source_target_pairs" if kind == "permute" else "replica_groups"
    ]
    dim = next((_integer(operation, n) for n in _DIMENSIONS if n in operation.attributes), 0)
    if isinstance(attribute, ir.DenseElementsAttr):
        groups = integers(attribute)
        if not groups.size or groups.shape[1] < 2:
            return None
        places = np.unravel_index(np.where(groups < 0, groups[:, :1], groups), mesh.sizes)
        varies = [bool((place != place[:, :1]).any()) for place in places]
        axes = tuple(name for name, moves in zip(mesh.names, varies, strict=True) if moves)
        devices = mesh.size(axes) if kind == "permute" else groups.shape[1]
    else:  # ``replica_group_mesh_axes``, which names axes (JAX 0.11 and later)
        axes = tuple(a for a in _AXIS.findall(str(attribute)) if a in mesh.names)
        devices = mesh.size(axes)
    return WrittenCollective(kind, axes, devices, dim) if devices > 1 else None


def integers(attribute: ir.Attribute) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """A matrix of device numbers."""
    dense = ir.DenseIntElementsAttr(attribute)
    rows, columns = ir.RankedTensorType(dense.type).shape
    if dense.is_splat:
        return np.full((rows, columns), int(dense[0]) if len(dense) else 0, np.int64)
    flat = [int(dense[k]) for k in range(rows * columns)]
    return np.array(flat, np.int64).reshape(rows, columns)


def _integer(operation: ir.Operation, name: str) -> int:
    return int(ir.IntegerAttr(operation.attributes[name]).value)
