"""Which physical axes the axes of a logical mesh ride on, and the devices of such a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.planned import place_of
from autoshard.errors import InputError

if TYPE_CHECKING:
    from autoshard.cost_models.topology import Topology

MAX_ORDERS = 5000
"""Orders of the sharers of physical axes up to which all are tried; beyond, two of each."""


@dataclass(frozen=True, slots=True)
class Ride:
    """The part of one physical axis that a logical axis moves along.

    Attributes:
        axis: Name of the physical axis.
        size: Positions that it takes there.
        stride: Physical steps between neighbours: 1 is contiguous; more, and other logical axes lie
            in between and share the links.
    """

    axis: str
    size: int
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.axis}:{self.size}" + (f"@{self.stride}" if self.stride > 1 else "")


@dataclass(frozen=True, slots=True)
class LogicalAxis:
    """One axis of a mesh and what it rides on.

    Attributes:
        name: Its name in the mesh.
        rides: Major to minor; several where physical axes are folded into one.
    """

    name: str
    rides: tuple[Ride, ...]

    @property
    def size(self) -> int:
        """Devices along it."""
        return math.prod(ride.size for ride in self.rides)

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(str, self.rides)) or '1'}"


@dataclass(frozen=True)
class Layout:
    """A logical mesh laid onto a topology.

    ``str`` gives a text that :func:`~autoshard.cost_models.topology.parse_layout` reads back:
    ``v5e:4x4 data=x:4,y:2@2 model=y:2`` has ``data`` on the whole of ``x`` folded with every other
    chip of ``y``, and ``model`` on neighbours along ``y``.

    Attributes:
        topology: The devices and their wiring.
        axes: The logical axes, major to minor.
    """

    topology: Topology
    axes: tuple[LogicalAxis, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each logical axis."""
        return {axis.name: axis.size for axis in self.axes}

    def rides(self, names: Sequence[str]) -> tuple[Ride, ...]:
        """What several logical axes together ride on; neighbouring parts of an axis are joined.

        Args:
            names: Logical axes.
        """
        parts: dict[str, list[Ride]] = {}
        for axis in self.axes:
            if axis.name in names:
                for ride in axis.rides:
                    parts.setdefault(ride.axis, []).append(ride)
        joined: list[Ride] = []
        for shared in parts.values():
            start = len(joined)
            for ride in sorted(shared, key=lambda r: r.stride):
                last = joined[-1] if len(joined) > start else None
                if last is not None and last.stride * last.size == ride.stride:
                    joined[-1] = Ride(last.axis, last.size * ride.size, last.stride)
                else:
                    joined.append(ride)
        return tuple(joined)

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """Position along each physical axis of every device, in the shape of the logical mesh."""
        shape = tuple(axis.size for axis in self.axes)
        found = {axis.name: np.zeros(shape, dtype=np.int64) for axis in self.topology.axes}
        for dimension, axis in enumerate(self.axes):
            index = np.arange(axis.size)
            below = axis.size
            for ride in axis.rides:
                below //= ride.size
                digit = index // below % ride.size
                spread = [1] * len(shape)
                spread[dimension] = axis.size
                found[ride.axis] = found[ride.axis] + (digit * ride.stride).reshape(spread)
        return found

    def __str__(self) -> str:
        return " ".join([self.topology.name, *map(str, self.axes)])

    def check(self) -> None:
        """Refuse a layout in which a device is nowhere, or at two places of the mesh.

        Raises:
            InputError: It is one.
        """
        for axis in self.topology.axes:
            covered = 1
            for ride in sorted(
                (r for a in self.axes for r in a.rides if r.axis == axis.name),
                key=lambda r: r.stride,
            ):
                if ride.stride != covered:
                    break
                covered *= ride.size
            if covered != axis.size:
                raise InputError(
                    f"the mesh does not take each position of axis {axis.name!r} of "
                    f"{self.topology.name} once",
                    at=str(self),
                    fix="let the sizes along each physical axis multiply to its own, with strides "
                    "1, then the size before, and so on",
                )
        named = {axis.name for axis in self.topology.axes}
        for ride in (r for a in self.axes for r in a.rides):
            if ride.axis not in named:
                self.topology.axis(ride.axis)  # raises


