"""What single ops of one device's program cost under a cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.mlir import ir

from autoshard.cost_models.protocol import CollectiveKind, CostModel, MeshAxis, Work
from autoshard.passes.contraction import Einsum, Labels
from autoshard.passes.exchanges import Exchange, Groups, bits_of
from autoshard.shardings import MeshShape, Sharding


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


@dataclass(frozen=True, slots=True)
class ShardedProducts:
    """Prices the products of an einsum whose factors are sharded.

    Every device multiplies its pieces; what is summed over a split dimension is added up by an
    all-reduce of the product's result.

    Attributes:
        model: Prices.
        mesh: The mesh.
        sizes: Size of each label.
        axes: Mesh axes that split a label; those that none does are left out.
        element: Element type of all factors.
    """

    model: CostModel
    mesh: MeshShape
    sizes: Mapping[int, int]
    axes: Mapping[int, tuple[str, ...]]
    element: ir.Type

    def __call__(self, left: Labels, right: Labels, out: Labels) -> float:
        """Time of one product [s], from the labels of its operands and of its result."""
        used: set[str] = set()
        pieces, split = {}, {}
        for n in sorted(left | right):
            free = tuple(a for a in self.axes.get(n, ()) if a not in used)
            used.update(free)
            split[n] = free
            pieces[n] = -(-self.sizes[n] // self.mesh.size(free))

        def size(labels: Labels) -> int:
            return math.prod(pieces[n] for n in labels)

        summed = (left & right) - out
        sizes = size(left & out & right), size(left - right), size(right - left), size(summed)
        width = bits_of(self.element) / 8
        nbytes = width * (size(left) + size(right) + size(out))
        time_s = dot_s(self.model, sizes, self.element, nbytes)
        over = tuple(MeshAxis(a, self.mesh.size((a,))) for n in sorted(summed) for a in split[n])
        if over:
            sent = np.array([width * size(out)])
            time_s += float(self.model.collective_s("all_reduce", sent, over)[0])
        return time_s


def axes_of_labels(
    einsum: Einsum, shardings: Sequence[Sharding | None]
) -> dict[int, tuple[str, ...]]:
    """The mesh axes that split each label, from the shardings of the factors that are known."""
    found: dict[int, tuple[str, ...]] = {}
    for labels, sharding in zip(einsum.labels, shardings, strict=True):
        for n, axes in zip(labels, sharding or (), strict=False):
            if axes:
                found.setdefault(n, axes)
    return found
