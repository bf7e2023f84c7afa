"""What was measured of one machine's CPU, as a versioned record that is saved and loaded."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost_models.protocol import Floats
from autoshard.errors import InputError

VERSION = 2
"""Version of the file format. Files of version 1, which lack the errors of what is held out, are
read; others are refused."""

DEFAULT_FILE = "cpu_default.json"
"""The calibration shipped beside this module: the machine and the date are written in it."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A time as a linear function of what is done, fitted to measured times.

    Attributes:
        fixed_s: Time of doing nothing [s].
        per_unit_s: Time of one unit of each kind of work [s/FLOP, s/byte, s/element].
        near_bytes: Bytes beyond which one more costs extra, since it no longer fits a cache; None:
            all cost the same.
        per_far_byte_s: That extra [s/byte].
        error: Median relative error of the fit over its observations.
        observations: How many times it was fitted to.
        held_out: Median relative error at observations that it was not fitted to; None if that was
            not looked at, or there are too few.
    """

    fixed_s: float
    per_unit_s: Mapping[str, float]
    near_bytes: float | None
    per_far_byte_s: float
    error: float
    observations: int
    held_out: float | None = None

    def bytes_s(self, nbytes: Floats) -> Floats:
        """Time of moving ``nbytes`` [s], same shape, without what is fixed."""
        near_s = np.asarray(nbytes) * self.per_unit_s["bytes"]
        if self.near_bytes is None:
            return near_s
        return near_s + np.maximum(0.0, nbytes - self.near_bytes) * self.per_far_byte_s


@dataclass(frozen=True, slots=True)
class Observation:
    """One microbenchmark.

    Attributes:
        name: What ran, e.g. ``all_reduce/4/strided/65536``.
        seconds: Time of one op while all devices do the same [s].
        spread: Interquartile range over the median of the timed runs.
        samples: Timed runs.
        kind: ``dispatch``, ``matmul``, ``elementwise`` or a kind of collective.
        held_out: By a fit to other observations: predicted over measured time, less one; None if
            no fit can tell.
    """

    name: str
    seconds: float
    spread: float
    samples: int
    kind: str = ""
    held_out: float | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How far fits are off at observations that they were not fitted to.

    Attributes:
        median: Median of the relative errors.
        worst: The largest of them.
        points: How many observations were held out.
    """

    median: float
    worst: float
    points: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants of a CPU that plays several devices.

    Attributes:
        machine: The processor's name.
        date: When it was measured, ISO 8601.
        jax_version: The JAX that ran.
        devices: Devices of the mesh; all of them worked at once in every measurement.
        cores: Cores that they shared.
        cpu_share: Share of the cores that the process got in its largest matmul; well below 1 where
            other programs were running, whose disturbance is then in the figures.
        dispatch_s: Time of one call of a program that does nothing on all devices [s].
        matmul: By element type: time per matmul; units ``flops`` and ``bytes``.
        elementwise: By element type: time per fused op; units ``bytes`` (read and written),
            ``transcendentals``, ``powers`` and ``transposes`` (elements computed or moved so).
        collectives: By kind, then group size: time per collective; unit ``bytes``.
        observations: The measured times behind the fits.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: What JAX calls the devices.
        op_factor: Time of an op in a small program over that of the op measured by itself, on warm
            caches; all prices of ops are taken times it.
        collective_factor: The same for collectives.
    """

    machine: str
    date: str
    jax_version: str
    devices: int
    cores: int
    cpu_share: float
    dispatch_s: float
    matmul: Mapping[str, LinearFit]
    elementwise: Mapping[str, LinearFit]
    collectives: Mapping[str, Mapping[int, LinearFit]]
    observations: tuple[Observation, ...] = field(default=(), repr=False)
    platform: str = "cpu"
    device_kind: str = "cpu"
    op_factor: float = 1.0
    collective_factor: float = 1.0

    def held_out(self) -> dict[str, HeldOut]:
        """How far the fits are off where they were not fitted, by kind of work."""
        errors: dict[str, list[float]] = {}
        for seen in self.observations:
            if seen.held_out is not None:
                errors.setdefault(seen.kind, []).append(abs(seen.held_out))
        return {
            kind: HeldOut(statistics.median(found), max(found), len(found))
            for kind, found in errors.items()
        }

    def to_json(self) -> str:
        """As JSON text; :meth:`from_json` reads it back unchanged."""
        return json.dumps(
            {"format": "autoshard-calibration", "version": VERSION, **asdict(self)}, indent=1
        )

    @staticmethod
    def from_json(text: str, *, at: str = "") -> Calibration:
        """Read what :meth:`to_json` wrote.

        Args:
            text: The JSON text.
            at: Where it came from, for the message.

        Raises:
            InputError: It is not a calibration of this version.
        """
        try:
            row = json.loads(text)
            if row.pop("format") != "autoshard-calibration" or row.pop("version") not in (
                1,
                VERSION,
            ):
                raise ValueError("format or version")
            return Calibration(
                matmul=_fits(row.pop("matmul")),
                elementwise=_fits(row.pop("elementwise")),
                collectives={
                    kind: {int(n): fit for n, fit in _fits(sizes).items()}
                    for kind, sizes in row.pop("collectives").items()
                },
                observations=tuple(Observation(**o) for o in row.pop("observations")),
                **row,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise InputError(
                f"not a calibration of version {VERSION}",
                at=at,
                fix="delete the file, or measure again with `autoshard calibrate`",
            ) from err


def _fits(rows: Mapping[str, Any]) -> dict[str, LinearFit]:
    return {key: LinearFit(**row) for key, row in rows.items()}


def calibration_path(platform: str = "cpu") -> Path:
    """Where the calibration of this machine is kept: ``autoshard/calibration.json`` in the cache.

    Those of other devices than CPUs have the platform in the name, ``calibration-gpu.json``.

    The cache is the folder named by the environment variable ``XDG_CACHE_HOME``, else
    ``~/.cache``. This is the only environment variable that autoshard reads.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    name = "calibration.json" if platform == "cpu" else f"calibration-{platform}.json"
    return (Path(cache) if cache else Path.home() / ".cache") / "autoshard" / name


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Write a calibration, whole or not at all.

    Args:
        calibration: What to save.
        path: Where; None: :func:`calibration_path` of its platform.

    Returns:
        The file written.
    """
    path = calibration_path(calibration.platform) if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader sees the old file or the new one: the text goes to a neighbour that then replaces it.
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(calibration.to_json() + "\n")
    Path(file.name).replace(path)
    return path


def load_calibration(path: Path | None = None) -> Calibration:
    """The calibration of this machine, or the shipped one where none was made.

    Args:
        path: A file to read; None: :func:`calibration_path`, then the shipped default.

    Raises:
        InputError: The file is not a calibration of this version, or ``path`` does not exist.
    """
    own = calibration_path() if path is None else path
    if own.exists():
        return Calibration.from_json(own.read_text("utf-8"), at=str(own))
    if path is not None:
        raise InputError(
            "there is no such calibration", at=str(path), fix="run `autoshard calibrate`"
        )
    shipped = resources.files("autoshard.cost_models").joinpath(DEFAULT_FILE)
    return Calibration.from_json(shipped.read_text("utf-8"), at=DEFAULT_FILE)
