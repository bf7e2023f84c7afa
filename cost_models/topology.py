"""Slices of chips as they are wired: ``v5e:4x4``, ``2*v5p:4x4x8``, ``h100:8x4``, ``cpu:8``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.cost_models.chips import Chip, find_chip
from autoshard.cost_models.layout import Layout, LogicalAxis, Ride, factorisations, layouts
from autoshard.cost_models.planned import PlannedDevice, place_of
from autoshard.cost_models.routes import gather_times_s, slowness
from autoshard.cost_models.wiring import (
    AXES,
    CORE,
    CPUS,
    DOMAIN,
    NODES,
    SLICES,
    PhysicalAxis,
    flat_shape,
    tpu_shape,
    wraps,
)
from autoshard.errors import InputError

_FORM = re.compile(r"(?:(?P<slices>\d+)\*)?(?P<chip>[^*]+):(?P<shape>\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Topology:
    """Devices and how they are wired, from a text.

    ``CHIP:SHAPE`` is one slice, e.g. ``v5e:4x4`` or ``v5p:4x4x8``; ``N*CHIP:SHAPE`` are N such
    slices, joined by the data-centre network. For a GPU the shape is devices in an NVLink domain
    times nodes, ``h100:8x4``, or one domain alone, ``h100:8``. ``cpu:8`` are eight virtual devices.
    The chip is a name or another name of a chip in the catalogue, or a file
    (:func:`~autoshard.cost_models.chips.find_chip`).

    Axes of a torus are closed by the published rules: on v2, v3, v5e and v6e an axis that spans the
    pod (16 chips; 32 on v3), on v4, v5p and v7x every axis of a slice made of whole 4x4x4 cubes.
    Shapes that do not exist are refused.

    Args:
        name: The text.

    Attributes:
        name: The text in its normal form; ``Topology(t.name) == t``.
        chip: The chip; None for CPU devices.
        slices: Slices over DCN; 1 for GPUs and CPUs.
        shape: Chips along each axis of a slice; GPUs of a node, and nodes; CPU devices.

    Raises:
        InputError: The text is no topology, or no such slice exists.
        UnknownNameError: There is no such chip.

    Source:
        docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /tpu7x and supported-tpu-configurations
        (tables of slices); jax-ml/scaling-book, tpus.md, "TPU Networking" (wraparound).

    Examples:
        >>> slice = Topology("v5p:4x4x8")
        >>> slice.devices, slice.hosts, slice.axes[2]
        (128, 32, PhysicalAxis(name='z', size=8, wrapped=True))
        >>> [axis.wrapped for axis in Topology("v5e:8x16").axes]
        [False, True]
    """

    name: str
    chip: Chip | None = field(init=False, compare=False, repr=False)
    slices: int = field(init=False, compare=False, repr=False)
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = _FORM.fullmatch(self.name.replace(" ", ""))
        if found is None:
            raise InputError(
                f"{self.name!r} is no topology",
                fix="say e.g. v5e:4x4, 2*v5p:4x4x4 (two slices), h100:8x4 (GPUs of a node x nodes) "
                "or cpu:8",
            )
        slices = int(found["slices"] or 1)
        shape = tuple(map(int, found["shape"].split("x")))
        if slices < 1 or min(shape) < 1:
            raise InputError(f"{self.name!r} has no devices", fix="give sizes of at least 1")
        is_cpu = found["chip"].lower() == "cpu"
        chip = None if is_cpu else find_chip(found["chip"])
        spelt = found["chip"] if chip is None or "." in found["chip"] else chip.name.lower()
        if chip is not None and chip.kind == "tpu":
            shape = tpu_shape(chip, shape, self.name)
        else:
            shape = flat_shape(chip, shape, slices, self.name)
        prefix = f"{slices}*" if slices > 1 else ""
        normal = f"{prefix}{spelt if not is_cpu else 'cpu'}:{'x'.join(map(str, shape))}"
        values = {"name": normal, "chip": chip, "slices": slices, "shape": shape}
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @property
    def kind(self) -> str:
        """``tpu``, ``gpu`` or ``cpu``."""
        return "cpu" if self.chip is None else self.chip.kind

    @property
    def devices_per_chip(self) -> int:
        """JAX devices on one chip: 2 on v2, v3 and v7x, where each core is a device."""
        return 1 if self.chip is None else self.chip.devices

    @property
    def cores_per_device(self) -> int:
        """Cores that work as one JAX device: 2 on v4 and v5p (megacore), 1 elsewhere."""
        if self.chip is None or "cores_per_chip" not in self.chip.figures:
            return 1
        return int(self.chip.value("cores_per_chip")) // self.devices_per_chip

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices in all slices."""
        return self.chips * self.devices_per_chip

    @property
    def chips_per_host(self) -> int:
        """Chips of one host; a slice smaller than a host has one host."""
        if self.chip is None:
            return self.chips
        if self.chip.kind == "gpu":
            return self.shape[0]
        return min(int(self.chip.value("chips_per_host")), math.prod(self.shape))

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return -(-self.chips // self.chips_per_host)

    @cached_property
    def axes(self) -> tuple[PhysicalAxis, ...]:
        """The axes along which devices are wired, the slowest first."""
        if self.chip is None:
            return (PhysicalAxis(CPUS, self.shape[0]),)
        if self.chip.kind == "gpu":
            return (PhysicalAxis(NODES, self.shape[1]), PhysicalAxis(DOMAIN, self.shape[0]))
        torus = [
            PhysicalAxis(name, size, wrapped)
            for name, size, wrapped in zip(
                AXES, self.shape, wraps(self.chip, self.shape), strict=False
            )
        ]
        around = [PhysicalAxis(SLICES, self.slices)] if self.slices > 1 else []
        inside = [PhysicalAxis(CORE, self.devices_per_chip)] if self.devices_per_chip > 1 else []
        return (*around, *torus, *inside)

    def axis(self, name: str) -> PhysicalAxis:
        """The axis of that name.

        Raises:
            InputError: There is none.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise InputError(
            f"{self.name} has no axis {name!r}",
            fix=f"known: {', '.join(a.name for a in self.axes)}",
        )

    def layouts(
        self, sizes: Mapping[str, int], *, dcn: Mapping[str, int] | None = None
    ) -> tuple[Layout, ...]:
        """The ways to lay a logical mesh onto the devices, best first.

        The best one cuts the fewest physical axes among logical ones; among those, it has the
        fastest last axis, then the fastest one before it, and so on
        (:func:`~autoshard.cost_models.routes.slowness`).

        Args:
            sizes: Devices along each logical axis, major to minor.
            dcn: Slices along a logical axis, where that is to be fixed: ``{"data": 2}``.

        Raises:
            InputError: There is no way.
        """
        found = sorted(layouts(self, sizes, dcn), key=slowness)
        if not found:
            raise InputError(
                f"{self.name} cannot be laid out as {dict(sizes)}"
                + (f" with slices {dict(dcn)}" if dcn else ""),
                fix="give each logical axis sizes that divide those of the physical axes: "
                + ", ".join(f"{axis.name}={axis.size}" for axis in self.axes),
            )
        return tuple(found)

    def meshes(self, names: Sequence[str]) -> Iterator[Layout]:
        """Every way to give all devices to logical axes of these names, each laid out best.

        The fastest first: least time for one all-gather over each axis in sum. Axes of one device
        are among them.

        Args:
            names: Names of the logical axes, major to minor.

        Examples:
            >>> [str(m) for m in Topology("v5e:2x2").meshes(["data", "model"])][:2]
            ['v5e:2x2 data=x:2,y:2 model=1', 'v5e:2x2 data=1 model=x:2,y:2']
        """
        best = []
        for sizes in factorisations(self.devices, len(names)):
            found = list(layouts(self, dict(zip(names, sizes, strict=True))))
            best.extend(sorted(found, key=slowness)[:1])
        yield from sorted(best, key=lambda layout: (sum(gather_times_s(layout)), slowness(layout)))

    def mesh(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        layout: Layout | str | None = None,
        dcn: Mapping[str, int] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Mesh:
        """A mesh for planning, with no hardware needed; :func:`autoshard.autoshard` takes it.

        Args:
            sizes: Devices along each logical axis, major to minor: ``{"data": 8, "model": 2}``.
            layout: Where the axes lie, instead of ``sizes``; a :class:`Layout` or its text. None:
                the best of :meth:`layouts`.
            dcn: As in :meth:`layouts`.
            devices: Devices to lay out by their coordinates: those of the TPU at hand, or of
                ``jax.experimental.topologies.get_topology_desc`` to compile ahead of time. None:
                planned devices, which are nowhere.

        Raises:
            InputError: The sizes do not fit, or the devices are not those of this topology.

        Examples:
            >>> mesh = Topology("v5e:4x4").mesh({"data": 8, "model": 2})
            >>> mesh.shape["data"], mesh.devices[0, 1]
            (8, v5e:4x4[1,0])
        """
        if layout is None and sizes is None:
            raise InputError("a mesh needs axes", fix='say e.g. mesh({"data": 8, "model": 2})')
        if isinstance(layout, str):
            layout = parse_layout(layout)
        chosen = layout or self.layouts(sizes or {}, dcn=dcn)[0]
        if chosen.topology != self:
            raise InputError(
                f"the layout is for {chosen.topology.name}, not {self.name}",
                fix="use the topology that it was made for",
            )
        where = chosen.positions()
        names = tuple(axis.name for axis in chosen.axes)
        flat = np.stack([where[axis.name].ravel() for axis in self.axes], axis=1)
        if devices is None:
            found = [PlannedDevice(self, tuple(map(int, at))) for at in flat]
        else:
            by_place = {place_of(self, device): device for device in devices}
            missing = [tuple(at) for at in flat if tuple(map(int, at)) not in by_place]
            if missing:
                raise InputError(
                    f"{self.name} has a device at {missing[0]} along "
                    f"{', '.join(axis.name for axis in self.axes)}; none was given",
                    fix="give all devices of such a slice",
                )
            found = [by_place[tuple(map(int, at))] for at in flat]
        array = np.empty(len(found), dtype=object)
        array[:] = found
        shape = tuple(axis.size for axis in chosen.axes)
        return Mesh(array.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))

    def __str__(self) -> str:
        return self.name


def parse_layout(text: str) -> Layout:
    """The layout that ``str`` of one wrote.

    Raises:
        InputError: It is no layout, or does not take each device of its topology once.

    Examples:
        >>> parse_layout("v5e:4x4 data=x:4,y:2@2 model=y:2").sizes
        {'data': 8, 'model': 2}
    """
    name, *parts = text.split() or [""]
    axes = []
    for part in parts:
        logical, _, where = part.partition("=")
        rides = []
        for ride in where.split(",") if where != "1" else ():
            axis, _, rest = ride.partition(":")
            size, _, stride = rest.partition("@")
            if not (size.isdigit() and (stride or "1").isdigit()):
                raise InputError(
                    f"{ride!r} says no part of a physical axis",
                    at=text,
                    fix="say e.g. data=x:4,y:2@2: four along x, every other one of y",
                )
            rides.append(Ride(axis, int(size), int(stride or 1)))
        axes.append(LogicalAxis(logical, tuple(rides)))
    layout = Layout(Topology(name), tuple(axes))
    layout.check()
    return layout


TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}
"""The chip of each kind of device that JAX names.

Source: jax 0.10.2 ``jax/_src/pallas/mosaic/tpu_info.py``.
"""


def topology_of(devices: Sequence[Any]) -> Topology | None:
    """The topology that all these devices make up; None where they do not say.

    Args:
        devices: JAX devices of a TPU (with coordinates), or planned ones.
    """
    first = devices[0]
    if isinstance(first, PlannedDevice):
        return first.topology
    chip = TPU_KINDS.get(first.device_kind)
    if chip is None or not all(hasattr(device, "coords") for device in devices):
        return None
    at = np.array([device.coords for device in devices])
    extent = at.max(axis=0) - at.min(axis=0) + 1
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    rank = len(find_chip(chip).pod)
    try:
        return Topology(f"{slices}*{chip}:{'x'.join(map(str, extent[:rank]))}")
    except InputError:  # part of a slice, or one that nobody has published
        return None
