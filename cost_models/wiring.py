"""What slices of chips exist, and which of their axes are closed to rings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.cost_models.chips import CHIPS, Chip
from autoshard.errors import InputError

CUBE = 4
"""Chips along each side of the cubes that three-dimensional tori are built of.

Source: docs.cloud.google.com/tpu/docs/v4 and /v5p; jax-ml/scaling-book, tpus.md, "TPU Networking".
"""

AXES = ("x", "y", "z")
"""Names of the axes of a torus."""

SLICES, CORE, NODES, DOMAIN, CPUS = "dcn", "core", "node", "nvlink", "cpu"
"""Names of the other axes: slices over DCN, devices of a chip, nodes, their devices, CPUs."""


@dataclass(frozen=True, slots=True)
class PhysicalAxis:
    """One axis along which devices are wired.

    Attributes:
        name: ``x``, ``y``, ``z`` of a torus; ``core`` (devices of one chip), ``dcn`` (slices),
            ``nvlink`` (devices of one node), ``node``, ``cpu``.
        size: Devices, chips, nodes or slices along it.
        wrapped: Whether its ends are joined by a link of their own.
    """

    name: str
    size: int
    wrapped: bool = False


def wraps(chip: Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes of a slice of that shape are closed to rings.

    Two-dimensional: an axis of the length of the pod's. Three-dimensional: all axes of a slice
    of whole cubes, else none.
    """
    multiple = int(chip.value("wrap_multiple"))
    closed = tuple(size > 1 and size % multiple == 0 for size in shape)
    if len(chip.pod) == 3 and not all(closed):
        return (False,) * len(shape)
    return closed


def tpu_shape(chip: Chip, shape: tuple[int, ...], text: str) -> tuple[int, ...]:
    """The shape with all its axes, if there is such a slice."""
    full = (*shape, *(1 for _ in range(len(chip.pod) - len(shape))))
    problem = ""
    if len(shape) > len(chip.pod) or (len(shape) < len(chip.pod) and math.prod(shape) > 1):
        problem = f"{chip.name} has {len(chip.pod)} axes, not {len(shape)}"
    elif any(have > most for have, most in zip(sorted(full), sorted(chip.pod), strict=True)):
        problem = f"a {chip.name} pod is {'x'.join(map(str, chip.pod))} chips"
    elif chip.name in CHIPS and len(full) == 2 and not _planar(full):
        problem = f"{chip.name} slices have sides of powers of two, one at most twice the other"
    elif chip.name in CHIPS and len(full) == 3 and not _cubic(full):
        problem = f"{chip.name} slices are part of one {CUBE}x{CUBE}x{CUBE} cube, or whole cubes"
    if problem:
        raise InputError(
            f"there is no slice {text}: {problem}", fix=f"say e.g. {', '.join(_examples(chip))}"
        )
    return full


def _planar(shape: tuple[int, ...]) -> bool:
    few, many = sorted(shape)
    powers = all(size & (size - 1) == 0 for size in shape)
    return powers and many <= 2 * few and (few, many) != (1, 2)


def _cubic(shape: tuple[int, ...]) -> bool:
    if all(size % CUBE == 0 for size in shape):
        return True
    return sorted(shape) in ([1, 1, 1], [1, 2, 2], [2, 2, 2], [2, 2, 4], [2, 4, 4])


def _examples(chip: Chip) -> tuple[str, ...]:
    name = chip.name.lower()
    if len(chip.pod) == 2:
        return tuple(f"{name}:{shape}" for shape in ("2x2", "2x4", "4x4", "8x16", "16x16"))
    if len(chip.pod) == 3:
        return tuple(f"{name}:{shape}" for shape in ("2x2x1", "2x2x4", "4x4x4", "4x8x8"))
    return (f"{name}:{chip.pod[0]}",)


def flat_shape(
    chip: Chip | None, shape: tuple[int, ...], slices: int, text: str
) -> tuple[int, ...]:
    """The shape of GPUs, as (devices in a domain, nodes), or of CPU devices."""
    if slices > 1:
        raise InputError(f"{text}: only TPUs come in slices", fix="leave out the number before *")
    if chip is None:
        if len(shape) > 1:
            raise InputError(f"{text}: CPU devices have one axis", fix="say e.g. cpu:8")
        return shape
    domain, nodes = (*shape, 1) if len(shape) == 1 else shape[:2]
    most = int(chip.value("node"))
    if len(shape) > 2 or domain > most or (nodes > 1 and domain < 1):
        raise InputError(
            f"there is no topology {text}: the NVLink domain of {chip.name} has {most} devices",
            fix=f"say {chip.name.lower()}:{most}x{max(1, math.prod(shape) // most)}",
        )
    return domain, nodes
