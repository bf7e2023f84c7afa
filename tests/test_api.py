"""The whole call, as a user makes it."""

from __future__ import annotations

import functools
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import (
    InfeasibleError,
    InputError,
    Plan,
    PlanMismatchError,
    Sharded,
    UnknownNameError,
    autoshard,
)

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))

State = dict[str, Any]


def train(state: State, x: Any, lr: Any = 0.1) -> tuple[State, Any]:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["p"])
    params = jax.tree.map(lambda p, g: p - lr * g, state["p"], grads)
    return {"p": params, "n": state["n"] + 1}, value


def state() -> State:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(16, 32)), rng.normal(size=(32, 8))
    return {
        "p": {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)},
        "n": jnp.int32(0),
    }


def batch() -> Any:
    return jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32)


def assert_same(result: Any, expected: Any) -> None:
    assert str(jax.tree.structure(result)) == str(jax.tree.structure(expected))
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


PINS = {"state['p']['a']": P(None, "model"), "[0]['p']['b']": P("model"), "x": P("data")}


@pytest.fixture(scope="module")
def step() -> Sharded:
    """A train step with pins, so that something is split whatever the planner thinks of it."""
    sharded: Sharded = autoshard(train, MESH, donate_argnums=0, in_shardings=PINS)
    return sharded


class TestCall:
    def test_a_training_loop_gives_the_numbers_of_the_plain_function(self, step: Sharded) -> None:
        ours, theirs = state(), state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                ours, loss = step(ours, batch())
                theirs, expected = train(theirs, batch())
        assert_same((ours, loss), (theirs, expected))

    def test_donated_arrays_are_gone_and_their_place_is_reused(self, step: Sharded) -> None:
        old, _ = step(state(), batch())
        step(old, batch())
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))

    def test_pins_are_kept_on_the_way_in_and_out(self, step: Sharded) -> None:
        plan = step.plan(state(), batch())
        specs = jax.tree.map(lambda s: s.spec, plan.in_shardings)
        assert specs == ({"p": {"a": P(None, "model"), "b": P("model")}, "n": P()}, P("data"))
        new, _ = step(state(), batch())
        assert new["p"]["a"].sharding.spec == P(None, "model")

    def test_arguments_that_are_placed_already_are_not_moved(self, step: Sharded) -> None:
        plan = step.plan(state(), batch())
        placed = plan.place(state())
        assert placed["p"]["a"].sharding.spec == P(None, "model")
        assert plan.place(placed)["p"]["a"] is placed["p"]["a"]

    def test_keywords_mean_what_they_mean_without_autoshard(self) -> None:
        sharded = autoshard(train, MESH)
        assert_same(sharded(state(), lr=0.5, x=batch()), train(state(), batch(), lr=0.5))

    def test_static_arguments_are_part_of_the_program(self) -> None:
        def fn(x: Any, *, power: int) -> Any:
            return x**power if power > 2 else x

        sharded = autoshard(fn, MESH, static_argnames="power")
        for power in (1, 3, 1, 3):
            assert_same(sharded(batch(), power=power), fn(batch(), power=power))
        assert len(sharded.plans) == 2

    def test_a_python_number_stays_weak_and_an_array_does_not(self) -> None:
        sharded = autoshard(lambda x, s: x * s, MESH)
        x = jnp.ones(8, jnp.bfloat16)
        for number in (2.0, jnp.float32(2), 3.0, jnp.bfloat16(2), 2):
            assert_same(sharded(x, number), jax.jit(lambda x, s: x * s)(x, number))

    def test_other_shapes_are_planned_again_and_old_plans_kept(self) -> None:
        sharded = autoshard(lambda x: x * 2, MESH)
        for size in (8, 16, 8, 4, 16):
            assert_same(sharded(jnp.ones(size)), 2 * jnp.ones(size))
        assert len(sharded.plans) == 3

    def test_a_jax_setting_that_changes_the_program_plans_again(self) -> None:
        sharded = autoshard(lambda x: x + jnp.arange(3.0).sum(), MESH)
        x = jnp.ones(4, jnp.float32)
        assert sharded(x).dtype == jnp.float32
        with jax.enable_x64(True):
            assert sharded(x).dtype == jax.jit(lambda x: x + jnp.arange(3.0).sum())(x).dtype
        assert len(sharded.plans) == 2

    def test_fresh_numpy_batches_run_without_planning_again(self, step: Sharded) -> None:
        before = len(step.plans)
        new, _ = step(state(), batch())
        new, loss = step(new, np.asarray(batch()))
        again, _ = train(state(), batch())
        assert_same((new, loss), train(again, batch()))
        assert len(step.plans) == max(before, 1)

    def test_an_error_of_the_program_itself_is_raised_once(self) -> None:
        runs = []

        def explode(x: Any) -> Any:
            runs.append(1)
            raise ValueError("from the host")

        def fn(x: Any) -> Any:
            return jax.pure_callback(explode, jax.ShapeDtypeStruct((), np.float32), x.sum())

        # One device: a callback on several would be run by each of them.
        sharded = autoshard(fn, Mesh(DEVICES[:1], ("x",)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="from the host"):
            jax.block_until_ready(sharded(jnp.ones(4)))
        assert len(runs) == 1

    def test_shapes_alone_can_be_planned_but_not_run(self, step: Sharded) -> None:
        shapes = jax.eval_shape(lambda: (state(), batch()))
        assert step.plan(*shapes) is step.plan(state(), batch())
        with pytest.raises(InputError, match="ShapeDtypeStruct, which has no values"):
            step(*shapes)

    def test_two_threads_make_one_plan(self) -> None:
        sharded = autoshard(train, MESH)
        outcomes: list[Any] = []

        def work() -> None:
            outcomes.append(sharded(state(), batch()))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sharded.plans) == 1
        assert len(outcomes) == 4
        assert_same(outcomes[0], train(state(), batch()))


