"""A cost model from a calibration: of a CPU that plays several devices, or of other devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autoshard.cost_models.calibration import Calibration, LinearFit, load_calibration
from autoshard.cost_models.protocol import CollectiveKind, Compiler, Floats, MeshAxis, Work

SLOW_OPS: dict[str, str] = {
    **dict.fromkeys(
        (
            "stablehlo.exponential",
            "stablehlo.exponential_minus_one",
            "stablehlo.log",
            "stablehlo.log_plus_one",
            "stablehlo.logistic",
            "stablehlo.tanh",
            "stablehlo.tan",
            "stablehlo.sine",
            "stablehlo.cosine",
            "stablehlo.atan2",
            "stablehlo.cbrt",
        ),
        "transcendentals",
    ),
    "stablehlo.power": "powers",
    "stablehlo.transpose": "transposes",
    "stablehlo.reduce_window": "pooled",
    "stablehlo.select_and_scatter": "unpooled",
}
"""Ops whose elements take longer than the traffic, by the unit that was measured for them."""

_COMPILERS: dict[str, Compiler] = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}

CONVOLUTION, CONVOLVED, GROUPED = "convolutions", "convolved", "grouped"
"""Units of a convolution: itself, its operations [FLOP], and these where it has groups."""

CONVOLVED_WIDTH = 32
"""Output features that a convolution computes at once: fewer take as long. Seen in the times of
convolutions with 2 to 64 output features under jaxlib 0.10.2 on a Xeon with 512-bit vectors."""


class CalibratedModel:
    """Prices on one of the virtual devices of a CPU, or on another device, from measured constants.

    Nothing overlaps here, as on a CPU: an op takes its start, its arithmetic and its memory
    traffic one after the other. Each device works while all others do, on cores that they share,
    so times grow with the number of devices once there are more devices than cores. An op without
    traffic of its own is part of a neighbour's fusion and does not start separately.

    Args:
        calibration: What was measured.
        devices: Devices of the mesh to price; None: as many as were calibrated.

    Attributes:
        name: The platform, e.g. ``cpu``.
        memory_bytes: None: the devices of a CPU share its memory, of others it was not measured.
        compiler: That of the platform.
        calibration: As given.
        devices: Devices of the mesh it prices.
        dispatch_s: Time of one call of a program on all devices [s].
    """

    def __init__(self, calibration: Calibration, *, devices: int | None = None) -> None:
        self.name: str = calibration.platform
        self.memory_bytes: float | None = None
        self.compiler: Compiler = _COMPILERS[calibration.platform]
        self.calibration = calibration
        self.devices = calibration.devices if devices is None else devices
        # Time of the same work per device, relative to the calibrated mesh.
        self._crowding = 1.0
        if calibration.platform == "cpu":
            self._crowding = max(self.devices, calibration.cores) / max(
                calibration.devices, calibration.cores
            )
        self.dispatch_s = calibration.dispatch_s * self._crowding
        self._op_factor = self._crowding * calibration.op_factor
        self._collective_factor = self._crowding * calibration.collective_factor

    def compute_s(self, work: Work) -> Floats:
        """Time of the arithmetic [s], ``[S]``.

        Only matmuls, convolutions and :data:`SLOW_OPS` take any. A convolution with groups left in
        it runs in plain loops.
        """
        if work.op == "stablehlo.convolution" and work.matmul is not None:
            units = self._fit(replace(work, matmul=None)).per_unit_s
            if CONVOLVED in units and GROUPED in units:  # older calibrations did not measure them
                width = np.maximum(work.matmul[:, 2], 1)
                padded = work.flops * (-(-width // CONVOLVED_WIDTH) * CONVOLVED_WIDTH / width)
                loops_s, at_once_s = work.flops * units[GROUPED], padded * units[CONVOLVED]
                running_s = np.where(work.matmul[:, 0] > 1, loops_s, at_once_s)
                return np.asarray((running_s + units.get(CONVOLUTION, 0.0)) * self._op_factor)
        unit = "flops" if work.matmul is not None else SLOW_OPS.get(work.op, "")
        per_flop = self._fit(work).per_unit_s.get(unit, 0.0)
        return np.asarray(work.flops * per_flop * self._op_factor, dtype=np.float64)

    def hbm_s(self, work: Work) -> Floats:
        """Time of the memory traffic [s], ``[S]``."""
        return self._fit(work).bytes_s(work.hbm_bytes) * self._op_factor

    def op_s(self, work: Work) -> Floats:
        """Time of the op [s], ``[S]``: start, arithmetic and traffic, one after the other."""
        started = np.where(work.hbm_bytes > 0, self._fit(work).fixed_s * self._op_factor, 0.0)
        return self.compute_s(work) + self.hbm_s(work) + started

    def _fit(self, work: Work) -> LinearFit:
        fits = self.calibration.elementwise if work.matmul is None else self.calibration.matmul
        narrow = work.dtype in ("bf16", "f16") or work.dtype.startswith("f8")
        return fits["bf16" if narrow and "bf16" in fits else "f32"]

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        """Time of a collective over one or several mesh axes [s], same shape as ``nbytes``.

        It depends on the number of devices in a group, not on which axes make it up. Group sizes
        that were not measured lie on a line between (or beyond) the nearest measured ones, over
        the logarithm of the size.

        Args:
            kind: Which collective.
            nbytes: Bytes on one device of the larger side.
            axes: The axes it runs over, major to minor.
        """
        group = math.prod(axis.size for axis in axes)
        if group <= 1:
            return np.zeros_like(nbytes, dtype=np.float64)
        price_s = _at(
            self.calibration.collectives[kind],
            group,
            lambda fit: fit.fixed_s + fit.bytes_s(np.asarray(nbytes, dtype=np.float64)),
        )
        return np.where(np.asarray(nbytes) > 0, price_s * self._collective_factor, 0.0)


def _at(sizes: Mapping[int, LinearFit], group: int, price: Callable[[LinearFit], Floats]) -> Floats:
    """A price at ``group`` devices, linear in the logarithm of the measured sizes."""
    known = sorted(sizes)
    if len(known) == 1 or group in sizes:
        return price(sizes[group if group in sizes else known[0]])
    logs = np.log2(known)
    right = int(np.clip(np.searchsorted(logs, math.log2(group)), 1, len(known) - 1))
    near, far = price(sizes[known[right - 1]]), price(sizes[known[right]])
    weight = float((math.log2(group) - logs[right - 1]) / (logs[right] - logs[right - 1]))
    # Beyond the measured sizes a price may level off but does not fall.
    price_s: Floats = np.maximum(near + (far - near) * weight, np.minimum(near, far))
    return price_s


def cpu() -> CalibratedModel:
    """The model of this machine's CPU: its own calibration, or the shipped one."""
    return CalibratedModel(load_calibration())
