"""Devices of a topology that nobody has to own, and where devices are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard.cost_models.wiring import AXES, CORE, CPUS, DOMAIN, NODES, SLICES
from autoshard.errors import InputError

if TYPE_CHECKING:
    from autoshard.cost_models.topology import Topology


@dataclass(frozen=True)
class PlannedDevice:
    """A device of a topology that nobody has to own; plans are made for it, nothing runs on it.

    Attributes:
        topology: What it is part of.
        place: Its position along each axis of the topology.
    """

    topology: Topology
    place: tuple[int, ...]

    def _at(self, axis: str) -> int:
        names = [a.name for a in self.topology.axes]
        return self.place[names.index(axis)] if axis in names else 0

    @property
    def id(self) -> int:
        """Its number: chips by x, then y, then z, the devices of a chip next to each other."""
        number = 0
        sizes = {axis.name: axis.size for axis in self.topology.axes}
        for name in (SLICES, "z", "y", "x", CORE, NODES, DOMAIN, CPUS):
            if name in sizes:
                number = number * sizes[name] + self._at(name)
        return number

    @property
    def platform(self) -> str:
        """``tpu``, ``cuda`` or ``cpu``, as programs are lowered for it."""
        return {"gpu": "cuda"}.get(self.topology.kind, self.topology.kind)

    @property
    def device_kind(self) -> str:
        """The chip's name."""
        return "cpu" if self.topology.chip is None else self.topology.chip.name

    @property
    def coords(self) -> tuple[int, int, int]:
        """Where its chip is in its slice: x, y, z."""
        return self._at("x"), self._at("y"), self._at("z")

    @property
    def core_on_chip(self) -> int:
        """Which device of its chip it is."""
        return self._at(CORE)

    @property
    def slice_index(self) -> int:
        """Which slice it is in."""
        return self._at(SLICES)

    @property
    def process_index(self) -> int:
        """Its host; a host holds chips that are next to each other along x and y."""
        if self.topology.kind != "tpu":
            return self._at(NODES)
        block = _host_block(self.topology)
        at, shape = self.coords, (*self.topology.shape, 1, 1)
        number = self.slice_index
        for axis in (2, 1, 0):
            side = block[axis]
            number = number * -(-shape[axis] // side) + at[axis] // side
        return number

    @property
    def client(self) -> Any:
        """There is none.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"{self} is planned, nothing can be compiled for it or run on it",
            fix="plan with it; to compile, give topology.mesh(..., devices=) the devices of a TPU "
            "or of jax.experimental.topologies.get_topology_desc",
        )

    def __repr__(self) -> str:
        return f"{self.topology.name}[{','.join(map(str, self.place))}]"


def _host_block(topology: Topology) -> tuple[int, int, int]:
    """Chips of one host along x, y and z: 2x2, or 2x4 (4x2) where a host has eight."""
    x, y, z = (*topology.shape, 1, 1)[:3]
    if topology.chips_per_host == x * y * z:
        return x, y, z
    if topology.chips_per_host == 8:
        return (2, 4, 1) if y % 4 == 0 else (4, 2, 1)
    return min(x, 2), min(y, 2), max(1, topology.chips_per_host // (min(x, 2) * min(y, 2)))


def place_of(topology: Topology, device: Any) -> tuple[int, ...]:
    """Position of a device along each axis of the topology, from its coordinates."""
    read = {
        SLICES: getattr(device, "slice_index", 0) or 0,
        CORE: getattr(device, "core_on_chip", 0),
        CPUS: device.id,
        **dict(zip(AXES, getattr(device, "coords", ()), strict=False)),
    }
    unknown = [axis.name for axis in topology.axes if axis.name not in read]
    if unknown:
        raise InputError(
            f"{device} has no position along {', '.join(unknown)}",
            fix="leave devices out, or give devices of a TPU",
        )
    return tuple(int(read[axis.name]) for axis in topology.axes)
