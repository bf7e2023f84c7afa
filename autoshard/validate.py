"""Predicted, compiled and measured, side by side, and where they part.

*Predicted* is what the plan says. *Compiled* is what XLA's program contains: products, collectives
(loops times their trips), memory. *Measured* is a clock. Every collective in the compiled program
is matched to the ones the plan asks for; those that nobody asked for are listed.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from autoshard.cost_models.aot import AheadOfTime
from autoshard.cost_models.compiled import Collective, CompiledProgram, read_compiled
from autoshard.cost_models.protocol import wire_bytes
from autoshard.estimates import LineEstimate
from autoshard.execute import Executable
from autoshard.kinds import PRODUCTS
from autoshard.plan import Plan
from autoshard.plan_parts import PlannedCollective, Predicted
from autoshard.plan_text import nbytes, seconds
from autoshard.signature import ties

REMAT = re.compile(r"Involuntary full rematerialization")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one program does in one call on one device; None where it is not known.

    Attributes:
        flops: Of dots and convolutions [FLOP].
        collective_bytes: Bytes that one device sends.
        peak_bytes: Arguments + results + temporaries - aliased [bytes].
        step_s: Time of the call [s]; predicted, that of its schedule.
        hbm_bytes: Bytes read from and written to main memory.
        compute_s: Sum of the time in ops without communication [s].
        communication_s: Sum of the time in collectives [s].
        hidden_s: Communication that runs beside something else [s].
        exposed_s: Communication that the device waits for [s].
    """

    flops: float | None = None
    collective_bytes: float | None = None
    peak_bytes: int | None = None
    step_s: float | None = None
    hbm_bytes: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    hidden_s: float | None = None
    exposed_s: float | None = None

    @classmethod
    def of(cls, predicted: Predicted) -> Figures:
        """What a plan predicts."""
        return cls(**{f.name: getattr(predicted, f.name) for f in fields(cls)})

    def to_json(self) -> dict[str, float | int | None]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A source line on which the plan and the compiled program differ most.

    Attributes:
        what: ``flops`` or ``collective_bytes``.
        source: ``file.py:line``.
        predicted: By the plan.
        compiled: In the program.
    """

    what: str
    source: str
    predicted: float
    compiled: float


@dataclass(frozen=True, slots=True)
class Validation:
    """A plan held against what became of it.

    Attributes:
        predicted: The plan's figures.
        compiled: The compiled program's.
        measured: The clock's; its ``step_s`` is the median of ``trials_s``.
        trials_s: Time of each timed call [s].
        max_relative_error: Largest difference from the unsharded function's values, relative to the
            largest magnitude of the same array; None if it was not run.
        worst_value: Name of the result it occurs in.
        unnamed_collectives: Collectives of the compiled program that the plan does not ask for.
        absent_collectives: Collectives of the plan that the compiled program does not contain.
        involuntary_remat: How often XLA replicated a tensor because it could not reshard it; None
            for a compilation ahead of time, whose warnings are not read.
        disagreements: Source lines where predicted and compiled differ, worst first.
        compile_s: Time XLA took [s].
        partitioner: Who wrote the program of one device.
        fallback_reason: Why that is XLA although Shardy was asked for; else empty.
        memory_limit: What the plan was to fit into [bytes per device]; None without a limit.
        ahead: The compilation, where it was one for devices that nobody has to own.
        unknown_trip_counts: Loops of the compiled program that are counted once, because its text
            does not tell how often they run.
        estimates: Source lines by how far the plan's time for them is from XLA's own estimate, the
            farthest first; of a program compiled to the end for TPU.
    """

    predicted: Figures
    compiled: Figures
    measured: Figures
    trials_s: tuple[float, ...]
    max_relative_error: float | None
    worst_value: str
    unnamed_collectives: tuple[str, ...]
    absent_collectives: tuple[str, ...]
    involuntary_remat: int | None
    disagreements: tuple[Disagreement, ...]
    compile_s: float
    partitioner: str = "xla"
    fallback_reason: str = ""
    memory_limit: int | None = None
    ahead: AheadOfTime | None = None
    unknown_trip_counts: tuple[str, ...] = ()
    estimates: tuple[LineEstimate, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; of an ahead-of-time compilation without the program's text."""
        told = asdict(replace(self, ahead=None))
        return {**told, "ahead": None if self.ahead is None else self.ahead.to_json()}

    def __str__(self) -> str:
        heading = [] if self.ahead is None else [str(self.ahead)]
        rows = heading + self._rows()
        return "\n".join(rows)

    def _rows(self) -> list[str]:
        rows = [f"{'':18}{'predicted':>14}{'compiled':>14}{'measured':>14}"]
        for label, name, show in (
            ("FLOP in products", "flops", lambda v: f"{v:.6g}"),
            ("bytes sent", "collective_bytes", nbytes),
            ("memory traffic", "hbm_bytes", nbytes),
            ("peak memory", "peak_bytes", nbytes),
            ("step time", "step_s", seconds),
            ("  sum of compute", "compute_s", seconds),
            ("  sum of comm.", "communication_s", seconds),
            ("  hidden comm.", "hidden_s", seconds),
            ("  exposed comm.", "exposed_s", seconds),
        ):
            cells = [getattr(f, name) for f in (self.predicted, self.compiled, self.measured)]
            shown = "".join(f"{'-' if c is None else show(c):>14}" for c in cells)
            rows.append(f"{label:18}{shown}")
        limit, peak = self.memory_limit, self.compiled.peak_bytes
        if limit is not None and peak is not None and peak > limit:
            rows.append(
                f"compiled, it needs {nbytes(peak - limit)} more than the memory limit of "
                f"{nbytes(limit)}: plan with a lower one"
            )
        if self.fallback_reason:
            rows.append(f"partitioned by XLA, not Shardy: {self.fallback_reason}")
        elif self.partitioner != "xla":
            rows.append(f"partitioned by {self.partitioner}")
        if self.max_relative_error is not None:
            where = f" ({self.worst_value})" if self.worst_value else ""
            rows.append(
                f"largest relative error of the values: {self.max_relative_error:.2e}{where}"
            )
        if self.involuntary_remat is not None:
            rows.append(f"involuntary rematerializations: {self.involuntary_remat}")
        for label, lines in (
            ("collectives the plan cannot name", self.unnamed_collectives),
            ("planned collectives that are not there", self.absent_collectives),
        ):
            rows.append(f"{label}: {len(lines)}")
            rows += [f"  {line}" for line in lines[:8]]
        if self.disagreements:
            rows.append("where they part, worst first:")
            rows += [
                f"  {d.source or '(no line)'}: {d.what} {d.predicted:.6g} predicted, "
                f"{d.compiled:.6g} compiled"
                for d in self.disagreements[:5]
            ]
        if self.estimates:
            rows.append("XLA's estimates of fusions, not measured; farthest from the plan first:")
            rows.append(f"  {'predicted':>11}{'XLA says':>11}{'cycles':>12}{'fusions':>9}")
            rows += [
                f"  {seconds(e.predicted_s):>11}{seconds(e.xla_s):>11}{e.cycles:>12}{e.fusions:>9}"
                f"  {e.source or '(no line)'}"
                for e in self.estimates[:10]
            ]
        if self.unknown_trip_counts:
            names = ", ".join(self.unknown_trip_counts[:8])
            rows.append(f"loops of unknown length, counted once: {names}")
        return rows


