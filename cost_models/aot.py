"""Compiling for devices that nobody has to own: XLA:TPU and XLA:GPU on a machine without either.

The compiler runs in a process of its own, under a deadline, because it may hang, abort, or find its
library locked. XLA:TPU spends nineteen of twenty seconds on generating code; the *quick* way ends
the process as soon as the scheduled program and its memory are written down.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from autoshard.cost_models.aot_cache import cache_folder, key_of, load, save
from autoshard.cost_models.aot_files import XlaSchedule, buffer_sizes, exceeded, read_schedule
from autoshard.cost_models.compiled import CompiledProgram, MemorySizes, read_hlo
from autoshard.errors import InputError
from autoshard.records import plain, record

Outcome = Literal["fits", "out of memory", "refused", "crashed", "timed out", "locked"]
"""What became of a compilation."""

QUICK_DEADLINE_S = 300.0
"""Time for a quick compilation [s]; it takes some seconds, more where processors are shared."""

FULL_DEADLINE_S = 3600.0
"""Time for a whole compilation [s]."""

_QUIET: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Settings with which libtpu starts without looking for a TPU; the values mean nothing else."""

_SCRIPT = Path(__file__).with_name("aot_child.py")
_DONE = "after_optimizations_after_buffer_assignment.txt"
_SCHEDULED = "after_optimizations.txt"
_BUFFERS = "after_optimizations-buffer-assignment.txt"
_POLL_S = 0.05
_EXTRAS = {"tpu": "tpu", "cuda": "cuda12"}
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda12_pjrt")}


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for, as ``jax.experimental.topologies`` names them.

    Attributes:
        name: For messages, e.g. ``v5e:4x4``.
        platform: ``tpu`` or ``cuda``.
        topology: E.g. ``v5e:4x4``; empty for GPUs.
        topology_options: Further arguments of ``get_topology_desc``, by name.
        places: Per device in the order of the mesh: slice, x, y, z, core. Empty: any order.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    topology: str
    topology_options: tuple[tuple[str, Any], ...] = ()
    places: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """An argument or result of a program to compile.

    Attributes:
        shape: Global sizes.
        dtype: Element type by its NumPy name.
        axes: Mesh axes per dimension.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A program to compile.

    Attributes:
        module: StableHLO as MLIR bytecode, with the shardings of a ``jit``-lowered module.
        mesh: Names and sizes of the axes that its shardings name.
        arguments: Its arguments.
        results: Its results.
        identity: What makes two programs the same one, e.g. the module's text without the call
            stacks in which it was traced; empty: ``module``.
    """

    module: bytes = field(repr=False)
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    identity: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class AheadOfTime:
    """What became of a compilation for devices that are not there.

    Attributes:
        target: What it was compiled for.
        outcome: ``fits`` if there is a program; what stopped it otherwise.
        message: What the compiler said last, where something stopped it.
        full: Whether it was compiled to the end; only then has the text XLA's estimated cycles.
        hlo: The scheduled program; empty if there is none.
        memory: Its memory; None if it is not known.
        needed_bytes: What XLA says a program needs that does not fit [bytes].
        available_bytes: What XLA says there is for it [bytes].
        schedule: XLA's own schedule, collectives included: estimates.
        versions: Of JAX and of the compiler's library.
        compile_s: Time that the compiler took [s].
        cached: Whether it was compiled earlier.
    """

    target: str
    outcome: Outcome
    message: str = ""
    full: bool = False
    hlo: str = field(default="", repr=False)
    memory: MemorySizes | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    schedule: XlaSchedule | None = field(default=None, repr=False)
    versions: str = ""
    compile_s: float = 0.0
    cached: bool = False

    @cached_property
    def program(self) -> CompiledProgram | None:
        """The program in numbers, per device; None if there is none.

        A program that does not fit is there too, as XLA had it when it gave up.
        """
        return read_hlo(self.hlo, memory=self.memory) if self.hlo else None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, without the program's text and schedule."""
        told: dict[str, Any] = plain(replace(self, hlo="", schedule=None))
        del told["hlo"], told["schedule"]
        if self.schedule is not None:
            told["xla_estimated_s"] = self.schedule.total_s
            told["xla_estimated_exposed_communication_s"] = self.schedule.wasted_s
        return told

    def __str__(self) -> str:
        way = "compiled to the end" if self.full else "compiled until scheduled"
        if self.outcome not in ("fits", "out of memory"):
            return f"for {self.target}: {self.outcome}: {self.message}"
        rows = [f"for {self.target}, {way} in {self.compile_s:.1f} s: {self.outcome}"]
        if self.needed_bytes is not None and self.available_bytes is not None:
            rows[0] += (
                f": XLA needs {self.needed_bytes / 2**30:.2f} GiB of "
                f"{self.available_bytes / 2**30:.2f} GiB"
            )
        if self.schedule is not None:
            rows.append(
                f"XLA's estimate, loop bodies counted once: {self.schedule.total_s * 1e3:.3g} ms, "
                f"of which {self.schedule.wasted_s * 1e3:.3g} ms wait for communication"
            )
        return "\n".join(rows)