class TestMesh:
    @pytest.mark.parametrize(
        "mesh",
        [
            Mesh(DEVICES, ("x",)),
            Mesh(DEVICES[::-1].reshape(2, 2, 2), ("a", "b", "c")),
            Mesh(DEVICES.reshape(2, 1, 4, 1), ("a", "b", "c", "d")),
            Mesh(DEVICES[2:4], ("x",)),
            Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2),
        ],
        ids=["1", "3-reversed", "4", "part", "explicit"],
    )
    def test_results_live_on_the_callers_mesh(self, mesh: Mesh) -> None:
        sharded = autoshard(train, mesh)
        result = sharded(state(), batch())
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(result)} == {mesh}
        assert_same(result, train(state(), batch()))
        assert_same(sharded(*result[:1], batch()), train(train(state(), batch())[0], batch()))


class TestStages:
    def test_a_lowered_program_can_be_read_and_compiled(self, step: Sharded) -> None:
        lowered = step.lower(state(), batch())
        assert '{"model"}' in lowered.as_text()
        assert_same(lowered.compile()(state(), batch()), train(state(), batch()))

    def test_what_is_compiled_is_what_a_call_runs(self, step: Sharded) -> None:
        executable = step.compile(state(), batch())
        assert step.compile(state(), batch()) is executable
        assert "num_partitions=8" in executable.as_text()
        assert step.cost_analysis(state(), batch())["flops"] > 0

    def test_it_looks_like_the_function_it_wraps(self, step: Sharded) -> None:
        assert (step.__name__, step.__wrapped__) == ("train", train)  # type: ignore[attr-defined]
        assert repr(step) == "<train sharded over data=4,model=2>"

    def test_it_is_a_decorator(self) -> None:
        @autoshard(mesh=MESH)
        def double(x: Any) -> Any:
            return x * 2

        @functools.partial(autoshard, mesh=MESH, static_argnums=0)
        def times(k: int, x: Any) -> Any:
            return x * k

        assert_same(double(jnp.ones(8)), 2 * jnp.ones(8))
        assert_same(times(3, jnp.ones(8)), 3 * jnp.ones(8))

    def test_it_works_as_a_method(self) -> None:
        class Model:
            @functools.partial(autoshard, mesh=MESH, static_argnums=0)
            def double(self, x: Any) -> Any:
                return x * 2

        assert_same(Model().double(jnp.ones(8)), 2 * jnp.ones(8))