def validate(
    plan: Plan,
    compile_: Callable[[], Executable],
    values: Sequence[Any] | None,
    *,
    repeats: int = 10,
    budget_s: float = 20.0,
) -> Validation:
    """Compile a planned program, read it, check its values and time it.

    Args:
        plan: The plan.
        compile_: Compiles the rewritten program; XLA's log is read while it runs.
        values: The arrays to call it with, one per argument of the flat program; None to compile
            only. They are copied, so nothing of the caller's is consumed.
        repeats: Timed calls at most.
        budget_s: Time for the timed calls [s].
    """
    start = time.perf_counter()
    with captured_stderr() as log:
        executable = compile_()
    compile_s = time.perf_counter() - start
    program = read_compiled(executable.compiled)
    error, worst = None, ""
    trials: tuple[float, ...] = ()
    if values is not None:
        error, worst = value_error(executable, values)
        trials = step_times(executable, values, repeats=repeats, budget_s=budget_s)
    return replace(
        compared(plan, program),
        measured=Figures(step_s=statistics.median(trials) if trials else None),
        trials_s=trials,
        max_relative_error=error,
        worst_value=worst,
        involuntary_remat=len(REMAT.findall(log[0])),
        compile_s=compile_s,
        partitioner=executable.partitioner,
        fallback_reason=executable.fallback_reason,
    )


