"""Mesh axes and shardings of one tensor, as plain values.

A :class:`Sharding` says, for each dimension of a tensor, which mesh axes split it, major to minor;
axes that are not named replicate the tensor. Dimensions are split evenly or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jax.sharding import PartitionSpec

Sharding = tuple[tuple[str, ...], ...]
"""Per dimension, the names of the mesh axes that split it, major to minor."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The named axes of a device mesh, major to minor, without devices.

    Attributes:
        names: Axis names.
        sizes: Devices along each axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Product of the sizes of ``axes``."""
        return math.prod(self.sizes[self.names.index(a)] for a in axes)

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


def replicated(rank: int) -> Sharding:
    """The sharding of a tensor that every device holds whole."""
    return ((),) * rank


def local_shape(shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of the piece that one device holds; every dimension must divide."""
    return tuple(d // mesh.size(axes) for d, axes in zip(shape, sharding, strict=True))


def splitting(sharding: Sharding, mesh: MeshShape) -> Sharding:
    """The same sharding without axes of size one, which split nothing."""
    return tuple(tuple(a for a in dim if mesh.size((a,)) > 1) for dim in sharding)


def divides(shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape) -> bool:
    """Whether ``sharding`` splits every dimension of ``shape`` evenly."""
    return all(d % mesh.size(axes) == 0 for d, axes in zip(shape, sharding, strict=True))


def to_partition_spec(sharding: Sharding) -> PartitionSpec:
    """The same sharding as JAX writes it, without trailing ``None``.

    Examples:
        >>> tuple(to_partition_spec((("data",), (), ("x", "y"), ())))
        ('data', None, ('x', 'y'))
    """
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