class TestGivenPlan:
    def test_a_saved_plan_runs_without_a_search(self, step: Sharded, tmp_path: Path) -> None:
        made = step.plan(state(), batch())
        made.save(tmp_path / "plan.json")
        again = autoshard(train, MESH, donate_argnums=0, plan=Plan.load(tmp_path / "plan.json"))
        assert_same(again(state(), batch()), train(state(), batch()))
        assert again.plan(state(), batch()).in_shardings == made.in_shardings

    @pytest.mark.parametrize("what", ["program", "shape", "mesh"])
    def test_a_plan_for_something_else_is_refused(self, step: Sharded, what: str) -> None:
        plan = step.plan(state(), batch())
        mesh = Mesh(DEVICES.reshape(2, 4), MESH.axis_names) if what == "mesh" else MESH
        rows = 4 if what == "shape" else 8

        def other(state: State, x: Any) -> Any:
            new, loss = train(state, x)
            return (new, loss * 2) if what == "program" else (new, loss)

        with pytest.raises(PlanMismatchError, match=r"the plan (has|is for the mesh)"):
            autoshard(other, mesh, donate_argnums=0, plan=plan)(state(), batch()[:rows])


class TestOddPrograms:
    """What few functions do, and what must work all the same."""

    def test_axes_of_size_one_may_be_named_anywhere(self) -> None:
        mesh = Mesh(DEVICES.reshape(8, 1), ("data", "one"))
        spec = P("data", "one")

        def fn(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec)) + 1

        x = np.ones((16, 16), np.float32)
        sharded = autoshard(fn, mesh, in_shardings={"x": spec}, out_shardings=spec)
        np.testing.assert_array_equal(sharded(x), fn(x))
        again = autoshard(
            fn, mesh, in_shardings={"x": spec}, out_shardings=spec, plan=sharded.plan(x)
        )
        assert again.plan(x) == sharded.plan(x)

    def test_printing_a_constant_text_is_an_op_without_operands(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fn(x: Any) -> Any:
            jax.debug.print("here")
            return x + 1

        np.testing.assert_array_equal(autoshard(fn, MESH)(np.ones(8)), np.full(8, 2.0))
        jax.effects_barrier()
        assert "here" in capsys.readouterr().out

    def test_functions_called_in_a_shard_map_stay(self) -> None:
        def local(x: Any) -> Any:
            return jnp.where(x > 0, jax.nn.relu(x), 0)

        def fn(x: Any) -> Any:
            spec = P("data")
            return jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec)(x) * 2

        x = np.ones((8, 8), np.float32)
        np.testing.assert_array_equal(autoshard(fn, MESH)(x), 2 * x)


class TestErrors:
    """Every message names the place and the way out."""

    @pytest.mark.parametrize(
        ("build", "error", "message"),
        [
            (lambda: autoshard(train), InputError, r"(?s)no mesh.*jax\.make_mesh"),
            (lambda: autoshard(train, cast(Any, "cpu")), InputError, "mesh is a str"),
            (lambda: autoshard(cast(Any, MESH)), InputError, "(?s)no mesh|function is missing"),
            (lambda: autoshard(cast(Any, 3), MESH), InputError, "a int is no function"),
            (
                lambda: autoshard(train, Mesh(DEVICES.reshape(1, 2, 1, 2, 2), tuple("abcde"))),
                InputError,
                "5 axes; 1 to 4",
            ),
            (
                lambda: autoshard(train, MESH, donate_argnames="stat"),
                InputError,
                "(?s)'stat'.*state",
            ),
            (
                lambda: autoshard(train, MESH, in_shardings={"[0]['q']": P()}).plan(
                    state(), batch()
                ),
                UnknownNameError,
                r"(?s)\['q'\].*did you mean",
            ),
            (
                lambda: autoshard(train, MESH, out_shardings={"[1]": P("data")}).plan(
                    state(), batch()
                ),
                InputError,
                r"result\[1\] has 0 dimensions",
            ),
            (
                lambda: autoshard(train, MESH, cost_model="v9").plan(state(), batch()),
                UnknownNameError,
                "no cost model is called 'v9'",
            ),
            (
                lambda: autoshard(train, MESH, memory_limit=cast(Any, "8GB")).plan(
                    state(), batch()
                ),
                InputError,
                "a memory limit of '8GB' is no number of bytes",
            ),
            (
                lambda: autoshard(train, MESH, cost_model=cast(Any, 3)).plan(state(), batch()),
                InputError,
                "cost_model is a int",
            ),
            (
                lambda: autoshard(lambda x: x if x > 0 else -x, MESH)(1.0),
                InputError,
                r"(?s)cannot be traced.*test_api\.py:\d+",
            ),
            (
                lambda: autoshard(lambda x: x, MESH)({"a": [{}, bytearray(b"x")]}),
                InputError,
                r"x\['a'\]\[1\] holds a bytearray, which is not a valid JAX type",
            ),
        ],
    )
    def test_a_call_that_cannot_work_says_why(
        self, build: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message) as caught:
            build()
        assert "  fix: " in str(caught.value)

    def test_nothing_is_cached_of_a_plan_that_failed(self) -> None:
        sharded = autoshard(train, MESH, memory_limit=64)
        for _ in range(2):
            with pytest.raises(ValueError, match="memory limit of 64 bytes"):
                sharded(state(), batch())
        assert sharded.plans == ()