def compared(plan: Plan, program: CompiledProgram | None) -> Validation:
    """A plan held against a compiled program, or against none; nothing is run."""
    unnamed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    if program is not None:
        unnamed, absent = match_collectives(plan.collectives, program.collectives)
    return Validation(
        predicted=Figures.of(plan.predicted),
        compiled=Figures()
        if program is None
        else Figures(
            program.flops,
            program.collective_bytes,
            program.peak_bytes,
            hbm_bytes=program.hbm_bytes,
        ),
        measured=Figures(),
        trials_s=(),
        max_relative_error=None,
        worst_value="",
        unnamed_collectives=unnamed,
        absent_collectives=absent,
        involuntary_remat=None,
        disagreements=() if program is None else disagreements(plan, program),
        compile_s=0.0,
        memory_limit=plan.memory_limit,
        unknown_trip_counts=() if program is None else program.unknown_trip_counts,
    )


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Everything written to the process's stderr, C++ logs too; it is passed on at the end."""
    text = [""]
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text[0] = file.read().decode(errors="replace")
            sys.stderr.write(text[0])


def pair_collectives(
    planned: Sequence[PlannedCollective], compiled: Sequence[Collective]
) -> tuple[tuple[tuple[Collective, tuple[PlannedCollective, ...]], ...], list[PlannedCollective]]:
    """Each compiled collective with the planned ones that it carries out (see below).

    Returns:
        The pairs, the smallest collectives first; the planned ones that are left over.
    """
    left: dict[tuple[str, int, int], list[PlannedCollective]] = defaultdict(list)
    for plan in planned:
        left[(plan.kind, 0 if plan.kind == "permute" else plan.devices, plan.trips)].append(plan)
    pairs = []
    for found in sorted(compiled, key=lambda c: c.nbytes):
        key = (found.kind, 0 if found.kind == "permute" else found.devices, found.trips)
        members = _covering(left[key], found.nbytes, found.source)
        for plan in members:
            left[key].remove(plan)
        pairs.append((found, tuple(members)))
    return tuple(pairs), [plan for rest in left.values() for plan in rest]