def layouts(
    topology: Topology, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None
) -> Iterator[Layout]:
    """All ways to lay a mesh onto a topology, in no order.

    A logical axis takes at most one part of each physical axis. Where very many orders of the parts
    are possible, of each physical axis only two are tried (minor axes inside, or outside).

    Args:
        topology: The devices.
        sizes: Devices along each logical axis, major to minor.
        dcn: Slices along each logical axis, as far as that is to be fixed.

    Raises:
        InputError: The sizes do not multiply to the number of devices, or cannot be laid out.
    """
    names = tuple(sizes)
    if math.prod(sizes.values()) != topology.devices or min(sizes.values(), default=1) < 1:
        meant = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"a mesh of {meant} has {math.prod(sizes.values())} devices, {topology.name} has "
            f"{topology.devices}",
            fix=f"give sizes that multiply to {topology.devices}",
        )
    physical = [axis for axis in topology.axes if axis.size > 1]
    splits = _splits([axis.size for axis in physical], list(sizes.values()))
    for split in splits:
        if dcn is not None and any(
            factors[names.index(name)] != wanted
            for axis, factors in zip(physical, split, strict=True)
            if axis.name == "dcn"
            for name, wanted in dcn.items()
            if name in names
        ):
            continue
        sharers = [[i for i, factor in enumerate(factors) if factor > 1] for factors in split]
        if math.prod(math.factorial(len(s)) for s in sharers) <= MAX_ORDERS:
            orders = [list(itertools.permutations(s)) for s in sharers]
        else:
            orders = [[tuple(s), tuple(reversed(s))] for s in sharers]
        for order in itertools.product(*orders):
            rides: list[list[Ride]] = [[] for _ in names]
            for axis, factors, outside_in in zip(physical, split, order, strict=True):
                stride = 1
                for logical in reversed(outside_in):
                    rides[logical].append(Ride(axis.name, factors[logical], stride))
                    stride *= factors[logical]
            yield Layout(
                topology,
                tuple(
                    LogicalAxis(name, tuple(parts))
                    for name, parts in zip(names, rides, strict=True)
                ),
            )


def _splits(physical: list[int], wanted: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Per physical axis the factor that each logical axis takes of it."""
    if not physical:
        if all(size == 1 for size in wanted):
            yield ()
        return
    for factors in factorisations(physical[0], len(wanted)):
        if all(size % factor == 0 for size, factor in zip(wanted, factors, strict=True)):
            left = [size // factor for size, factor in zip(wanted, factors, strict=True)]
            for rest in _splits(physical[1:], left):
                yield (factors, *rest)


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered products of ``parts`` numbers that give ``number``.

    Examples:
        >>> list(factorisations(4, 2))
        [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 0:
        if number == 1:
            yield ()
        return
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorisations(number // first, parts - 1):
                yield (first, *rest)


def layout_of(devices: NDArray[Any], names: Sequence[str], topology: Topology) -> Layout | None:
    """How a mesh of devices with coordinates lies on a topology.

    Args:
        devices: The mesh's devices: real ones of a TPU, ahead-of-time ones, or planned ones.
        names: The mesh's axes.
        topology: What the devices are part of; they must be all of its devices.

    Returns:
        The layout; None if an axis does not move along physical axes in equal steps.
    """
    where = _coordinates(devices, topology)
    if where is None:
        return None
    axes = []
    for dimension, name in enumerate(names):
        line = {
            axis: np.moveaxis(at, dimension, 0).reshape(at.shape[dimension], -1)[:, 0]
            for axis, at in where.items()
        }
        rides, below = [], []
        for axis, at in line.items():
            values = np.unique(at)
            if len(values) > 1:
                steps = np.flatnonzero(np.diff(at))
                below.append(int(steps[0]) + 1)
                rides.append(Ride(axis, len(values), int(values[1] - values[0])))
        order = sorted(range(len(rides)), key=lambda i: -below[i])
        axes.append(LogicalAxis(name, tuple(rides[i] for i in order)))
    layout = Layout(topology, tuple(axes))
    try:
        layout.check()
    except InputError:
        return None
    meant = layout.positions()
    if any(meant[a].shape != at.shape for a, at in where.items()):
        return None
    # Positions are compared relative to the first device, so that a shifted slice is no other.
    same = all(np.array_equal(meant[axis], at) for axis, at in where.items())
    return layout if same else None


def _coordinates(devices: NDArray[Any], topology: Topology) -> dict[str, NDArray[np.int64]] | None:
    """Position along each physical axis of every device, counted from the lowest."""
    if devices.size != topology.devices or topology.kind != "tpu":
        return None
    at = np.array([place_of(topology, device) for device in devices.flat], dtype=np.int64)
    at -= at.min(axis=0)
    return {
        axis.name: at[:, column].reshape(devices.shape) for column, axis in enumerate(topology.axes)
    }
