"""How long collectives take: rings and lines of a torus, and switched levels.

Every formula is the larger of a latency term (hops) and a bandwidth term (bytes on the busiest
link). ``nbytes`` follows :meth:`autoshard.cost_models.protocol.CostModel.collective_s`: bytes on
one device of the larger side. All arguments named ``nbytes`` may be arrays; the result has their
shape. Axes of size 1 cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autoshard.cost_models.protocol import CollectiveKind, Floats
from autoshard.errors import InputError


@dataclass(frozen=True, slots=True)
class TorusAxis:
    """One axis of a torus of chips.

    Attributes:
        size: Chips along it.
        bytes_per_s: Bandwidth of one link in one direction [bytes/s].
        wrapped: Whether the ends are joined, so that the axis is a ring and not a line.
        hop_s: Time for the first byte to cross one link [s].
        one_way: Whether only one direction of a ring is used.
    """

    size: int
    bytes_per_s: float
    wrapped: bool = True
    hop_s: float = 0.0
    one_way: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.bytes_per_s <= 0:
            raise InputError(
                f"a torus axis of {self.size} chips at {self.bytes_per_s} bytes/s cannot be",
                fix="give a size of at least 1 and a bandwidth above 0",
            )
        if self.one_way and not self.wrapped:
            raise InputError(
                "a line cannot be used in one direction only: its last chip would send to none",
                fix="wrapped=True, or one_way=False",
            )

    @property
    def both_ways(self) -> bool:
        """Whether shards travel around the ring in both directions."""
        return self.wrapped and not self.one_way

    @property
    def receive_bytes_per_s(self) -> float:
        """Bandwidth at which the worst-placed chip receives along this axis [bytes/s]."""
        return self.bytes_per_s * (2 if self.both_ways else 1)

    @property
    def rounds(self) -> int:
        """Rounds until every shard has reached every chip, one hop a round."""
        return self.size // 2 if self.both_ways else self.size - 1


def _active(axes: tuple[TorusAxis, ...]) -> tuple[TorusAxis, ...]:
    return tuple(axis for axis in axes if axis.size > 1)


def _floats(nbytes: ArrayLike) -> Floats:
    return np.asarray(nbytes, dtype=np.float64)


def all_gather_s(nbytes: ArrayLike, axes: tuple[TorusAxis, ...], *, split: bool = False) -> Floats:
    """Time of an all-gather over one or several torus axes at once [s].

    On one axis: ``rounds`` steps that each move one shard over one link. On several axes the data
    is cut into one part per axis, which visit the axes in different orders, so that all links are
    busy: the bandwidths add up and so do the latencies.

    Args:
        nbytes: Bytes of the gathered result on one device.
        axes: The axes gathered over.
        split: Whether the last shard of an even ring is cut in two, one half each way, which takes
            the share of the data that is received from 1 down to the least possible (n-1)/n.
            False is the book's form (and XLA:TPU's estimate for an asynchronous all-gather), True
            is that of ``jax.experimental.roofline``.

    Source:
        jax-ml/scaling-book, sharding.md, "AllGather", "A note on ICI latency" and "over multiple
        axes"; for ``split``, jax 0.10.2 ``jax/experimental/roofline/rooflines.py``.

    Examples:
        >>> axis = TorusAxis(4, 4.5e10, wrapped=False)
        >>> round(float(all_gather_s(33554432, (axis,))) * 1e6)  # us; the book: 560
        559
    """
    data, used = _floats(nbytes), _active(axes)
    if not used:
        return np.zeros_like(data)
    devices = math.prod(axis.size for axis in used)
    whole = not split and any(axis.both_ways and axis.size % 2 == 0 for axis in used)
    share = 1.0 if whole else (devices - 1) / devices
    bandwidth_s = data * share / sum(axis.receive_bytes_per_s for axis in used)
    return np.maximum(bandwidth_s, sum(axis.rounds * axis.hop_s for axis in used))


def reduce_scatter_s(
    nbytes: ArrayLike, axes: tuple[TorusAxis, ...], *, split: bool = False
) -> Floats:
    """Time of a reduce-scatter [s]: an all-gather played backwards; additions are not counted.

    Args:
        nbytes: Bytes of the operand on one device.
        axes: The axes reduced over.
        split: As in :func:`all_gather_s`.

    Source:
        jax-ml/scaling-book, sharding.md, "ReduceScatter".
    """
    return all_gather_s(nbytes, axes, split=split)


def all_reduce_s(nbytes: ArrayLike, axes: tuple[TorusAxis, ...], *, split: bool = False) -> Floats:
    """Time of an all-reduce [s]: a reduce-scatter, then an all-gather.

    Args:
        nbytes: Bytes of the operand (= result) on one device.
        axes: The axes reduced over.
        split: As in :func:`all_gather_s`.

    Source:
        jax-ml/scaling-book, sharding.md, "How expensive is an AllReduce?".
    """
    return 2 * all_gather_s(nbytes, axes, split=split)


def all_to_all_s(nbytes: ArrayLike, axes: tuple[TorusAxis, ...]) -> Floats:
    """Time of an all-to-all [s]: the busiest link of the slowest axis.

    Each device sends 1/n of its data to every device of the group, along the axes in turn. With n
    chips on an axis, the chunks of 1/n cross n²/4 links (rounded down) on average over sources in
    a ring that uses both directions, each of its two directions taking half; the middle link of a
    line carries as many each way; every link of a one-way ring carries n(n-1)/2.

    Args:
        nbytes: Bytes of the operand (= result) on one device.
        axes: The axes exchanged over.

    Source:
        jax-ml/scaling-book, sharding.md, "AllToAll" (footnote with the count of chunks) and Q10;
        for several axes, jax 0.10.2 ``jax/experimental/roofline/rooflines.py`` (bisection).
    """
    data, used = _floats(nbytes), _active(axes)
    if not used:
        return np.zeros_like(data)

    def chunks(axis: TorusAxis) -> float:
        if axis.one_way:
            return axis.size * (axis.size - 1) / 2
        return axis.size**2 // 4 / (2 if axis.both_ways else 1)

    per_byte = max(chunks(axis) / axis.size / axis.bytes_per_s for axis in used)
    return np.maximum(data * per_byte, sum(axis.rounds * axis.hop_s for axis in used))


def permute_s(nbytes: ArrayLike, axes: tuple[TorusAxis, ...], *, shift: int = 1) -> Floats:
    """Time of a collective permute [s].

    Over one axis: every device sends to the one ``shift`` further, by the shorter way. Over
    several axes: any permutation, such as exchanging two axes of a sharding; all messages may have
    to cross the middle of the longest axis, and do so over half of its chips.

    Args:
        nbytes: Bytes that one device sends.
        axes: The axes permuted over.
        shift: How far a message goes along a single axis.

    Source:
        One axis: jax 0.10.2 ``jax/experimental/roofline/rooflines.py`` (messages over the busiest
        link). Several: bisection bound, derived here.
    """
    data, used = _floats(nbytes), _active(axes)
    if not used:
        return np.zeros_like(data)
    if len(used) > 1:
        load = max(
            max(1.0, axis.size / (4 if axis.both_ways else 2)) / axis.bytes_per_s for axis in used
        )
        return np.maximum(data * load, sum(axis.rounds * axis.hop_s for axis in used))
    (axis,) = used
    steps = shift % axis.size
    back = axis.size - steps
    if steps == 0:
        return np.zeros_like(data)
    messages = steps if axis.one_way else min(steps, back)
    hops = messages if axis.wrapped else max(steps, back)
    return np.maximum(data * messages / axis.bytes_per_s, hops * axis.hop_s)


TORUS: dict[CollectiveKind, Callable[[ArrayLike, tuple[TorusAxis, ...]], Floats]] = {
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_reduce": all_reduce_s,
    "all_to_all": all_to_all_s,
    "permute": permute_s,
}
"""The formula of each collective on a torus."""


@dataclass(frozen=True, slots=True)
class SwitchLevel:
    """One level of a switched network (NVLink within a node, InfiniBand among nodes).

    Attributes:
        size: Units (devices, or groups of the level below) that take part at this level.
        bytes_per_s: Bandwidth out of one such unit, one direction [bytes/s].
        devices: Devices of the group within one unit.
    """

    size: int
    bytes_per_s: float
    devices: int = 1


def switched_s(kind: CollectiveKind, nbytes: ArrayLike, levels: tuple[SwitchLevel, ...]) -> Floats:
    """Time of a collective on a switched network [s]: the slowest level; no latency.

    An all-gather or reduce-scatter moves (n-1)/n of the data through each unit of a level, an
    all-reduce twice that; an all-to-all or permute moves the part that leaves the unit, of all the
    devices in it. Reductions inside the switch are not counted on.

    Args:
        kind: Which collective.
        nbytes: As in the protocol: bytes on one device of the larger side.
        levels: From the devices up; a level of size 1 costs nothing.

    Source:
        jax-ml/scaling-book, gpus.md, "Intra-node collectives" and "Cross-node collectives".

    Examples:
        >>> node = SwitchLevel(8, 4.5e11)
        >>> round(float(switched_s("all_gather", 33554432, (node,))) * 1e6)  # us; the book: 65
        65
    """
    data = _floats(nbytes)

    def per_byte(level: SwitchLevel) -> float:
        if level.size <= 1:
            return 0.0
        away = (level.size - 1) / level.size
        leaving = {
            "all_gather": away,
            "reduce_scatter": away,
            "all_reduce": 2 * away,
            "all_to_all": level.devices * away,
            "permute": float(level.devices),
        }[kind]
        return leaving / level.bytes_per_s

    return data * max((per_byte(level) for level in levels), default=0.0)


def hierarchical_s(
    kind: CollectiveKind,
    nbytes: ArrayLike,
    torus: tuple[TorusAxis, ...],
    *,
    levels: tuple[SwitchLevel, ...] = (),
    siblings: int = 1,
    neighbours: int = 1,
    chip_bytes_per_s: float = math.inf,
) -> Floats:
    """Time of a collective over the devices of chips, chips of a torus, and slices over DCN [s].

    The stages work on pieces of the data at once, so the slowest decides. An all-gather receives
    from other slices what its own device keeps, then over the torus once for all devices of a
    chip that take part, then within the chip; a reduce-scatter goes the other way, an all-reduce
    does both. Devices of a chip that are in other groups use the same links for data of their own.

    Args:
        kind: Which collective.
        nbytes: As in the protocol: bytes on one device of the larger side.
        torus: The parts of torus axes, in chips; rates are those of a whole chip.
        levels: The data-centre network, as :func:`switched_s` takes it.
        siblings: Devices of one chip in the group.
        neighbours: Devices of one chip.
        chip_bytes_per_s: Rate between the devices of a chip, one direction [bytes/s].

    Source:
        Stages: jax-ml/scaling-book, training.md, "Scaling across pods" (reduce within, then
        across); the slowest decides: gpus.md, "Cross-node collectives". Sharing of links: derived.

    Examples:
        >>> ring = (TorusAxis(16, 4.5e10),)
        >>> dcn = (SwitchLevel(2, 16 * 3.125e9, devices=16),)
        >>> round(float(hierarchical_s("all_reduce", 9e9, ring, levels=dcn)), 3)
        0.2
    """
    data = _floats(nbytes)
    once = kind in ("all_gather", "reduce_scatter", "all_reduce")
    streams = neighbours // siblings if once else neighbours
    time = TORUS[kind](data * streams, torus)
    if levels:
        time = np.maximum(time, switched_s(kind, data, levels))
    if siblings > 1:
        within = (SwitchLevel(siblings, chip_bytes_per_s),)
        time = np.maximum(time, switched_s(kind, data, within))
    return time
