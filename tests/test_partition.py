"""Shardy's partitioner: values of the function, communication of the plan, or a fallback."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import FallbackWarning, InputError, autoshard, partition
from autoshard.collectives_lowering import permutation, replica_groups
from autoshard.experiments.random_plans import RandomPlans
from autoshard.experiments.workloads import make
from autoshard.shardings import MeshShape
from autoshard.validate import Validation
from tests.lowering import Simple, mesh_of
from tests.zoo import PROGRAMS

WORKLOADS = ("mlp", "llama", "llama_unrolled", "moe", "llama_decode", "flax_transformer")

QUICK = ("mlp", "llama")

SMALL = (
    *("attention_grad", "scan_layers_grad", "scan_remat_grad", "embedding_grad", "conv_grad"),
    *("layernorm_grad", "cross_entropy_grad", "branches", "while_until", "nested_scans"),
    *("scatters", "batched_gather", "random_inside", "constants", "uneven", "half_precision"),
    *("reductions", "experts", "donated"),
)
"""Programs of the zoo, of every kind."""

LONG = ("attention_grad", "random_inside", "scan_layers_grad")


def assert_as_planned(found: Validation, tolerance: float) -> None:
    assert (found.partitioner, found.fallback_reason) == ("shardy", "")
    assert found.max_relative_error is not None
    assert found.max_relative_error <= tolerance, found.worst_value
    assert found.compiled.flops == found.predicted.flops
    assert found.compiled.collective_bytes == pytest.approx(found.predicted.collective_bytes)
    assert (found.unnamed_collectives, found.absent_collectives) == ((), ())
    assert found.involuntary_remat == 0


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS],
)
def test_a_workload_communicates_exactly_as_planned(name: str) -> None:
    workload = make(name)
    arguments = workload.init(0)
    types = {leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(workload.fn, *arguments))}
    tolerance = max(workload.tolerance[t] for t in types if t in workload.tolerance)
    step = autoshard(
        workload.fn,
        mesh_of(4, 2),
        donate_argnums=workload.donate_argnums,
        time_limit_s=10.0,  # any plan has to be what runs, proved optimal or not
        partitioner="shardy",
    )
    assert_as_planned(step.validate(*arguments, repeats=1), tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SMALL]
)
def test_a_small_program_communicates_exactly_as_planned(name: str) -> None:
    # A random plan: the cheapest one of so small a program would move nothing.
    program = PROGRAMS[name]
    step = autoshard(
        program.fn,
        mesh_of(4, 2),
        donate_argnums=program.donate,
        solver=RandomPlans(3, (0.3, 0.9)),
        partitioner="shardy",
    )
    assert_as_planned(step.validate(*program.values(), repeats=1), program.tolerance)


def doubled(x: Any) -> Any:
    return x @ x.T * 2


def test_the_module_has_one_manual_computation_over_all_axes() -> None:
    text = autoshard(doubled, mesh_of(4, 2), partitioner="shardy").lower(jnp.ones((16, 8)))
    assert text.as_text().count("sdy.manual_computation") == 1
    assert "manual_axes={" in text.as_text()
    assert "sdy.sharding_constraint" not in text.as_text()


def test_a_sum_that_ends_scattered_is_one_reduce_scatter() -> None:
    pins = {"x": P(None, "a"), "w": P("a")}
    step = autoshard(
        lambda x, w: x @ w,
        mesh_of(4, 2),
        in_shardings=pins,
        out_shardings={"result": P("a")},
        cost_model=Simple(compiler="tpu"),
        partitioner="shardy",
    )
    # Integers: floats that only a product reads are sent as bf16 on TPU, and gathering is cheaper.
    x = np.random.default_rng(0).integers(-9, 9, (64, 64)).astype(np.int32)
    assert "stablehlo.reduce_scatter" in step.lower(x, x).as_text()
    assert_as_planned(step.validate(x, x, repeats=1), 1e-5)


def test_rows_of_a_split_table_are_looked_up_where_they_are() -> None:
    # Indices beyond both ends: clamped, as in the unsharded function.
    def looked_up(table: Any, rows: Any) -> Any:
        return table.at[rows].get(mode="clip")

    mesh = mesh_of(4, 2)
    table = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    rows = np.random.default_rng(1).integers(-9, 80, (8, 4)).astype(np.int32)
    pins = {"table": P(("a", "b"))}
    step = autoshard(looked_up, mesh, in_shardings=pins, cost_model=Simple(), partitioner="shardy")
    assert_as_planned(step.validate(table, rows, repeats=1), 0.0)


def test_a_permuted_mesh_numbers_its_own_devices() -> None:
    devices = np.array(jax.devices()[:8])[[3, 0, 6, 1, 7, 2, 5, 4]].reshape(4, 2)
    program = PROGRAMS["reductions"]
    step = autoshard(
        program.fn,
        jax.sharding.Mesh(devices, ("a", "b")),
        solver=RandomPlans(0, (0.4, 0.9)),
        partitioner="shardy",
    )
    assert_as_planned(step.validate(*program.values(), repeats=1), program.tolerance)


def test_a_donated_argument_is_reused() -> None:
    step = autoshard(lambda w: w + 1.0, mesh_of(4, 2), donate_argnums=0, partitioner="shardy")
    w = jax.device_put(jnp.ones((16, 8)), step.compile(jnp.ones((16, 8))).in_shardings[0])
    result = step(w)
    assert w.is_deleted()
    np.testing.assert_array_equal(result, np.full((16, 8), 2.0))


def test_the_body_of_a_shard_map_stays_as_it_is() -> None:
    mesh = mesh_of(4, 2)
    spec = jax.sharding.PartitionSpec("a")

    def total(x: Any) -> Any:
        inner: Any = jax.shard_map(
            lambda x: jax.lax.psum(x, "a"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return inner(x * 2.0) + 1.0

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    step = autoshard(total, mesh, partitioner="shardy")
    assert step.compile(x).partitioner == "shardy"
    want = np.tile(2.0 * x.reshape(4, 2, 4).sum(0), (4, 1)) + 1.0
    np.testing.assert_allclose(step(x), want)


def assert_falls_back(reason: str, fn: Any = doubled) -> None:
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    step = autoshard(fn, mesh_of(4, 2), partitioner="shardy")
    with pytest.warns(FallbackWarning, match=reason):
        executable = step.compile(x)
    assert executable.partitioner == "xla"
    assert reason in executable.fallback_reason
    np.testing.assert_allclose(step(x), fn(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("import os; os.abort()", "died of SIGABRT"),
        ("import sys; sys.exit('LLVM ERROR: Check failed: no such axis')", "Check failed: no such"),
        ("import time; time.sleep(60)", "more than 1 s"),
    ],
    ids=["abort", "error", "hang"],
)
def test_a_child_that_fails_is_a_fallback(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "CHILD", (sys.executable, "-c", command))
    monkeypatch.setattr(partition, "DEADLINE_S", 1.0)
    assert_falls_back(reason)


INTERRUPTED = """
import signal, sys, threading
from autoshard.child import ask

