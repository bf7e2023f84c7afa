"""Every kind of op and control flow: same values, and the program that was priced.

A row is a situation. Its function is planned, compiled and run on a mesh; its values must be those
of the function without sharding, and the compiled program must compute and send what the plan says,
to the last collective. What has no rule must warn, once, with place and price.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from autoshard import InputError, UnknownOpWarning, autoshard
from autoshard.cost_models.compiled import read_compiled
from autoshard.experiments.random_plans import RandomPlans
from autoshard.twins import FINDS_TWINS
from autoshard.validate import Validation
from tests.calls import HEARD, SITUATIONS
from tests.lowering import mesh_of
from tests.situations import POLICIES
from tests.zoo import PROGRAMS

ROWS = {
    **SITUATIONS,
    **{
        name: PROGRAMS[name]
        for name in (
            *("nested_scans", "while_until", "fori_dynamic", "carried_cache", "custom_vjp"),
            *("nested_jit", "kv_cache", "complex_numbers", "integers", "half_precision"),
            *("booleans", "scalars", "batched_gather", "scatters", "branches"),
        )
    },
}
WARNS = {
    "pure_callback": "runs on one device",
    "pure_callback_of_two": "runs on one device",
}
"""Rows that warn, and of what; all others are silent."""

VALUES_ALONE = {"conv_grouped"}
"""Rows of which XLA:CPU gathers more than was asked for, or runs a callback on every device."""

if jax.__version_info__ >= (0, 11):
    VALUES_ALONE.add("pure_callback_of_two")

LONG = frozenset(
    {
        *("rng_threefry2x32", "rng_rbg", "rng_unsafe_rbg", "cumulatives", "special_functions"),
        *("decompositions", "systems", "decomposition_grads", "one_matrix", "complex_numbers"),
    }
)
"""Rows that take more than five seconds."""


def validated(
    name: str, mesh: Mesh, solver: RandomPlans | None = None
) -> tuple[Validation, list[str]]:
    """A row compared, and the warnings that planning it gave."""
    program = ROWS[name]
    step = autoshard(program.fn, mesh, donate_argnums=program.donate, solver=solver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = step.validate(*program.values(), repeats=1)
    return report, [str(w.message) for w in caught if w.category is UnknownOpWarning]


def check(name: str, found: Validation) -> None:
    assert found.max_relative_error is not None
    assert found.max_relative_error <= ROWS[name].tolerance, found.worst_value
    if name in VALUES_ALONE:
        return
    assert found.involuntary_remat == 0
    assert found.unnamed_collectives == ()
    for figure in ("flops", "collective_bytes"):
        predicted, compiled = (getattr(f, figure) for f in (found.predicted, found.compiled))
        assert predicted == pytest.approx(compiled, rel=1e-3), figure


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in ROWS]
)
def test_what_was_priced_is_what_runs(name: str) -> None:
    found, warned = validated(name, mesh_of(4, 2))
    check(name, found)
    if name not in VALUES_ALONE:
        assert found.absent_collectives == ()
    if name in WARNS:
        assert len(warned) == 1
        assert WARNS[name] in warned[0]
        assert re.search(r"at:  \w+\.py:\d+", warned[0])
        assert re.search(r"costs in a call: \S+ \w?s on each device", warned[0])
    else:
        assert not warned


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SITUATIONS if n not in LONG])
def test_a_random_plan_of_it_runs_as_written(name: str) -> None:
    found, _ = validated(name, mesh_of(4, 2), RandomPlans(1))
    check(name, found)


# A shard_map names the axes of its mesh, so these keep to one of two.
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SITUATIONS if n not in LONG])
def test_it_runs_on_a_mesh_of_another_shape(name: str) -> None:
    check(name, validated(name, mesh_of(4, 1, 2) if "shard_map" not in name else mesh_of(4, 2))[0])


@pytest.mark.parametrize("name", ["pure_callback_of_two", "effects_in_order", "custom_partitioned"])
def test_callers_with_explicit_axes_get_results_on_their_mesh(name: str) -> None:
    plain = mesh_of(4, 2)
    mesh = Mesh(plain.devices, plain.axis_names, axis_types=(AxisType.Explicit,) * 2)
    found, _ = validated(name, mesh)
    check(name, found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOpWarning)
        results = autoshard(ROWS[name].fn, mesh)(*ROWS[name].values())
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(results)} == {mesh}


def test_results_stay_in_the_memory_that_the_function_puts_them_in() -> None:
    program = SITUATIONS["kept_by_the_host"]
    made = autoshard(program.fn, mesh_of(4, 2))(*program.values())
    assert [leaf.sharding.memory_kind for leaf in made] == ["device", "pinned_host"]


class TestEffects:
    def test_each_runs_once_a_call_and_in_order_where_asked(self) -> None:
        step = autoshard(SITUATIONS["effects_in_order"].fn, mesh_of(4, 2))
        arguments = SITUATIONS["effects_in_order"].values()
        HEARD.clear()
        for _ in range(2):
            jax.block_until_ready(step(*arguments))
        jax.effects_barrier()
        assert [int(n) for n in HEARD] == [0, 1, 2, 3] * 2

    def test_without_order_each_runs_once_a_call_too(self) -> None:
        program = SITUATIONS["effects_in_any_order"]
        arguments = program.values()
        HEARD.clear()
        result = autoshard(program.fn, mesh_of(4, 2))(*arguments)
        jax.effects_barrier()
        assert len(HEARD) == 4
        assert min(abs(float(s) - float(result.sum())) for s in HEARD) < 1e-3

    def test_prints_appear(self, capfd: pytest.CaptureFixture[str]) -> None:
        def loud(x: Any) -> Any:
            jax.debug.print("the sum is {}", x.sum())
            return x * 2

        autoshard(loud, mesh_of(4, 2))(jnp.ones((8, 4)))
        jax.effects_barrier()
        assert capfd.readouterr().out == "the sum is 32.0\n"

    def test_what_jax_cannot_order_on_several_devices_is_refused_with_a_way_out(self) -> None:
        def loud(x: Any) -> Any:
            jax.debug.print("{}", x.sum(), ordered=True)
            return x * 2

        with pytest.raises(InputError, match=r"in order(.|\n)*ordered=False"):
            autoshard(loud, mesh_of(4, 2))(jnp.ones((8, 4)))

    def test_an_effect_alone_makes_a_program(self) -> None:
        def tell(x: Any) -> None:
            io_callback(HEARD.append, None, x.sum(), ordered=True)

        HEARD.clear()
        autoshard(tell, mesh_of(4, 2))(jnp.ones((8, 4)))
        jax.effects_barrier()
        assert [float(s) for s in HEARD] == [32.0]


class TestRecomputation:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_it_is_still_there_and_saves_what_it_saves_unsharded(self, policy: str) -> None:
        program = SITUATIONS[f"remat_{policy}"]
        unsharded = read_compiled(jax.jit(program.fn).lower(*program.values()).compile())
        step = autoshard(program.fn, mesh_of(1))
        found = read_compiled(step.compile(*program.values()).compiled)
        assert found.flops == unsharded.flops
        assert found.temp_bytes is not None
        assert unsharded.temp_bytes is not None
        assert found.temp_bytes <= unsharded.temp_bytes

    def test_keeping_nothing_computes_more_than_keeping_everything(self) -> None:
        flops = {}
        for policy in ("nothing", "everything"):
            program = SITUATIONS[f"remat_{policy}"]
            step = autoshard(program.fn, mesh_of(4, 2))
            plan = step.plan(*program.values())
            found = read_compiled(step.compile(*program.values()).compiled)
            assert plan.predicted.flops == found.flops
            assert "optimization_barrier" in step.lower(*program.values()).as_text()
            flops[policy] = found.flops
        assert flops["nothing"] > flops["everything"]

    def test_without_a_loop_it_is_priced_where_the_compiler_keeps_it(self) -> None:
        program = SITUATIONS["remat_without_a_loop"]
        flops = {
            chip: autoshard(program.fn, mesh_of(1), cost_model=chip)
            .plan(*program.values())
            .predicted.flops
            for chip in ("cpu", "v5e")
        }
        plain = read_compiled(jax.jit(program.fn).lower(*program.values()).compile())
        assert flops["cpu"] == plain.flops
        assert (flops["v5e"] > flops["cpu"]) == ("cpu" in FINDS_TWINS)


class TestShardMap:
    def test_its_products_and_collectives_are_in_the_plan_with_their_lines(self) -> None:
        program = SITUATIONS["shard_map_of_all_collectives"]
        plan = autoshard(program.fn, mesh_of(4, 2)).plan(*program.values())
        written = [c for c in plan.collectives if "written in the shard_map" in c.why]
        assert {c.kind for c in written} == {
            *("all_gather", "permute", "reduce_scatter", "all_to_all", "all_reduce")
        }
        assert {c.axes for c in written} == {("a",), ("b",), ("a", "b")}
        assert all(re.fullmatch(r"calls\.py:\d+", c.source) for c in written)
        assert all(c.seconds > 0 for c in written)
        assert plan.predicted.flops == 2 * 4 * 32 * 32
        told = plan.table()["communication_s"].sum()
        ended = sum(c.seconds * c.trips for c in plan.collectives if c.op > plan.ops[-1].index)
        assert told == pytest.approx(plan.predicted.communication_s - ended)

    def test_it_is_respected_as_given(self) -> None:
        program = SITUATIONS["shard_map_between"]
        step = autoshard(program.fn, mesh_of(4, 2))
        plan = step.plan(*program.values())
        (op,) = (op for op in plan.ops if op.name == "sdy.manual_computation")
        assert op.operands == ((("a",), ("b",)), (("b",), ()))
        assert op.results == ((("a",), ()),)

    def test_its_memory_is_counted(self) -> None:
        def heavy(x: Any) -> Any:
            def body(x: Any) -> Any:
                rows = lax.all_gather(x, "a", tiled=True)
                return lax.psum_scatter(jnp.tanh(rows), "a", tiled=True)

            mapped = jax.shard_map(body, in_specs=P("a"), out_specs=P("a"), check_vma=False)
            return mapped(x)

        x = np.ones((64, 256), np.float32)
        step = autoshard(heavy, mesh_of(4, 2))
        predicted = step.plan(x).predicted.peak_bytes
        compiled = read_compiled(step.compile(x).compiled).peak_bytes
        assert compiled is not None
        assert predicted == pytest.approx(compiled, rel=0.1)

    def test_a_plan_for_another_body_is_refused(self) -> None:
        def mapped(factor: float) -> Any:
            def body(x: Any) -> Any:
                return lax.psum(x, "a") if factor > 1 else lax.pmax(x, "a")

            return lambda x: jax.shard_map(body, in_specs=P("a"), out_specs=P())(x)

        x = np.ones((8, 4), np.float32)
        plan = autoshard(mapped(2.0), mesh_of(4, 2)).plan(x)
        with pytest.raises(ValueError, match=r"another program|not the program"):
            autoshard(mapped(0.5), mesh_of(4, 2), plan=plan).plan(x)


def test_doubles_are_split_like_all_others() -> None:
    """In a process of its own: the switch is for a whole process."""
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
import numpy as np
from autoshard import autoshard
mesh = jax.make_mesh((4, 2), ("a", "b"))
rng = np.random.default_rng(0)
x, w = rng.normal(size=(16, 32)), rng.normal(size=(32, 64))
def step(x, w):
    n = jax.numpy.arange(16) + 2**40
    return jax.numpy.tanh(x @ w).sum(0), n * 3, (x + 1j) @ w
found = autoshard(step, mesh).validate(x, w, repeats=1)
assert found.max_relative_error < 1e-14, found
assert found.predicted.flops == found.compiled.flops, found
assert found.unnamed_collectives == (), found
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)