def test_typed_keys_pass_through_as_arguments_and_results() -> None:
    def fn(keys: Any, x: Any) -> Any:
        more = jax.random.split(keys[0], 3)
        return more, x + jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)

    keys, x = jax.random.split(jax.random.key(0), 8), jnp.ones((8, 4))
    (made, values), (expected, right) = autoshard(fn, MESH)(keys, x), fn(keys, x)
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(jax.random.key_data(made), jax.random.key_data(expected))
    np.testing.assert_allclose(values, right, rtol=1e-6)


def test_state_that_was_donated_before_is_refused_by_name() -> None:
    step = autoshard(lambda a: a + 1, MESH, donate_argnums=0, in_shardings={"a": P("data")})
    placed = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data")))
    step(placed)
    with pytest.raises(InputError, match="a was donated to an earlier call"):
        step(placed)


def test_one_array_cannot_be_donated_twice() -> None:
    step = autoshard(lambda a, b: (a + 1, b + 2), MESH, donate_argnums=(0, 1))
    x = jnp.ones((8, 4))
    with pytest.raises(InputError, match="b and a are one array"):
        step(x, x)


def test_an_object_that_is_no_pytree_is_refused_rather_than_frozen() -> None:
    class Holder:
        w = jnp.ones((4, 4))

    with pytest.raises(InputError, match="holder holds a Holder"):
        autoshard(lambda holder, x: x @ holder.w, MESH)(Holder(), jnp.ones((8, 4)))


@pytest.mark.parametrize("limit", [True, -1, 0, "8GB", float("inf"), float("nan")])
def test_a_memory_limit_that_is_no_number_of_bytes_is_refused(limit: Any) -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        autoshard(lambda x: x * 2, MESH, memory_limit=limit).plan(jnp.ones(8))


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "5"])
def test_a_time_limit_that_is_no_time_is_refused(limit: Any) -> None:
    with pytest.raises(InputError, match="is no positive number of seconds"):
        autoshard(lambda x: x * 2, MESH, time_limit_s=limit).plan(jnp.ones(8))


@pytest.mark.parametrize("rows", [63, 6, 3, 1, 0])
def test_a_constraint_that_splits_unevenly_is_no_error(rows: int) -> None:
    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("data")))

    x = np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4)
    np.testing.assert_array_equal(autoshard(fn, MESH)(x), 2 * x)


def test_a_program_without_arrays_runs() -> None:
    assert autoshard(lambda: {}, MESH)() == {}


def test_a_given_plan_is_held_to_the_memory_limit() -> None:
    fn, x = (lambda x: x * 2), jnp.ones((8, 8))
    plan = autoshard(fn, MESH).plan(x)
    with pytest.raises(InfeasibleError, match="the memory limit is 1"):
        autoshard(fn, MESH, plan=plan, memory_limit=1).plan(x)
    with pytest.raises(InputError, match="not a Plan"):
        autoshard(fn, MESH, plan=cast(Any, "plan.json")).plan(x)