def compile_ahead(
    source: Source,
    target: Target,
    *,
    full: bool = False,
    deadline_s: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> AheadOfTime:
    """Compile a program for devices that are not there.

    Args:
        source: The program.
        target: The devices.
        full: Compile to the end. On TPU that takes minutes and adds XLA's estimated cycles.
        deadline_s: Time after which the compiler is ended [s]; None: :data:`QUICK_DEADLINE_S` or
            :data:`FULL_DEADLINE_S`.
        compiler_options: XLA's options by name, e.g. ``{"xla_tpu_enable_async_all_to_all": True}``.
        folder: Where compilations are kept; None: :func:`~.aot_cache.cache_folder`.
        say: Told how it goes.

    Returns:
        The outcome; what the compiler makes of a program is never an exception.

    Raises:
        InputError: The compiler's library is not installed.
    """
    library = _library(target.platform)
    options = dict(compiler_options or {})
    request: dict[str, Any] = {
        "platform": target.platform,
        "topology": target.topology,
        "topology_options": target.topology_options,
        "places": target.places,
        "mesh": source.mesh,
        "arguments": [(p.shape, p.dtype, p.axes) for p in source.arguments],
        "results": [(p.shape, p.dtype) for p in source.results],
        "compiler_options": options,
    }
    kept = cache_folder() if folder is None else folder
    whole = full or target.platform != "tpu"
    asked = json.dumps([request, whole, library], sort_keys=True)
    key = key_of(asked.encode(), source.identity or source.module)
    if (found := load(kept, key)) is not None:
        return replace(record(AheadOfTime, found, "a kept compilation"), cached=True)
    limit_s = deadline_s or (FULL_DEADLINE_S if whole else QUICK_DEADLINE_S)
    with tempfile.TemporaryDirectory(prefix="autoshard-aot-") as name:
        place = Path(name)
        request["compiler_options"] = {
            **options,
            "xla_dump_to": str(place / "dump"),
            **({"xla_dump_latency_hiding_schedule": True} if target.platform == "tpu" else {}),
        }
        (place / "dump").mkdir()
        (place / "request.json").write_text(json.dumps(request), "utf-8")
        (place / "module.mlirbc").write_bytes(source.module)
        start = time.perf_counter()
        ended = _run(place, whole, limit_s, target, say or (lambda stage: None))
        result = replace(
            _read(place, target, whole, ended, limit_s),
            versions=library,
            compile_s=time.perf_counter() - start,
        )
    if result.outcome in ("fits", "out of memory", "refused"):
        save(kept, key, plain(result))
    return result


def _library(platform: str) -> str:
    """Versions that decide what comes out of the compiler.

    Raises:
        InputError: It is not installed.
    """
    versions = [f"jax {importlib.metadata.version('jax')}"]
    versions.append(f"jaxlib {importlib.metadata.version('jaxlib')}")
    named = os.environ.get("TPU_LIBRARY_PATH") if platform == "tpu" else None
    if named is not None:  # JAX's own way to say which libtpu
        with suppress(OSError):
            state = Path(named).stat()
            return ", ".join((*versions, f"{named} {state.st_size} {state.st_mtime_ns}"))
    for package in _PACKAGES[platform]:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError as error:
            raise InputError(
                f"compiling for {platform} needs the package {package}, which is not installed",
                fix=f"pip install 'autoshard[{_EXTRAS[platform]}]'",
            ) from error
    return ", ".join(versions)


@dataclass(frozen=True, slots=True)
class _End:
    """How the child ended: its exit status; None where it was ended in time for a quick result."""

    status: int | None
    late: bool
    log: str


def _run(
    place: Path, whole: bool, limit_s: float, target: Target, say: Callable[[str], None]
) -> _End:
    """Let the child compile until it is done, its program is there, or the time is up."""
    environment = {
        **os.environ,
        **_QUIET,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    environment.pop("XLA_FLAGS", None)  # those of another backend abort this one
    start, status, late = time.monotonic(), None, False
    with (place / "log").open("w+b") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(place)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=place,
            start_new_session=True,
        )
        try:
            while (status := child.poll()) is None:
                passed = time.monotonic() - start
                if not whole and _find(place, _DONE) is not None:
                    break
                if passed > limit_s:
                    late = True
                    break
                say(f"compiling for {target.name}, {passed:.0f} s")
                time.sleep(_POLL_S)
        finally:
            with suppress(ProcessLookupError):  # its own process group, its helpers included
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        return _End(status, late, log.read().decode(errors="replace"))


def _find(place: Path, suffix: str) -> Path | None:
    return next(iter((place / "dump").glob(f"*{suffix}")), None)


def _text(place: Path, suffix: str) -> str:
    found = _find(place, suffix)
    return "" if found is None else found.read_text("utf-8", errors="replace")


def _read(place: Path, target: Target, whole: bool, end: _End, limit_s: float) -> AheadOfTime:
    """What the child left."""
    if end.late:
        said = f"it took more than {limit_s:g} s"
        return AheadOfTime(target.name, "timed out", said, whole)
    try:
        told: Any = json.loads((place / "outcome.json").read_text("utf-8"))
    except (OSError, ValueError):
        told = {}
    if end.status is not None and not told:
        outcome: Outcome = "locked" if _is_locked(end.log) else "crashed"
        return AheadOfTime(target.name, outcome, _last_words(end), whole)
    schedule = read_schedule(_text(place, ".schedule.txt"))
    scheduled, buffers = _text(place, _SCHEDULED), _text(place, _BUFFERS)
    if target.platform != "tpu":
        scheduled = ""  # the whole text comes back from the child
    memory = buffer_sizes(buffers) if buffers else None
    if "error" in told:
        message = str(told["error"])
        needed, available = exceeded(message) or (None, None)
        full_up = "RESOURCE_EXHAUSTED" in message
        return AheadOfTime(
            target.name,
            "out of memory" if full_up else "refused",
            message[:2000],
            whole,
            scheduled if full_up else "",
            memory if full_up else None,
            needed,
            available,
            schedule,
        )
    compiled = place / "compiled.txt"
    if told and compiled.exists():
        scheduled = compiled.read_text("utf-8")
        # XLA:TPU's own verdict goes by the buffers; its memory_analysis counts up to a third more.
        if memory is None and told["memory"]:
            memory = record(MemorySizes, told["memory"], "memory")
    return AheadOfTime(target.name, "fits", "", whole, scheduled, memory, schedule=schedule)


def _is_locked(log: str) -> bool:
    return "libtpu_lockfile" in log or "already in use by process" in log


def _last_words(end: _End) -> str:
    """How a child ended, with what it said last."""
    status = end.status or 0
    how = f"the process ended with status {status}"
    if status < 0:
        how = f"the process died of {signal.Signals(-status).name}"
    lines = [line.strip() for line in end.log.splitlines() if line.strip()]
    telling = [line for line in lines if "heck failed" in line or "rror:" in line] or lines
    return f"{how}: {telling[-1][:500]}" if telling else how