slow = (
    "import time; from autoshard.child import serve; "
    "serve(lambda m: (time.sleep(2.0 * (m == b'first')), m)[1])"
)
command = (sys.executable, "-c", slow)
signal.signal(signal.SIGINT, signal.default_int_handler)
assert ask(command, b"ready", 60.0) == b"ready"
threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
try:
    ask(command, b"first", 60.0)
except KeyboardInterrupt:
    print(ask(command, b"second", 60.0).decode())
"""


def test_an_answer_that_nobody_waited_for_answers_no_later_question() -> None:
    # In a process of its own: an interrupt that comes late would end the test run.
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["second"]


@pytest.mark.filterwarnings("ignore:.*runs on one device")
def test_a_callback_would_run_once_per_device_and_is_a_fallback() -> None:
    def logged(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x) + 1, shape, x) * 2

    assert_falls_back("would run once per device", logged)


def test_a_fallback_shows_in_the_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "CHILD", ("/no/such/program",))
    step = autoshard(doubled, mesh_of(4, 2), partitioner="shardy")
    with pytest.warns(FallbackWarning):
        found = step.validate(jnp.ones((16, 8)), repeats=1)
    assert found.partitioner == "xla"
    assert "no child process could be started" in found.fallback_reason
    assert "partitioned by XLA, not Shardy" in str(found)


def test_an_unknown_partitioner_is_refused() -> None:
    with pytest.raises(InputError, match="known: xla, shardy"):
        autoshard(doubled, mesh_of(4, 2), partitioner="gspmd")  # type: ignore[call-overload]


def test_groups_number_the_devices_in_the_order_of_the_axes() -> None:
    mesh = MeshShape(("a", "b"), (2, 3))
    assert replica_groups(mesh, ("b",)) == [[0, 1, 2], [3, 4, 5]]
    assert replica_groups(mesh, ("b", "a")) == [[0, 3, 1, 4, 2, 5]]


def test_a_permutation_brings_every_device_its_piece() -> None:
    mesh = MeshShape(("a", "b"), (2, 2))
    pairs = permutation(mesh, (("a", "b"), ()), (("b", "a"), ()))
    assert sorted(pairs) == [(0, 0), (1, 2), (2, 1), (3, 3)]
