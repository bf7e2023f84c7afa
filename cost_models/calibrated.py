"""A cost model of a CPU that plays several devices, from a calibration of that CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autoshard.cost_models.calibration import Calibration, LinearFit, load_calibration
from autoshard.cost_models.protocol import CollectiveKind, Floats, MeshAxis, Work

TRANSCENDENTAL = frozenset(
    {
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
        "stablehlo.power",
        "stablehlo.cbrt",
    }
)
"""Ops that a CPU computes by a polynomial, many instructions per element."""


class CalibratedModel:
    """Prices on one of the virtual devices of a CPU, from measured constants.

    Unlike on an accelerator nothing overlaps: an op takes its start, its arithmetic and its memory
    traffic one after the other. Each device works while all others do, on cores that they share,
    so times grow with the number of devices once there are more devices than cores. An op without
    traffic of its own is part of a neighbour's fusion and does not start separately.

    Args:
        calibration: What was measured.
        devices: Devices of the mesh to price; None: as many as were calibrated.

    Attributes:
        name: ``cpu``.
        memory_bytes: None: the devices share the machine's memory.
        scatters_reductions: False: XLA:CPU leaves an all-reduce and a slice as they are.
        calibration: As given.
        dispatch_s: Time of one call of a program on all devices [s].
    """

    def __init__(self, calibration: Calibration, *, devices: int | None = None) -> None:
        self.name = "cpu"
        self.memory_bytes: float | None = None
        self.scatters_reductions = False
        self.calibration = calibration
        count = calibration.devices if devices is None else devices
        # Time of the same work per device, relative to the calibrated mesh.
        self._crowding = max(count, calibration.cores) / max(calibration.devices, calibration.cores)
        self.dispatch_s = calibration.dispatch_s * self._crowding

    def compute_s(self, work: Work) -> Floats:
        """Time of the arithmetic [s], ``[S]``; only matmuls and transcendentals take any."""
        fit = self._fit(work)
        if work.matmul is not None:
            per_flop = fit.per_unit_s["flops"]
        elif work.op in TRANSCENDENTAL:
            per_flop = fit.per_unit_s["transcendentals"]
        else:
            per_flop = 0.0
        return np.asarray(work.flops * per_flop * self._crowding, dtype=np.float64)

    def hbm_s(self, work: Work) -> Floats:
        """Time of the memory traffic [s], ``[S]``."""
        per_byte = self._fit(work).per_unit_s["bytes"]
        return np.asarray(work.hbm_bytes * per_byte * self._crowding, dtype=np.float64)

    def op_s(self, work: Work) -> Floats:
        """Time of the op [s], ``[S]``: start, arithmetic and traffic, one after the other."""
        started = np.where(work.hbm_bytes > 0, self._fit(work).fixed_s * self._crowding, 0.0)
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
        sizes = self.calibration.collectives[kind]
        fixed_s = _at(sizes, group, lambda fit: fit.fixed_s)
        per_byte = _at(sizes, group, lambda fit: fit.per_unit_s["bytes"])
        moving_s = (fixed_s + np.asarray(nbytes) * per_byte) * self._crowding
        return np.where(np.asarray(nbytes) > 0, moving_s, 0.0)


def _at(
    sizes: Mapping[int, LinearFit], group: int, constant: Callable[[LinearFit], float]
) -> float:
    """A constant at ``group`` devices, linear in the logarithm of the measured sizes."""
    known = sorted(sizes)
    values = [constant(sizes[n]) for n in known]
    if len(known) == 1:
        return values[0]
    logs = np.log2(known)
    right = int(np.clip(np.searchsorted(logs, math.log2(group)), 1, len(known) - 1))
    slope = (values[right] - values[right - 1]) / (logs[right] - logs[right - 1])
    value = values[right - 1] + slope * (math.log2(group) - logs[right - 1])
    return float(max(value, min(values)))


def cpu() -> CalibratedModel:
    """The model of this machine's CPU: its own calibration, or the shipped one."""
    return CalibratedModel(load_calibration())
