"""Ahead-of-time compilation: what the compiler leaves is read, and every way to fail has a name."""

from __future__ import annotations

import gzip
import importlib.util
import os
import stat
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from autoshard import autoshard
from autoshard.cli import main
from autoshard.cost_models import aot, aot_cache
from autoshard.cost_models.aot import AheadOfTime, Port, Source, Target, compile_ahead
from autoshard.cost_models.aot_files import buffer_sizes, exceeded, read_schedule
from autoshard.cost_models.compiled import MemorySizes
from autoshard.cost_models.topology import Topology
from autoshard.errors import InputError
from autoshard.experiments.workloads import make

SOURCE = Source(b"module", (("data", 4),), (Port((8,), "float32", (("data",),)),), ())
TARGET = Target("v5e:2x2", "tpu", "v5e:2x2")

BUFFERS = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 add.21 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 67108864, parameter 1, shape |bf16[8192,4096]| at ShapeIndex {}:
allocation 2: size 8388608, parameter 0, shape |bf16[4,1024,1024]| at ShapeIndex {}, output \
shape is |bf16[4,1024,1024]|, maybe-live-out:
allocation 3: size 4096, output shape is |f32[]|, maybe-live-out:
allocation 4: size 512, constant:
allocation 23: size 291815936, preallocated-temp:
allocation 24: size 40, color 2, preallocated-temp:
allocation 27: size 117440512, color 1, preallocated-temp:
"""

SCHEDULE = """\
hlo_module {
  name: "jit_f"
  computations {
    name: "main"
    instructions {
      name: "fusion.1"
      opcode: "fusion"
      metadata {
        op_name: "jit(f)/dot_general"
      }
      id: 7
    }
    instructions {
      name: "all-gather-start"
      opcode: "all-gather-start"
      id: 8
    }
  }
}
schedule_entries {
  instructions {
    id: 7
    start_timestamp_cycles: 0
    end_timestamp_cycles: 3000
  }
  instructions {
    id: 8
    start_timestamp_cycles: 3000
    end_timestamp_cycles: 3001
  }
  scheduler_statistics {
    total_wasted_cycles: 1500
    total_cycles: 4500
  }
  cycles_per_microsecond: 1500
}
"""


def test_buffers_in_main_memory_count_and_those_in_other_memories_do_not() -> None:
    held = buffer_sizes(BUFFERS)
    assert held == MemorySizes(
        argument_bytes=67108864 + 8388608,
        output_bytes=8388608 + 4096,
        temp_bytes=291815936 + 512,
        alias_bytes=8388608,
    )


def test_a_message_on_memory_gives_what_is_needed_and_what_there_is() -> None:
    said = "Ran out of memory on HBM, the total memory required for HLO temporaries (271.00G) "
    assert exceeded(said + "exceeds available HBM (15.75G).") == (271 * 2**30, 63 * 2**28)
    assert exceeded("something else") is None


def test_a_schedule_is_read_in_seconds() -> None:
    schedule = read_schedule(SCHEDULE)
    assert schedule is not None
    assert (schedule.total_s, schedule.wasted_s) == (3e-6, 1e-6)
    (busy,) = schedule.instructions  # the other takes one cycle
    assert (busy.name, busy.op_name, busy.end_s) == ("fusion.1", "jit(f)/dot_general", 2e-6)
    assert read_schedule("") is None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler's library that is there, and does nothing."""
    file = tmp_path / "libtpu.so"
    file.write_bytes(b"")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(file))


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Let another script take the compiler's place."""
    script = tmp_path / "child.py"
    script.write_text("import json, os, sys, time, signal, pathlib\n" + text)
    monkeypatch.setattr(aot, "_SCRIPT", script)


WRITES = """
folder = pathlib.Path(sys.argv[1])
for suffix, text in FILES.items():
    (folder / "dump" / f"module_0000.jit_f.{suffix}").write_text(text)
"""

