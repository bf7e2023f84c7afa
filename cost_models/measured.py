"""A cost model that looks costs up in a table of measurements, and scales between its rows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from autoshard.cost_models.protocol import (
    CollectiveKind,
    Compiler,
    CostModel,
    Floats,
    MeshAxis,
    Overlaps,
    Work,
    is_asynchronous,
)
from autoshard.errors import InputError

REACH = 16.0
"""How many times larger or smaller, in any size, than a measured product another one may be that is
priced by it; beyond, the model underneath prices alone."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured time.

    Attributes:
        op: An operation (``stablehlo.dot_general``) or a kind of collective (``all_reduce``).
        dtype: Element type of an operation's main operand.
        sizes: Of a product: local (batch, m, n, k). Of another operation: bytes at the fusion
            boundary. Of a collective over one axis: its devices and bytes, as in the protocol.
        seconds: The time [s].
    """

    op: str
    dtype: str
    sizes: tuple[float, ...]
    seconds: float


class MeasuredModel:
    """Prices as measured, where something alike was measured; else those of a model underneath.

    What was measured itself costs what was measured. A product is priced by the measured one
    nearest in its sizes, another operation or a collective by the measured ones next in bytes: the
    model underneath says how much more or less it costs than those. So the table corrects the
    model, and neither makes a jump where the other ends.

    Args:
        table: What was measured.
        otherwise: The model underneath.

    Attributes:
        name: That of the model underneath, and ``+table``.
        memory_bytes: That of the model underneath [bytes].
        compiler: That of the model underneath.
        dispatch_s: That of the model underneath [s].
        table: As given.
    """

    def __init__(self, table: Sequence[Measurement], otherwise: CostModel) -> None:
        self.table = tuple(table)
        self.name = f"{otherwise.name}+table"
        self.memory_bytes: float | None = otherwise.memory_bytes
        self.compiler: Compiler = otherwise.compiler
        self.dispatch_s = otherwise.dispatch_s
        self._otherwise = otherwise
        self._ops: dict[tuple[str, str, int], tuple[Floats, Floats]] = {}
        self._collectives: dict[tuple[str, int], tuple[Floats, Floats]] = {}
        rows: dict[tuple[str, str, int], list[Measurement]] = {}
        for row in self.table:
            if row.op in get_args(CollectiveKind):
                rows.setdefault((row.op, "", int(row.sizes[0])), []).append(row)
            else:
                rows.setdefault((row.op, row.dtype, len(row.sizes)), []).append(row)
        for (op, dtype, count), found in rows.items():
            found.sort(key=lambda row: row.sizes)
            seconds = np.array([row.seconds for row in found])
            if dtype:
                sizes = np.log(np.maximum([row.sizes for row in found], 1.0))
                ratio = np.log(seconds / self._underneath(op, dtype, [r.sizes for r in found]))
                self._ops[op, dtype, count] = sizes, ratio
            else:
                nbytes = np.array([row.sizes[1] for row in found])
                group = (MeshAxis("group", count),)
                kind: CollectiveKind = op  # type: ignore[assignment]
                priced = otherwise.collective_s(kind, nbytes, group)
                self._collectives[op, count] = np.log(nbytes), np.log(seconds / priced)

    def _underneath(self, op: str, dtype: str, sizes: Sequence[tuple[float, ...]]) -> Floats:
        """What the model underneath says of what was measured [s]."""
        if len(sizes[0]) == 1:
            nbytes = np.array([size[0] for size in sizes])
            return self._otherwise.op_s(Work(op, dtype, np.zeros(len(sizes)), nbytes))
        dims = np.array(sizes, dtype=np.int64)
        batch, m, n, k = (dims[:, i].astype(np.float64) for i in range(4))
        width = 4 if dtype in ("f32", "i32") else 8 if dtype == "f64" else 2
        nbytes = batch * (m * k + k * n + m * n) * width
        return self._otherwise.op_s(Work(op, dtype, 2 * batch * m * n * k, nbytes, dims))

    def _correction(self, work: Work) -> Floats:
        """Measured over predicted time of the measured ops that are like these, ``[S]``."""
        plain = np.ones(len(work.flops))
        if work.matmul is not None:
            found = self._ops.get((work.op, work.dtype, 4))
            if found is None:
                return plain
            here = np.log(np.maximum(work.matmul.astype(np.float64), 1.0))
            apart = np.abs(here[:, None, :] - found[0][None, :, :])
            nearest = apart.sum(axis=2).argmin(axis=1)
            near = apart.max(axis=2)[np.arange(len(here)), nearest] <= math.log(REACH)
            return np.where(near, np.exp(found[1][nearest]), 1.0)
        found = self._ops.get((work.op, work.dtype, 1))
        if found is None:
            return plain
        nbytes = np.log(np.maximum(work.hbm_bytes, 1.0))
        return np.asarray(np.exp(np.interp(nbytes, found[0][:, 0], found[1])))

    def compute_s(self, work: Work) -> Floats:
        """Time the arithmetic units are busy [s], ``[S]``."""
        return self._otherwise.compute_s(work) * self._correction(work)

    def hbm_s(self, work: Work) -> Floats:
        """Time the memory system is busy [s], ``[S]``."""
        return self._otherwise.hbm_s(work) * self._correction(work)

    def op_s(self, work: Work) -> Floats:
        """Time of the op [s], ``[S]``."""
        return self._otherwise.op_s(work) * self._correction(work)

    def is_asynchronous(self, kind: CollectiveKind) -> bool:
        """As the model underneath says."""
        return is_asynchronous(self._otherwise, kind)

    def links(self, axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
        """As the model underneath says."""
        model = self._otherwise
        return model.links(axes) if isinstance(model, Overlaps) else tuple(a.name for a in axes)

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        """Time of a collective over one or several mesh axes [s], same shape as ``nbytes``.

        Args:
            kind: Which collective.
            nbytes: Bytes on one device of the larger side.
            axes: The axes it runs over, major to minor.
        """
        priced = self._otherwise.collective_s(kind, nbytes, axes)
        found = self._collectives.get((kind, math.prod(axis.size for axis in axes)))
        if found is None:
            return priced
        at = np.log(np.maximum(np.asarray(nbytes, dtype=np.float64), 1.0))
        return np.asarray(priced * np.exp(np.interp(at, *found)))


def load_measurements(path: str | Path) -> tuple[str, tuple[Measurement, ...]]:
    """A table of measurements, and the cost model that it corrects.

    A CSV file with the columns ``device`` (a row of ``COST_MODELS``, the same in every line),
    ``op``, ``seconds``, and by what was measured ``dtype`` and ``batch``, ``m``, ``n``, ``k`` (a
    product), ``dtype`` and ``bytes`` (another operation), ``devices`` and ``bytes`` (a collective).

    Args:
        path: The file.

    Raises:
        InputError: It cannot be read, or a line is not complete; says which.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"the measurements in {path} cannot be read: {error}",
            at=str(path),
            fix="give a CSV file with the columns device, op, seconds, ...",
        ) from error
    devices = {row.get("device") or "" for row in rows}
    if len(devices) != 1 or "" in devices:
        raise InputError(
            f"{path} does not say of which device it is",
            at=str(path),
            fix="give every line the same device, e.g. v5e",
        )
    found = tuple(_read(row, f"{path}, line {i}") for i, row in enumerate(rows, start=2))
    return devices.pop(), found


def _read(row: Mapping[str, str | None], at: str) -> Measurement:
    op, dtype = row.get("op") or "", row.get("dtype") or ""
    columns: tuple[str, ...]
    if op in get_args(CollectiveKind):
        columns, dtype = ("devices", "bytes"), ""
    else:
        columns = ("batch", "m", "n", "k") if row.get("m") else ("bytes",)
    try:
        sizes = tuple(float(row.get(column) or "") for column in columns)
        measured = Measurement(op, dtype, sizes, float(row.get("seconds") or ""))
    except ValueError as error:
        raise InputError(
            f"a measurement of {op or 'nothing'} needs {', '.join((*columns, 'seconds'))}",
            at=at,
            fix="give a number in each of these columns",
        ) from error
    named = op in get_args(CollectiveKind) or (bool(op) and bool(dtype))
    if not named or min(*sizes, measured.seconds) <= 0:
        raise InputError(
            "a measurement needs op, dtype unless it is a collective, and numbers above 0",
            at=at,
            fix="e.g. op=stablehlo.add, dtype=f32, bytes=1048576, seconds=1.5e-6",
        )
    return measured
