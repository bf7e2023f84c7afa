"""What single ops of one device's program cost under a cost model."""

from __future__ import annotations

import numpy as np
from jax.extend.mlir import ir

from autoshard.cost_models.protocol import CollectiveKind, CostModel, MeshAxis, Work
from autoshard.passes.exchanges import Exchange, Groups
from autoshard.shardings import MeshShape


def exchange_s(
    model: CostModel,
    exchange: Exchange,
    mesh: MeshShape | None,
    kind: CollectiveKind,
    nbytes: float,
) -> float:
    """Time of a collective among the groups of another [s].

    Args:
        model: The cost model.
        exchange: Whose groups.
        mesh: The mesh that tells along which axes they lie; None: an axis of their own.
        kind: Which collective.
        nbytes: Bytes on one device of its larger side.
    """
    axes = None if mesh is None else axes_of(exchange.groups, mesh)
    if axes is None:
        axes = (MeshAxis("devices", exchange.devices),)
    return float(model.collective_s(kind, np.array([float(nbytes)]), axes)[0])


def axes_of(groups: Groups, mesh: MeshShape) -> tuple[MeshAxis, ...] | None:
    """The mesh axes along which the devices of each group lie; None if they are no sub-mesh."""
    listed = np.array(groups)
    if listed.size != mesh.devices or listed.max() >= mesh.devices:
        return None
    places = np.unravel_index(listed, mesh.sizes)
    names = [
        n for n, place in zip(mesh.names, places, strict=True) if (place != place[:, :1]).any()
    ]
    axes = tuple(MeshAxis(name, mesh.size((name,))) for name in names)
    return axes if int(np.prod([a.size for a in axes])) == listed.shape[1] else None


def dot_s(
    model: CostModel, sizes: tuple[int, int, int, int], element: ir.Type, nbytes: float
) -> float:
    """Time of a product [s].

    Args:
        model: The cost model.
        sizes: (batch, m, n, k).
        element: Element type of the operands.
        nbytes: Bytes of operands and result.
    """
    batch, m, n, k = sizes
    work = Work(
        "stablehlo.dot_general",
        str(element),
        np.array([2.0 * batch * m * n * k]),
        np.array([float(nbytes)]),
        np.array([sizes]),
    )
    return float(model.op_s(work)[0])
