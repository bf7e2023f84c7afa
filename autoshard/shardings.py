"""Mesh axes and shardings of one tensor, as plain values.

A :class:`Sharding` says, for each dimension of a tensor, which mesh axes split it, major to minor;
axes that are not named replicate the tensor. A dimension that its axes do not divide is *padded*:
every device but the last ones holds the quotient rounded up, as XLA partitions it. Arguments and
results are never padded, other values only where :func:`pads` allows it.
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
    """Shape of the piece that one device holds, padding included."""
    return tuple(-(-d // mesh.size(axes)) for d, axes in zip(shape, sharding, strict=True))


def local_bytes(shape: tuple[int, ...], nbytes: int, sharding: Sharding, mesh: MeshShape) -> int:
    """Size of the piece that one device holds, padding included [bytes].

    Args:
        shape: Global shape.
        nbytes: Size of the whole tensor [bytes].
        sharding: How it is split.
        mesh: The mesh.
    """
    return -(-nbytes * math.prod(local_shape(shape, sharding, mesh)) // max(1, math.prod(shape)))


MAX_PADDING = 0.25
"""A padded dimension is longer than the true one by at most this fraction."""


def pads(size: int, count: int) -> bool:
    """Whether a dimension may be split into ``count`` uneven parts, the last ones padded.

    Each part has to hold two elements or more, and little may be wasted.

    Examples:
        >>> pads(50257, 8), pads(25, 4), pads(8, 4), pads(9, 8)
        (True, True, False, False)
    """
    part = -(-size // count)
    return size % count != 0 and size >= 2 * count and part * count <= (1 + MAX_PADDING) * size


def splitting(sharding: Sharding, mesh: MeshShape) -> Sharding:
    """The same sharding without axes of size one, which split nothing."""
    return tuple(tuple(a for a in dim if mesh.size((a,)) > 1) for dim in sharding)


def divides(shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape) -> bool:
    """Whether ``sharding`` splits every dimension of ``shape`` evenly."""
    return all(d % mesh.size(axes) == 0 for d, axes in zip(shape, sharding, strict=True))


def loosened(
    shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape, padded: bool = False
) -> Sharding:
    """The sharding with the minor axes dropped that its dimensions cannot be split by.

    Args:
        shape: Global shape.
        sharding: A sharding that may split dimensions unevenly.
        mesh: The mesh.
        padded: Whether splits that :func:`pads` allows are kept.

    Examples:
        >>> loosened((6, 7), (("a", "b"), ("c",)), MeshShape(("a", "b", "c"), (2, 2, 2)))
        (('a',), ())
    """
    dims = []
    for size, axes in zip(shape, sharding, strict=True):
        kept = axes
        while kept and not _fits(size, mesh.size(kept), padded):
            kept = kept[:-1]
        dims.append(kept)
    return tuple(dims)


def _fits(size: int, count: int, padded: bool) -> bool:
    return count == 1 or (size > 0 and size % count == 0) or (padded and pads(size, count))


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