def match_collectives(
    planned: Sequence[PlannedCollective], compiled: Sequence[Collective]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pair compiled collectives with planned ones of the same kind, group size, trips and bytes.

    XLA combines several all-reduces (or all-gathers) into one, so a compiled collective may also be
    the sum of planned ones. The group size of a permute is not compared: devices that keep their
    piece do not take part.

    Returns:
        Descriptions of compiled collectives without a planned one, and the other way round.
    """
    pairs, left = pair_collectives(planned, compiled)
    unnamed = [
        (f"{found.name}: " if found.name else "")
        + f"{found.kind} of {nbytes(found.nbytes)} among {found.devices} devices"
        + (f" x{found.trips}" if found.trips > 1 else "")
        + f" at {found.source or found.op_name or 'no source line'}"
        for found, members in pairs
        if not members
    ]
    absent = [
        f"{p.kind} over {'*'.join(p.axes)} of {nbytes(p.nbytes)}"
        + (f" x{p.trips}" if p.trips > 1 else "")
        + f": {p.why}"
        for p in left
        if p.nbytes and p.trips
    ]
    return tuple(unnamed), tuple(absent)


def _covering(
    planned: list[PlannedCollective], size: float, source: str
) -> list[PlannedCollective]:
    """Planned collectives whose bytes add up to ``size``; one alone if there is one.

    Of several alone one of the same source line is taken.
    """
    alone = [plan for plan in planned if abs(plan.nbytes - size) < 1]
    if alone:
        return [next((plan for plan in alone if plan.source == source), alone[0])]
    sums: dict[int, list[int]] = {0: []}
    for number, plan in enumerate(planned):
        for total, members in list(sums.items()):
            bigger = total + round(plan.nbytes)
            if bigger <= size + 1 and bigger not in sums and len(sums) < 100_000:
                sums[bigger] = [*members, number]
    return [planned[i] for i in sums.get(round(size), [])]


def disagreements(plan: Plan, program: CompiledProgram) -> tuple[Disagreement, ...]:
    """Source lines on which plan and program differ by more than a hundredth, worst first."""
    flops: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in plan.ops:
        if op.name.partition(".")[2] in PRODUCTS:
            flops[op.source][0] += op.flops * op.trips
    for dot in program.flops_by_op:
        flops[dot.source][1] += dot.flops * dot.trips
    sent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for planned in plan.collectives:
        moved = wire_bytes(planned.kind, planned.nbytes, planned.devices) * planned.trips
        sent[planned.source][0] += moved
    for collective in program.collectives:
        sent[collective.source][1] += collective.sent_bytes
    found = []
    for what, table, total in (
        ("flops", flops, plan.predicted.flops),
        ("collective_bytes", sent, plan.predicted.collective_bytes),
    ):
        if abs(sum(c for _, c in table.values()) - total) <= 0.01 * total:
            continue  # XLA moves a combined collective to one of its lines; the totals agree
        found += [
            Disagreement(what, source, p, c)
            for source, (p, c) in table.items()
            if abs(p - c) > 0.01 * max(p, c)
        ]
    return tuple(sorted(found, key=lambda d: -abs(d.predicted - d.compiled)))


def value_error(executable: Executable, values: Sequence[Any]) -> tuple[float, str]:
    """Largest difference from the unsharded function, and the result it is in.

    Floating-point results are compared relative to the largest magnitude of the same array, others
    by the fraction of elements that differ.
    """
    reference = _unsharded(executable, values)
    outputs = executable.compiled(*_copies(executable, values))
    worst, name = 0.0, ""
    for leaf, ours, theirs in zip(executable.traced.results, outputs, reference, strict=True):
        error = relative_error(ours, theirs)
        if error > worst or not np.isfinite(error):
            worst, name = error, leaf.name
    return worst, name


def _unsharded(executable: Executable, values: Sequence[Any]) -> Sequence[Any]:
    """What the function itself returns; on the mesh only if it cannot be traced without one."""
    flat = executable.traced.flat
    try:
        return list(jax.jit(flat)(*values))
    except (RuntimeError, ValueError):  # a PartitionSpec or shard_map inside needs a mesh
        with jax.set_mesh(executable.traced.auto_mesh):
            return list(jax.jit(flat)(*values))


def relative_error(ours: Any, theirs: Any) -> float:
    """Largest difference relative to the largest magnitude of ``theirs``; NaN equals NaN.

    Magnitudes below the type's machine epsilon count as epsilon.
    """
    if jax.numpy.issubdtype(theirs.dtype, jax.dtypes.prng_key):
        ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
    x, y = np.asarray(ours), np.asarray(theirs)
    if x.size == 0:
        return 0.0
    if not jax.numpy.issubdtype(theirs.dtype, np.inexact):
        return float(np.mean(x != y))
    wide = np.complex128 if np.iscomplexobj(y) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if same.all():
        return 0.0
    # Below the type's resolution of one an array holds rounding noise only (gradients that are
    # exactly zero, and their moments), which no two orders of summation share.
    floor = float(jax.numpy.finfo(theirs.dtype).eps)
    scale = max(floor, float(np.max(np.abs(y[np.isfinite(y)]), initial=0.0)))
    difference = np.abs(x[~same] - y[~same])
    return float(np.max(difference)) / scale if np.isfinite(difference).all() else float("inf")


def step_times(
    executable: Executable, values: Sequence[Any], *, repeats: int = 10, budget_s: float = 20.0
) -> tuple[float, ...]:
    """Wall-clock time of calls after two to warm up [s]; donated state is chained through."""
    signature = executable.traced.signature
    chained = ties(signature.arguments, executable.traced.results)
    donated = set(signature.donated)
    fresh = donated - {a for a, _ in chained}
    arguments = _copies(executable, values)
    trials: list[float] = []
    end = time.perf_counter() + budget_s
    for round_ in range(repeats + 2):
        start = time.perf_counter()
        outputs = jax.block_until_ready(executable.compiled(*arguments))
        if round_ >= 2:
            trials.append(time.perf_counter() - start)
        for argument, result in chained:
            arguments[argument] = outputs[result]
        if fresh:
            copies = _copies(executable, values)
            for argument in fresh:
                arguments[argument] = copies[argument]
        if time.perf_counter() > end and trials:
            break
    return tuple(trials)


def _copies(executable: Executable, values: Sequence[Any]) -> list[Any]:
    """The arrays where the program wants them, none of them the caller's own."""
    donated = set(executable.traced.signature.donated)
    own = [jax.numpy.copy(v) if i in donated else v for i, v in enumerate(values)]
    return executable.place(own)
