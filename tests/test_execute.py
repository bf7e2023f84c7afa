"""The flat program and its executable, with shardings given by hand instead of by a planner."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from autoshard.errors import InputError
from autoshard.execute import Executable, Placement
from autoshard.program import main_block, normalize, walk
from autoshard.shardings import Sharding, replicated
from autoshard.signature import Convention, Signature, call_key, split
from autoshard.tracing import Traced, lower_for_planning, lower_with, module_of, named, trace

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
EXPLICIT = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)


def traced_of(
    fn: Callable[..., Any], *args: Any, mesh: Mesh = MESH, options: Any = None, **kwargs: Any
) -> Traced:
    convention = Convention.of(fn, **(options or {}))
    call = split(convention, args, kwargs)
    call_key(convention, call)
    return trace(fn, Signature.of(convention, call), mesh)


def split_first(shape: tuple[int, ...], rank: int) -> Sharding:
    """Split the first dimension over ``data`` where that works."""
    if shape and shape[0] and shape[0] % 4 == 0:
        return (("data",), *replicated(rank - 1))
    return replicated(rank)


def compiled_of(traced: Traced) -> Executable:
    arguments = [split_first(a.shape, a.module_rank) for a in traced.signature.arguments]
    results = [split_first(r.shape, r.module_rank) for r in traced.results]
    lowered = lower_with(traced, arguments, results)
    shardings = named(traced.signature.arguments, arguments, traced.mesh)
    return Executable(lowered.compile(), traced, shardings)


def operations(lowered: jax.stages.Lowered) -> list[str]:
    module = module_of(lowered)
    normalize(module)
    return [op.name for *_, op in walk(main_block(module))]


def train(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
    def loss(w: Any) -> Any:
        return jnp.mean(jax.nn.relu(x @ w) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, value


def state() -> dict[str, Any]:
    return {"w": jnp.ones((8, 4)), "n": jnp.int32(0)}


class TestTracing:
    def test_the_function_is_traced_once_for_all_its_lowerings(self) -> None:
        runs = []

        def fn(x: Any) -> Any:
            runs.append(1)
            return x * 2

        traced = traced_of(fn, jnp.ones(8))
        lower_for_planning(traced)
        lower_with(traced, [(("data",),)], [(("data",),)])
        assert len(runs) == 1

    def test_both_lowerings_hold_the_same_ops_in_the_same_order(self) -> None:
        traced = traced_of(train, state(), jnp.ones((16, 8)))
        arguments = [split_first(a.shape, len(a.shape)) for a in traced.signature.arguments]
        results = [split_first(r.shape, len(r.shape)) for r in traced.results]
        assert operations(lower_for_planning(traced)) == operations(
            lower_with(traced, arguments, results)
        )

    def test_each_lowering_is_a_module_of_its_own(self) -> None:
        traced = traced_of(lambda x: x * 2, jnp.ones(8))
        first = module_of(lower_for_planning(traced))
        with first.context:
            first.operation.attributes["edited"] = ir.UnitAttr.get()
        assert "edited" not in lower_for_planning(traced).as_text()

    def test_unused_arguments_stay_arguments_of_the_module(self) -> None:
        traced = traced_of(lambda x, unused: x + 1, jnp.ones(8), jnp.ones(3))
        block = main_block(module_of(lower_for_planning(traced)))
        assert len(block.arguments) == 2

    def test_results_are_named(self) -> None:
        traced = traced_of(train, state(), jnp.ones((16, 8)))
        assert [r.name for r in traced.results] == ["result[0]['n']", "result[0]['w']", "result[1]"]

    def test_branching_on_a_value_names_the_line(self) -> None:
        def fn(x: Any) -> Any:
            if x.sum() > 0:
                return x
            return -x

        with pytest.raises(InputError, match=r"test_execute\.py:\d+: if x\.sum\(\) > 0:"):
            traced_of(fn, jnp.ones(8))

    @pytest.mark.parametrize("fn", [lambda x: x[x > 0], np.asarray, lambda x: range(x[0])])
    def test_other_needs_of_a_value_are_told_as_well(self, fn: Callable[..., Any]) -> None:
        with pytest.raises(InputError, match="cannot be traced"):
            traced_of(fn, jnp.ones(8, jnp.int32))

    def test_a_bare_partition_spec_in_the_function_means_the_mesh(self) -> None:
        def fn(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x * 2, P("model"))

        text = lower_for_planning(traced_of(fn, jnp.ones(8), mesh=EXPLICIT)).as_text()
        assert '{"model"}' in text


class TestRunning:
    @pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
    def test_results_are_right_and_live_on_the_callers_mesh(self, mesh: Mesh) -> None:
        executable = compiled_of(traced_of(train, state(), jnp.ones((16, 8)), mesh=mesh))
        result = executable(state(), jnp.ones((16, 8)))
        expected = train(state(), jnp.ones((16, 8)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(result)} == {mesh}

    def test_the_order_of_devices_is_the_callers(self) -> None:
        mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
        executable = compiled_of(traced_of(lambda x: x * 2, jnp.arange(8.0), mesh=mesh))
        result = executable(jnp.arange(8.0))
        np.testing.assert_array_equal(result, 2 * np.arange(8.0))
        first = next(s for s in result.addressable_shards if s.index == (slice(0, 2),))
        assert first.device in jax.devices()[-2:]

    @pytest.mark.parametrize(
        "given",
        [
            np.arange(8.0),
            np.arange(8.0, dtype=np.float32),
            jnp.arange(8.0),
            jax.device_put(jnp.arange(8.0), jax.devices()[3]),
        ],
        ids=["float64", "numpy", "uncommitted", "elsewhere"],
    )
    def test_arguments_are_moved_where_they_are_needed(self, given: Any) -> None:
        executable = compiled_of(traced_of(lambda x: x * 2, jnp.ones(8)))
        np.testing.assert_array_equal(executable(given), 2 * np.arange(8.0))

    def test_weakly_typed_arguments_are_not_mixed_up_with_strong_ones(self) -> None:
        executable = compiled_of(traced_of(lambda x, s: x * s, jnp.ones(8, jnp.bfloat16), 0.5))
        assert executable(jnp.ones(8, jnp.bfloat16), 2.0).dtype == jnp.bfloat16
        with pytest.raises(InputError, match="differ from those"):
            executable(jnp.ones(8, jnp.bfloat16), jnp.float32(2))

    @pytest.mark.parametrize("args", [(), ({"w": 1.0},), (1.0, 2.0)])
    def test_another_structure_is_refused(self, args: Any) -> None:
        executable = compiled_of(traced_of(lambda x: x * 2, 1.0))
        with pytest.raises(InputError, match="differ from those"):
            executable(*args)

    def test_typed_keys_go_in_and_out(self) -> None:
        def fn(keys: Any) -> Any:
            return jax.vmap(jax.random.split)(keys), jax.random.normal(keys[0], (4,))

        keys = jax.random.split(jax.random.key(0), 4)
        result, expected = compiled_of(traced_of(fn, keys))(keys), fn(keys)
        assert result[0].dtype == expected[0].dtype
        np.testing.assert_array_equal(
            jax.random.key_data(result[0]), jax.random.key_data(expected[0])
        )

    def test_what_is_no_array_comes_back_as_it_was(self) -> None:
        model = eqx.nn.MLP(8, 8, 8, 1, activation=jnp.tanh, key=jax.random.key(0))

        def fn(model: Any, x: Any) -> Any:
            return model, {"name": "out", "y": model(x), "none": None}

        back, out = compiled_of(traced_of(fn, model, jnp.ones(8)))(model, jnp.ones(8))
        assert back.activation is model.activation
        assert (out["name"], out["none"]) == ("out", None)
        np.testing.assert_allclose(out["y"], model(jnp.ones(8)), rtol=1e-5)

    def test_a_program_without_arrays_runs(self) -> None:
        executable = compiled_of(traced_of(lambda: {"x": jnp.arange(4)}))
        np.testing.assert_array_equal(executable()["x"], np.arange(4))


class TestDonation:
    def test_the_state_takes_the_place_of_the_old_one_without_a_warning(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            traced = traced_of(train, state(), jnp.ones((16, 8)), options={"donate_argnums": 0})
            executable = compiled_of(traced)
            memory = executable.memory_analysis()
            assert memory.alias_size_in_bytes == 8 * 4 * 4 // 4 + 4
            old = executable(state(), jnp.ones((16, 8)))[0]
            executable(old, jnp.ones((16, 8)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))

    def test_numpy_arguments_keep_their_values(self) -> None:
        traced = traced_of(lambda x: x + 1, np.zeros(8), options={"donate_argnums": 0})
        given = np.zeros(8, np.float32)
        compiled_of(traced)(given)
        np.testing.assert_array_equal(given, 0)


class TestPlacement:
    traced = staticmethod(
        lambda mesh: traced_of(
            lambda k, s, x, *, y: (s, x + y),
            3,
            {"a": jnp.ones(8), "f": jnp.tanh, "n": None},
            jnp.ones(2),
            y=jnp.ones(2),
            mesh=mesh,
            options={"static_argnums": 0},
        )
    )

    def placement(self, mesh: Mesh = MESH) -> Placement:
        traced = self.traced(mesh)
        return Placement.of(
            traced,
            [split_first(a.shape, len(a.shape)) for a in traced.signature.arguments],
            [split_first(r.shape, len(r.shape)) for r in traced.results],
        )

    def test_the_trees_are_the_callers(self) -> None:
        placement = self.placement()
        assert jax.tree.map(lambda s: s.spec, placement.in_shardings) == (
            {"a": P("data"), "f": None, "n": None},
            P(),
        )
        assert jax.tree.map(lambda s: s.spec, placement.out_shardings) == (
            {"a": P("data"), "f": None, "n": None},
            P(),
        )

    def test_place_moves_the_leading_arguments(self) -> None:
        placement = self.placement(EXPLICIT)
        number, given = placement.place(3, {"a": np.ones(8), "f": jnp.tanh, "n": None})
        assert (number, given["f"], given["n"]) == (3, jnp.tanh, None)
        assert given["a"].sharding.mesh == EXPLICIT
        assert given["a"].sharding.spec == P("data")

    def test_place_refuses_another_structure(self) -> None:
        with pytest.raises(InputError, match="another structure"):
            self.placement().place(3, [np.ones(8)])

    def test_jit_takes_the_shardings(self) -> None:
        traced = traced_of(train, state(), jnp.ones((16, 8)))
        placement = Placement.of(
            traced,
            [split_first(a.shape, len(a.shape)) for a in traced.signature.arguments],
            [split_first(r.shape, len(r.shape)) for r in traced.results],
        )
        jitted = jax.jit(
            train, in_shardings=placement.in_shardings, out_shardings=placement.out_shardings
        )
        new, _ = jitted(state(), jnp.ones((16, 8)))
        assert new["w"].sharding.spec == P("data")
