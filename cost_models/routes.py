"""From where logical axes lie to the formulas of collectives: links, shared links, DCN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from autoshard.cost_models.chips import Chip
from autoshard.cost_models.collectives import SwitchLevel, TorusAxis, hierarchical_s, switched_s
from autoshard.cost_models.layout import Layout, LogicalAxis, Ride
from autoshard.cost_models.protocol import CollectiveKind, Floats
from autoshard.cost_models.wiring import AXES, CORE, DOMAIN, NODES, SLICES

if TYPE_CHECKING:
    from autoshard.cost_models.topology import Topology


@dataclass(frozen=True, slots=True)
class Route:
    """What a collective over some logical axes runs on.

    Attributes:
        torus: The parts of torus axes, with the links of strided parts shared among the groups
            that lie in between.
        levels: Switched levels from the devices up: of a node and among nodes, or DCN alone.
        siblings: Devices of one chip in the group.
        neighbours: Devices of one chip.
        chip: Rate between the devices of a chip [bytes/s].
    """

    torus: tuple[TorusAxis, ...] = ()
    levels: tuple[SwitchLevel, ...] = ()
    siblings: int = 1
    neighbours: int = 1
    chip_bytes_per_s: float = math.inf

    def seconds(self, kind: CollectiveKind, nbytes: Floats) -> Floats:
        """Time on the wires [s]; what it takes to start is not in it.

        Args:
            kind: Which collective.
            nbytes: As in the protocol.
        """
        if not self.torus and self.siblings == 1:
            return switched_s(kind, nbytes, self.levels)
        return hierarchical_s(
            kind,
            nbytes,
            self.torus,
            levels=self.levels,
            siblings=self.siblings,
            neighbours=self.neighbours,
            chip_bytes_per_s=self.chip_bytes_per_s,
        )


def route(layout: Layout, names: Sequence[str]) -> Route:
    """The route of a collective over logical axes.

    Args:
        layout: Where the axes lie; not of CPU devices.
        names: The axes.
    """
    topology = layout.topology
    chip = topology.chip
    assert chip is not None
    rides = layout.rides(names)
    if chip.kind == "gpu":
        return Route(levels=_gpu_levels(chip, rides))
    torus = _torus(topology, chip, rides)
    siblings = math.prod(ride.size for ride in rides if ride.axis == CORE)
    slices = math.prod(ride.size for ride in rides if ride.axis == SLICES)
    within = siblings * math.prod(axis.size for axis in torus)
    levels: tuple[SwitchLevel, ...] = ()
    if slices > 1:
        out = chip.value("dcn_per_chip") / chip.devices * within
        levels = (SwitchLevel(slices, out, devices=within),)
    inside = chip.value("d2d_oneway", "hbm_bw") if chip.devices > 1 else math.inf
    return Route(torus, levels, siblings, chip.devices, inside)


def _torus(topology: Topology, chip: Chip, rides: Sequence[Ride]) -> tuple[TorusAxis, ...]:
    link, hop_s = chip.value("ici_oneway_effective"), chip.value("hop_s")
    axes = []
    for ride in rides:
        if ride.axis not in AXES:
            continue
        physical = topology.axis(ride.axis)
        # Groups in between use the same links, and so do parts of one axis that lie apart.
        sharing = ride.stride * sum(other.axis == ride.axis for other in rides)
        closed = physical.wrapped and ride.size * ride.stride == physical.size
        axes.append(TorusAxis(ride.size, link / sharing, closed, hop_s * ride.stride))
    return tuple(axes)


def _gpu_levels(chip: Chip, rides: Sequence[Ride]) -> tuple[SwitchLevel, ...]:
    inside = math.prod(ride.size for ride in rides if ride.axis == DOMAIN)
    nodes = math.prod(ride.size for ride in rides if ride.axis == NODES)
    return gpu_levels(chip, inside, nodes)


def gpu_levels(chip: Chip, inside: int, nodes: int) -> tuple[SwitchLevel, ...]:
    """The levels of a group of GPUs: ``inside`` of each node, on ``nodes`` nodes.

    The way out of a node is shared by its devices, each group having its part.
    """
    nvlink = chip.value("nvlink_oneway") * chip.value("nvlink_efficiency")
    egress = chip.value("node_egress") * inside / chip.value("node")
    return SwitchLevel(inside, nvlink), SwitchLevel(nodes, egress, devices=inside)


def slowness(layout: Layout) -> tuple[float, ...]:
    """By what layouts are compared, the best one being the least.

    First the physical axes that are cut among several logical ones: whole axes make rings of their
    own, as JAX's ``mesh_utils.create_device_mesh`` wants them. Then how slow each logical axis is,
    the last one first, which has the most traffic by the same documentation: time of an all-gather
    over it [s], with a result of one GB on every device; rounded, so that equals are equal.
    """
    rides = [ride for axis in layout.axes for ride in axis.rides]
    cuts = len(rides) - len({ride.axis for ride in rides})
    return (float(cuts), *gather_times_s(layout))


def gather_times_s(layout: Layout) -> tuple[float, ...]:
    """Time of an all-gather of one GB over each logical axis, the last one first [s]."""
    if layout.topology.kind == "cpu":
        return (0.0,) * len(layout.axes)
    times = [
        _gather_s(layout.topology, axis.rides) if axis.size > 1 else 0.0 for axis in layout.axes
    ]
    return tuple(float(f"{time:.9g}") for time in reversed(times))


@cache
def _gather_s(topology: Topology, rides: tuple[Ride, ...]) -> float:
    alone = Layout(topology, (LogicalAxis("axis", rides),))
    return float(route(alone, ("axis",)).seconds("all_gather", np.array(1e9)))
