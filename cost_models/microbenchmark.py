"""Measure the devices of a mesh, and fit the constants of their cost model."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from autoshard.cost_models.calibrated import (
    CONVOLUTION,
    CONVOLVED,
    GROUPED,
    SLOW_OPS,
    CalibratedModel,
)
from autoshard.cost_models.calibration import Calibration, LinearFit, Observation
from autoshard.cost_models.fitting import fit_linear, held_out, least_squares
from autoshard.cost_models.probes import KINDS, Probe, probes
from autoshard.cost_models.program_probes import Part, program_probes
from autoshard.cost_models.protocol import Floats
from autoshard.errors import InputError

MIN_ROUNDS = 3
"""Timed rounds that every calibration makes, however small its budget."""

MAX_ROUNDS = 60

KNEES_BYTES = tuple(2.0**e for e in range(17, 24))
"""Where a second price per byte may begin: one device's share of common cache sizes."""

COMPILE_SHARE = 0.6
"""Share of the budget after which no further program is compiled."""


@dataclass(frozen=True)
class _Timed:
    probe: Probe
    seconds: float
    spread: float
    samples: int


def calibrate(
    mesh_devices: Sequence[jax.Device],
    *,
    budget_s: float = 20.0,
    progress: Callable[[str, float], None] | None = None,
) -> Calibration:
    """Measure matmuls, elementwise ops and collectives on the devices of a mesh.

    In every measurement all devices do the same thing at the same time, since those of a CPU share
    the cores. Each program repeats one op; programs are warmed up and run in turn, so that a
    disturbance hits all of them. The lower quartile of the runs counts, less the time of one
    dispatch: other programs on the machine only ever add time, and on a quiet one it is close to
    the median.

    Args:
        mesh_devices: The devices of the mesh, at least two, of any backend that JAX has.
        budget_s: Time to spend [s]. The programs that every calibration needs are run
            :data:`MIN_ROUNDS` times in any case, about 5 s on two cores.
        progress: Called with what is going on and the share of the budget used.

    Raises:
        InputError: There is only one device.
    """
    _check(mesh_devices)
    start = time.perf_counter()

    def report(what: str) -> None:
        if progress is not None:
            progress(what, min(1.0, (time.perf_counter() - start) / budget_s))

    ready: list[tuple[Probe, Callable[[], None]]] = []
    programs = {probe.name: (probe, parts) for probe, parts in program_probes(mesh_devices)}
    every = (*probes(mesh_devices), *(probe for probe, _ in programs.values()))
    for probe in sorted(every, key=lambda probe: probe.stage):
        late = time.perf_counter() - start > COMPILE_SHARE * budget_s
        if late and probe.stage > 0:
            break
        report(f"compiling {probe.name}")
        ready.append((probe, _runner(probe)))
    runs: list[list[float]] = [[] for _ in ready]
    # The devices of a CPU share its cores; any other has its own.
    cores = _cores() if mesh_devices[0].platform == "cpu" else len(mesh_devices)
    # Only a large matmul keeps every core busy on a quiet machine; XLA runs small programs of
    # several devices on one thread.
    _, heaviest = max(
        (p.work["flops"] * p.repeats, p.name) for p, _ in ready if p.name.startswith("matmul/f32")
    )
    shares: list[float] = []
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() - start > budget_s:
            break
        report(f"timing {len(ready)} programs, round {turn + 1}")
        for (probe, run), seconds in zip(ready, runs, strict=True):
            begin, used = time.perf_counter(), time.process_time()
            run()
            seconds.append(time.perf_counter() - begin)
            if probe.name == heaviest:
                shares.append((time.process_time() - used) / seconds[-1] / cores)
    timed = [_summary(probe, seconds) for (probe, _), seconds in zip(ready, runs, strict=True)]
    count = len(mesh_devices)
    share = float(np.median(shares)) if mesh_devices[0].platform == "cpu" else 1.0
    return replace(
        _with_programs(
            _fitted([t for t in timed if t.probe.name not in programs], count, cores, share),
            [(t, programs[t.probe.name][1]) for t in timed if t.probe.name in programs],
        ),
        platform={"cuda": "gpu", "rocm": "gpu"}.get(
            mesh_devices[0].platform, mesh_devices[0].platform
        ),
        device_kind=mesh_devices[0].device_kind,
        machine=processor_name()
        if mesh_devices[0].platform == "cpu"
        else (f"{len(mesh_devices)} x {mesh_devices[0].device_kind}"),
    )


def _check(devices: Sequence[jax.Device]) -> None:
    if len(devices) < 2:
        raise InputError(
            f"a mesh of {len(devices)} device has no collectives to measure",
            fix='jax.config.update("jax_num_cpu_devices", 8) before the first use of a device',
        )