HLO = """HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.usefixtures("library")
def test_the_quick_way_ends_the_compiler_once_the_program_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "after_optimizations.txt": HLO,
        "after_optimizations-buffer-assignment.txt": BUFFERS,
        "after_optimizations_after_buffer_assignment.txt": HLO,
    }
    count = tmp_path / "count"
    marks = f"open({str(count)!r}, 'a').write('x')\n"
    child(monkeypatch, tmp_path, f"{marks}FILES = {files!r}\n{WRITES}time.sleep(600)  # code\n")
    told: list[str] = []
    found = compile_ahead(SOURCE, TARGET, folder=tmp_path / "kept", say=told.append)
    assert (found.outcome, found.full, found.cached) == ("fits", False, False)
    assert found.program is not None
    assert found.program.flops == 2 * 8 * 8 * 8
    assert found.program.peak_bytes == 67108864 + 8388608 + 4096 + 291815936 + 512
    assert any("compiling for v5e:2x2" in line for line in told)

    again = compile_ahead(SOURCE, TARGET, folder=tmp_path / "kept")
    assert again.cached
    assert again.program == found.program
    other = compile_ahead(
        SOURCE, TARGET, folder=tmp_path / "kept", compiler_options={"xla_tpu_x": True}
    )
    assert not other.cached
    assert count.read_text() == "xx"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("script", "outcome", "words"),
    [
        ("sys.stderr.write('F12 Check failed: a == b\\n'); os.abort()", "crashed", "SIGABRT"),
        ("sys.exit(3)", "crashed", "status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", "SIGKILL"),
        ("time.sleep(60)", "timed out", "more than 2 s"),
        (
            "sys.stderr.write('The TPU is already in use by process with pid 1\\n'); os.abort()",
            "locked",
            "already in use",
        ),
        (
            "json.dump({'error': 'RESOURCE_EXHAUSTED: total memory (9.00G) exceeds available HBM "
            "(1.00G).'}, open(sys.argv[1] + '/outcome.json', 'w'))",
            "out of memory",
            "RESOURCE_EXHAUSTED",
        ),
        (
            "json.dump({'error': 'INVALID_ARGUMENT: no'}, "
            "open(sys.argv[1] + '/outcome.json', 'w'))",
            "refused",
            "INVALID_ARGUMENT",
        ),
    ],
)  # fmt: skip
def test_whatever_ends_a_compilation_is_a_result_with_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, outcome: str, words: str
) -> None:
    child(monkeypatch, tmp_path, script)
    found = compile_ahead(SOURCE, TARGET, folder=tmp_path / "kept", deadline_s=2.0)
    assert found.outcome == outcome
    assert words in found.message
    assert found.program is None
    if outcome == "out of memory":
        assert (found.needed_bytes, found.available_bytes) == (9 * 2**30, 2**30)
        assert "XLA needs 9.00 GiB of 1.00 GiB" in str(found)
    kept = compile_ahead(SOURCE, TARGET, folder=tmp_path / "kept", deadline_s=2.0).cached
    assert kept == (outcome in ("out of memory", "refused"))  # a crash may not come again


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    with pytest.raises(InputError, match=r"autoshard\[tpu\]"):
        compile_ahead(SOURCE, TARGET)


def test_a_damaged_or_foreign_entry_of_the_cache_is_not_read(tmp_path: Path) -> None:
    key, other = aot_cache.key_of(b"a"), aot_cache.key_of(b"b")
    aot_cache.save(tmp_path, key, {"hlo": "text"})
    assert aot_cache.load(tmp_path, key) == {"hlo": "text"}
    (file,) = tmp_path.iterdir()
    file.rename(file.with_name(file.name.replace(key, other)))
    assert aot_cache.load(tmp_path, other) is None
    aot_cache.save(tmp_path, key, {"hlo": "text"})
    file.write_bytes(gzip.compress(b"0\n{}"))
    assert aot_cache.load(tmp_path, key) is None
    file.write_bytes(b"not gzip")
    assert aot_cache.load(tmp_path, key) is None


def test_the_cache_forgets_what_was_used_longest_ago(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = [aot_cache.key_of(bytes([n])) for n in range(4)]
    noise = [os.urandom(3000).hex() for _ in keys]
    for age, (key, text) in enumerate(zip(keys[:3], noise, strict=False)):
        aot_cache.save(tmp_path, key, text)
        os.utime(tmp_path / f"{key}.aot.gz", (age, age))
    monkeypatch.setattr(aot_cache, "MAX_BYTES", 10_000)
    aot_cache.save(tmp_path, keys[3], noise[3])
    kept = [aot_cache.load(tmp_path, key) is not None for key in keys]
    assert kept == [False, False, True, True]


def test_a_folder_that_cannot_be_written_keeps_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    aot_cache.save(tmp_path / "file" / "below", aot_cache.key_of(b"a"), {})
    assert aot_cache.load(tmp_path / "file" / "below", aot_cache.key_of(b"a")) is None
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu: pip install 'autoshard[tpu]'")
def test_a_step_planned_for_a_tpu_slice_compiles_to_the_flops_and_memory_foreseen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return ((x @ w).astype(jnp.float32) ** 2).mean()

        new: jax.Array = w - 0.1 * jax.grad(loss)(w)
        return new

    w = jax.ShapeDtypeStruct((8192, 16384), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    mesh = Topology("v5e:4x4").mesh({"data": 4, "model": 4})
    sharded = autoshard(step, mesh, donate_argnums=0)
    report = sharded.validate(w, x)
    assert report.ahead is not None
    assert report.ahead.outcome == "fits"
    assert report.compiled.flops == report.predicted.flops == 4 * 65536 * 8192 * 16384 / 16
    assert report.compiled.peak_bytes is not None
    assert report.predicted.peak_bytes == pytest.approx(report.compiled.peak_bytes, rel=0.1)
    assert "for v5e:4x4, compiled until scheduled" in str(report)
    assert isinstance(report.to_json()["ahead"], dict)
    again = sharded.validate(w, x)
    assert again.ahead is not None
    assert again.ahead.cached

    large = jax.ShapeDtypeStruct((2**21, 8192), jnp.bfloat16)
    whole = autoshard(
        step, mesh, donate_argnums=0, memory_limit=2**50, in_shardings=(None, jax.P())
    )
    too_much = whole.validate(w, large)
    assert too_much.ahead is not None
    assert too_much.ahead.outcome == "out of memory"
    assert too_much.ahead.needed_bytes is not None
    assert too_much.ahead.needed_bytes > 32 * 2**30


def has_cuda() -> bool:
    return all(importlib.util.find_spec(p) for p in ("jax_cuda12_plugin", "jax_plugins"))


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda(), reason="needs XLA:GPU: pip install 'autoshard[cuda12]'")
def test_a_step_planned_for_eight_h100_compiles_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    workload = make("mlp", "small")
    mesh = Topology("h100:8").mesh({"data": 4, "model": 2})
    step = autoshard(workload.fn, mesh, donate_argnums=workload.donate_argnums)
    report = step.validate(*workload.args)
    assert report.ahead is not None
    assert report.ahead.outcome == "fits", report.ahead.message
    assert report.compiled.flops == pytest.approx(report.predicted.flops, rel=0.02)
    assert report.compiled.collective_bytes
    assert report.compiled.peak_bytes


def test_a_gpu_that_xla_is_told_nothing_of_is_planned_for_only() -> None:
    mesh = Topology("a100:8").mesh({"data": 8})
    lowered = autoshard(lambda x: x * 2, mesh).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(InputError, match="known: H100"):
        lowered.compile_ahead()


def test_a_plan_on_planned_devices_is_lowered_for_their_platform() -> None:
    mesh = Topology("v5e:2x2").mesh({"data": 2, "model": 2})
    lowered = autoshard(lambda x: x @ x, mesh).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert "sdy.sharding_constraint" in lowered.as_text()
    assert '"data"=2, "model"=2' in lowered.as_text()


def test_devices_of_this_machine_are_not_compiled_for_ahead_of_time() -> None:
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    lowered = autoshard(lambda x: x * 2, mesh).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(InputError, match="devices of this machine"):
        lowered.compile_ahead()


def test_a_result_is_told_without_the_text_of_the_program() -> None:
    found = AheadOfTime("v5e:2x2", "fits", hlo=HLO, memory=MemorySizes(1, 2, 3, 0))
    assert "HloModule" not in str(found.to_json())
    assert "HloModule" not in repr(found)
    assert sys.getsizeof(str(found)) < 1000


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu: pip install 'autoshard[tpu]'")
def test_a_program_compiled_to_the_end_is_told_with_estimates_by_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "one_product.py"
    program.write_text(
        "import jax, jax.numpy as jnp\n"
        "def product(x, w):\n    return jnp.tanh(x @ w)\n"
        "def shapes():\n    return [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2\n",
        "utf-8",
    )
    words = ["plan", f"{program}:product", "--example", f"{program}:shapes", "--mesh", "x=4"]
    words += ["--topology", "v5e:2x2", "--compile", "--full"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "for v5e:2x2, compiled to the end" in shown
    assert "XLA's estimates of fusions, not measured" in shown
    assert "one_product.py:3" in shown.partition("not measured")[2]