def _runner(probe: Probe) -> Callable[[], None]:
    """The probe's program, compiled and run once."""
    program, arguments = probe.build()

    def run() -> None:
        jax.block_until_ready(program(*arguments))

    run()
    return run


def _summary(probe: Probe, seconds: Sequence[float]) -> _Timed:
    low, median, high = (float(q) for q in np.percentile(seconds, (25, 50, 75)))
    return _Timed(probe, low, (high - low) / median, len(seconds))


def _fitted(timed: Sequence[_Timed], devices: int, cores: int, cpu_share: float) -> Calibration:
    (dispatch,) = (t for t in timed if t.probe.family == "dispatch")

    apart: dict[str, float | None] = {}  # by probe, its error where it is held out

    def op_s(t: _Timed, copy: LinearFit | None = None) -> float:
        """Time of one op; never below a hundredth of what was timed."""
        timed_s = t.seconds / t.probe.repeats
        own_s = (t.seconds - dispatch.seconds) / t.probe.repeats
        if copy is not None and t.probe.copied_bytes:
            own_s -= copy.fixed_s + float(copy.bytes_s(np.asarray(t.probe.copied_bytes)))
        return max(own_s, timed_s / 100)

    def fit(
        family: str, key: str, units: Sequence[str], copy: LinearFit | None = None
    ) -> LinearFit:
        mine = [t for t in timed if t.probe.family == family and t.probe.key == key]
        # What is subtracted for the dispatch is itself uncertain, which weighs on short programs.
        doubt_s = dispatch.seconds * max(dispatch.spread, 0.1)
        work, seconds = [t.probe.work for t in mine], [op_s(t, copy) for t in mine]
        doubts = [doubt_s / t.probe.repeats for t in mine]
        errors = held_out(work, seconds, units, doubt_s=doubts, knees_bytes=KNEES_BYTES)
        apart.update((t.probe.name, e) for t, e in zip(mine, errors, strict=True))
        known = [abs(e) for e in errors if e is not None]
        return replace(
            fit_linear(work, seconds, units, doubt_s=doubts, knees_bytes=KNEES_BYTES),
            held_out=float(np.median(known)) if known else None,
        )

    def keys(family: str) -> list[str]:
        return sorted({t.probe.key for t in timed if t.probe.family == family})

    units = ("bytes", *dict.fromkeys(SLOW_OPS.values()), CONVOLUTION, CONVOLVED, GROUPED)
    elementwise = {k: fit("elementwise", k, units) for k in keys("elementwise")}
    matmul = {k: fit("matmul", k, ("flops", "bytes")) for k in keys("matmul")}
    collectives: dict[str, Mapping[int, LinearFit]] = {
        kind: {int(k): fit(kind, k, ("bytes",), elementwise["f32"]) for k in keys(kind)}
        for kind in KINDS
    }
    return Calibration(
        machine=processor_name(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        jax_version=jax.__version__,
        devices=devices,
        cores=cores,
        cpu_share=round(cpu_share, 3),
        dispatch_s=dispatch.seconds,
        matmul=matmul,
        elementwise=elementwise,
        collectives=collectives,
        observations=tuple(
            Observation(
                t.probe.name,
                t.seconds if t is dispatch else op_s(t, elementwise["f32"]),
                round(t.spread, 3),
                t.samples,
                t.probe.family,
                apart.get(t.probe.name),
            )
            for t in timed
        ),
    )


def _with_programs(
    calibration: Calibration, timed: Sequence[tuple[_Timed, Sequence[Part]]]
) -> Calibration:
    """A calibration with the factors between programs and their parts."""
    model = CalibratedModel(calibration)
    took = np.array([max(t.seconds - calibration.dispatch_s, t.seconds / 100) for t, _ in timed])
    rows = np.array(
        [
            [
                sum(part.seconds(model) for part in parts if (part.collective is None) == of_ops)
                for of_ops in (True, False)
            ]
            for _, parts in timed
        ]
    )
    relative = rows / took[:, None]
    seen = []
    for number, (t, _) in enumerate(timed):
        rest = np.arange(len(timed)) != number
        factors = _factors(relative[rest])
        error = float(relative[number] @ factors) - 1
        seen.append(
            Observation(t.probe.name, t.seconds, round(t.spread, 3), t.samples, "program", error)
        )
    factors = _factors(relative)
    return replace(
        calibration,
        op_factor=float(factors[0]),
        collective_factor=float(factors[1]),
        observations=(*calibration.observations, *seen),
    )


def _factors(relative: Floats) -> Floats:
    """What ops and collectives take times their prices, ``[2]``.

    One factor for both where the times do not tell them apart.

    Args:
        relative: The prices of ops and of collectives of each program over its time, ``[N, 2]``.
    """
    apart, _ = least_squares(relative, np.ones(len(relative)))
    together = float(np.median(1 / relative.sum(axis=1)))
    return apart if (apart > 0).all() else np.full(2, together)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
