"""A planned function inside JAX transformations: the numbers, and the shardings at its boundary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import InputError, autoshard

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
EXPLICIT = Mesh(DEVICES.reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
OTHER = Mesh(DEVICES.reshape(2, 4), ("x", "y"))
LINE = Mesh(DEVICES, ("line",))

Fn = Callable[..., Any]


def values(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(values(w, x) ** 2)


PINS = {"w": P(None, "model"), "x": P("data")}


def planned(fn: Fn, mesh: Mesh = MESH) -> Any:
    return autoshard(fn, mesh, in_shardings=PINS)


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w, x = 0.3 * rng.normal(size=(16, 8)), rng.normal(size=(8, 16))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def stacked(x: Any) -> Any:
    return jnp.stack([x, 2 * x, 3 * x, 4 * x])


def assert_close(result: Any, expected: Any) -> None:
    assert str(jax.tree.structure(result)) == str(jax.tree.structure(expected))
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def set_mesh(mesh: Mesh | None) -> Any:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


# Name, function under the transformation, and what to do with it.
WAYS: dict[str, tuple[Fn, Callable[[Fn, Any, Any], Any]]] = {
    "jit": (values, lambda f, w, x: jax.jit(f)(w, x)),
    "grad": (loss, lambda f, w, x: jax.grad(f)(w, x)),
    "value_and_grad": (loss, lambda f, w, x: jax.value_and_grad(f, (0, 1))(w, x)),
    "jit of grad": (loss, lambda f, w, x: jax.jit(jax.grad(f))(w, x)),
    "grad of jit": (loss, lambda f, w, x: jax.grad(jax.jit(f))(w, x)),
    "hessian": (loss, lambda f, w, x: jax.grad(lambda w: jax.grad(f)(w, x).sum())(w)),
    "jacfwd": (values, lambda f, w, x: jax.jacfwd(lambda w: f(w, x).sum(0))(w)),
    "jacrev": (values, lambda f, w, x: jax.jacrev(lambda w: f(w, x).sum(0))(w)),
    "jvp": (values, lambda f, w, x: jax.jvp(f, (w, x), (w, x))),
    "vjp": (loss, lambda f, w, x: jax.vjp(f, w, x)[1](jnp.float32(1))),
    "linearize": (values, lambda f, w, x: jax.linearize(f, w, x)[1](w, x)),
    "vmap": (values, lambda f, w, x: jax.vmap(f, (None, 0))(w, stacked(x))),
    "vmap, last": (values, lambda f, w, x: jax.vmap(f, (None, 2), 1)(w, jnp.stack([x, -x], 2))),
    "vmap of grad": (loss, lambda f, w, x: jax.vmap(jax.grad(f), (None, 0))(w, stacked(x))),
    "spread vmap": (
        values,
        lambda f, w, x: jax.vmap(f, (None, 0), spmd_axis_name="data")(w, stacked(x)),
    ),
    "spread vmap of jit": (
        loss,
        lambda f, w, x: jax.jit(
            jax.vmap(jax.jit(jax.grad(f)), (None, 0), spmd_axis_name=("model", "data"))
        )(w, jnp.stack([x] * 8)),
    ),
    "scan": (values, lambda f, w, x: jax.lax.scan(lambda c, _: (f(w, c), c), x, length=3)),
    "grad of scan": (
        values,
        lambda f, w, x: jax.grad(
            lambda w: jnp.mean(jax.lax.scan(lambda c, _: (f(w, c), c), x, length=2)[0] ** 2)
        )(w),
    ),
    "loop": (values, lambda f, w, x: jax.lax.fori_loop(0, 3, lambda _, c: f(w, c), x)),
    "cond": (values, lambda f, w, x: jax.lax.cond(x[0, 0] > 9, lambda: x, lambda: f(w, x))),
    "map": (loss, lambda f, w, x: jax.lax.map(lambda row: f(w, row), stacked(x))),
    "checkpoint": (loss, lambda f, w, x: jax.grad(jax.checkpoint(f))(w, x)),
    "numpy inside jit": (values, lambda f, w, x: jax.jit(lambda w: f(w, np.asarray(x)))(w)),
    "concrete inside grad": (
        values,
        lambda f, w, x: jax.grad(lambda s: (s * f(w, x)).sum())(jnp.float32(2)),
    ),
}

EAGER = ("hessian", "jvp", "vjp", "vmap of grad")


@pytest.mark.parametrize("where", ["one device", "one device and another mesh"])
@pytest.mark.parametrize("way", EAGER)
def test_arrays_from_elsewhere_are_moved_where_no_program_is_traced(way: str, where: str) -> None:
    fn, use = WAYS[way]
    w, x = arguments()
    expected = use(fn, w, x)
    w, x = jax.device_put((w, x), DEVICES[3])
    if where == "one device and another mesh":
        x = jax.device_put(x, NamedSharding(Mesh(DEVICES[:2], "z"), P("z")))
    assert_close(use(planned(fn), w, x), expected)


def test_a_scalar_from_elsewhere_is_moved_under_grad() -> None:
    def scaled(s: Any, w: Any, x: Any) -> Any:
        return s * loss(w, x)

    s, w, x = jax.device_put((jnp.float32(2), *arguments()), DEVICES[5])
    gradient = jax.grad(autoshard(scaled, MESH))(s, w, x)
    assert_close(gradient, loss(*arguments()))
    assert gradient.sharding.device_set == set(DEVICES)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_the_plain_function(way: str) -> None:
    fn, transform = WAYS[way]
    assert_close(transform(planned(fn), *arguments()), transform(fn, *arguments()))


@pytest.mark.parametrize("way", ["jit", "grad", "hessian", "vmap", "spread vmap of jit", "scan"])
@pytest.mark.parametrize("placed", [False, True], ids=["anywhere", "placed"])
def test_the_same_on_a_mesh_with_explicit_axes(way: str, placed: bool) -> None:
    fn, transform = WAYS[way]
    w, x = arguments()
    expected = transform(fn, w, x)
    sharded = autoshard(fn, EXPLICIT, in_shardings=PINS, out_shardings=P())
    if way == "scan":  # what is carried must keep its type
        sharded = autoshard(fn, EXPLICIT, in_shardings=PINS, out_shardings=P("data"))
    if placed:
        x = jax.device_put(x, NamedSharding(EXPLICIT, P("data")))
        w = jax.device_put(w, NamedSharding(EXPLICIT, P("model")))
    elif way == "scan":
        x = x + 0  # of no mesh: it cannot be carried next to a value of one
    with set_mesh(EXPLICIT if placed or way != "scan" else None):
        assert_close(transform(sharded, w, x), expected)


class TestConstraints:
    """That the shardings are there, and that they hold in what is compiled."""

    def test_jit_takes_and_gives_what_is_planned(self) -> None:
        sharded = planned(values)
        plan = sharded.plan(*arguments())
        compiled = jax.jit(sharded).lower(*arguments()).compile()
        text = str(compiled.as_text())
        assert "num_partitions=8" in text
        assert "f32[2,16]" in text  # x, split by "data"
        assert compiled.output_shardings.is_equivalent_to(plan.out_shardings, 2)

    def test_they_are_in_the_jaxpr_in_order(self) -> None:
        sharded = planned(values)
        plan = sharded.plan(*arguments())
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(sharded)(*arguments()).eqns]
        assert names == ["planned_sharding"] * 2 + ["jit"] + ["planned_sharding"]
        eqns = jax.make_jaxpr(sharded)(*arguments()).eqns
        assert [eqn.params["sharding"] for eqn in eqns if "sharding" in eqn.params] == [
            *plan.in_shardings,
            plan.out_shardings,
        ]

    def test_gradients_are_constrained_like_what_they_are_for(self) -> None:
        jaxpr = jax.make_jaxpr(jax.grad(planned(loss)))(*arguments())
        last = [e for e in jaxpr.eqns if e.primitive.name == "planned_sharding"][-1]
        assert last.params["sharding"].spec == P(None, "model")
        assert last.outvars == jaxpr.jaxpr.outvars

    def test_a_mapped_dimension_is_free_or_takes_the_axes_it_is_spread_over(self) -> None:
        w, x = arguments()
        for spread, expected in ((None, P.UNCONSTRAINED), ("model", ("model",))):
            mapped = jax.vmap(planned(values), (None, 0), spmd_axis_name=spread)
            eqns = jax.make_jaxpr(mapped)(w, stacked(x)).eqns
            specs = [e.params["sharding"].spec for e in eqns if "sharding" in e.params]
            assert specs[:2] == [P(None, "model"), P(expected, "data", None)]

    def test_arrays_come_out_where_planned_without_jit_too(self) -> None:
        tangent = jax.jvp(planned(values), arguments(), arguments())[1]
        assert tangent.sharding.mesh == MESH

    def test_trace_shows_them(self) -> None:
        sharded = planned(values)
        traced = sharded.trace(*arguments())
        assert "planned_sharding" in str(traced.jaxpr)
        assert_close(traced.lower().compile()(*arguments()), values(*arguments()))


class TestPlansInsideATrace:
    def test_a_plan_made_inside_is_the_one_made_outside(self) -> None:
        inside = []

        @jax.jit
        def program(w: Any, x: Any) -> Any:
            inside.append(planned(values).plan(w, x))
            return x

        program(*arguments())
        outside = planned(values).plan(*arguments())
        assert inside[0].fingerprint == outside.fingerprint
        assert inside[0].argument_shardings == outside.argument_shardings

    def test_a_plan_made_inside_serves_calls_outside(self) -> None:
        sharded = planned(values)
        jax.jit(sharded)(*arguments())
        assert len(sharded.plans) == 1
        assert_close(sharded(*arguments()), values(*arguments()))
        assert len(sharded.plans) == 1

    def test_under_vmap_it_is_for_one_row(self) -> None:
        sharded = autoshard(loss, MESH)
        w, x = arguments()
        jax.vmap(sharded, (None, 0))(w, stacked(x))
        assert [a.shape for a in sharded.plans[0].arguments] == [(16, 8), (8, 16)]

    def test_lower_and_compile_work_inside(self) -> None:
        sharded, found = planned(values), []
        jax.eval_shape(lambda w, x: found.append(sharded.compile(w, x)), *arguments())
        assert_close(found[0](*arguments()), values(*arguments()))

    def test_eval_shape_runs_nothing(self) -> None:
        sharded = planned(lambda w, x: {"y": values(w, x), "n": 1.5})
        result = sharded.eval_shape(*arguments())
        assert result["y"].shape == (8, 16)
        assert result["n"].weak_type


class TestPlainFunction:
    """Where constraints mean nothing, the function is plain and its numbers are right."""

    def test_in_the_body_of_a_shard_map(self) -> None:
        sharded, (w, x) = planned(values), arguments()
        for wrap in (jax.jit, lambda f: f):
            body = jax.shard_map(
                wrap(sharded), mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
            )
            assert_close(body(w, x), values(w, x))
        assert not sharded.plans

    def test_in_a_program_laid_out_on_another_mesh(self) -> None:
        sharded, (w, x) = planned(values), arguments()
        with jax.set_mesh(OTHER):
            assert_close(jax.jit(sharded)(w, x), values(w, x))
        x = jax.device_put(x, NamedSharding(OTHER, P("x")))
        assert_close(jax.jit(sharded)(w, x), values(w, x))

    def test_with_arrays_of_the_program_around(self) -> None:
        w, x = arguments()

        def around(w: Any) -> Any:
            return autoshard(lambda x: loss(w, x), MESH)(x)

        assert_close(jax.grad(around)(w), jax.grad(loss)(w, x))
        assert_close(jax.jit(around)(w), loss(w, x))
        with pytest.raises(InputError, match="not among its arguments"):
            jax.jit(lambda w: autoshard(lambda x: x @ w.T, MESH).plan(w))(w)

    def test_with_a_named_axis_of_the_transformation_around(self) -> None:
        sharded = autoshard(lambda x: x - jax.lax.pmean(x, "rows"), MESH)
        _, x = arguments()
        result = jax.vmap(sharded, axis_name="rows")(x)
        assert_close(result, x - x.mean(0))

    def test_with_sizes_that_are_not_known_yet(self) -> None:
        (rows,) = export.symbolic_shape("rows")
        w, x = arguments()
        given = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
        exported = export.export(jax.jit(autoshard(values, MESH)))(w, given)
        assert_close(exported.call(w, x[:3]), values(w, x[:3]))

    def test_step_by_step_without_jit(self) -> None:
        seen = []

        def noticing(w: Any, x: Any) -> Any:
            seen.append(type(x))
            return values(w, x)

        sharded = planned(noticing)
        assert_close(sharded(*arguments()), values(*arguments()))
        with jax.disable_jit():
            assert_close(sharded(*arguments()), values(*arguments()))
            assert not issubclass(seen[-1], jax.core.Tracer)
            assert sharded.plan(*arguments()).predicted.flops > 0
            assert_close(jax.grad(planned(loss))(*arguments()), jax.grad(loss)(*arguments()))


class TestWholePrograms:
    def test_planned_functions_inside_a_planned_function(self) -> None:
        inner = planned(loss)
        outer = autoshard(lambda w, x: (inner(w, x), jax.grad(inner)(w, x)), MESH)
        assert_close(outer(*arguments()), jax.value_and_grad(loss)(*arguments()))

    def test_functions_planned_for_different_meshes_in_one_program(self) -> None:
        one = planned(values)
        two = autoshard(values, LINE, in_shardings={"x": P("line")})
        w, x = arguments()
        program = jax.jit(lambda w, x: (one(w, x), two(w, x)))
        assert_close(program(w, x), (values(w, x), values(w, x)))
        assert one.plans
        assert two.plans

    def test_custom_derivatives_are_used(self) -> None:
        @jax.custom_vjp
        def tripled(w: Any, x: Any) -> Any:
            return values(w, x)

        tripled.defvjp(
            lambda w, x: (values(w, x), (w, x)), lambda saved, g: (3 * saved[0], 0 * saved[1])
        )
        w, x = arguments()
        grads = jax.jit(jax.grad(lambda w, x: planned(tripled)(w, x).sum(), (0, 1)))(w, x)
        assert_close(grads, (3 * w, 0 * x))

    def test_effects_happen_once(self) -> None:
        said: list[float] = []

        def speaking(w: Any, x: Any) -> Any:
            jax.debug.callback(lambda v: said.append(float(v)), x[0, 0])
            return values(w, x)

        jax.jit(planned(speaking))(*arguments()).block_until_ready()
        jax.effects_barrier()
        assert said
        assert set(said) == {float(arguments()[1][0, 0])}

    def test_donation_is_left_to_the_program_around(self) -> None:
        sharded = autoshard(lambda w, x: (w + 1, values(w, x)), MESH, donate_argnums=0)
        w, x = arguments()
        jax.block_until_ready(jax.jit(sharded)(w, x))
        assert not w.is_deleted()

    def test_static_arguments_keywords_numbers_and_keys(self) -> None:
        def fn(w: Any, x: Any, scale: Any = 2.0, *, depth: int, key: Any) -> dict[str, Any]:
            for _ in range(depth):
                x = values(w, x)
            return {"x": scale * x + jax.random.normal(key, x.shape), "key": key, "scale": scale}

        sharded = autoshard(fn, MESH, static_argnames="depth")
        w, x = arguments()
        keys = jax.random.split(jax.random.key(0), 2)

        def program(f: Fn) -> Any:
            return jax.jit(lambda w, x, key: f(w, x, 3.0, depth=2, key=key))(w, x, keys[0])

        result, expected = program(sharded), program(fn)
        assert_close(result["x"], expected["x"])
        assert result["key"] == expected["key"]
        assert result["scale"].weak_type == expected["scale"].weak_type

    def test_a_training_loop_in_one_scan(self) -> None:
        step = planned(loss)

        def train(f: Fn, w: Any, x: Any) -> Any:
            def body(w: Any, _: Any) -> tuple[Any, Any]:
                value, grad = jax.value_and_grad(f)(w, x)
                return w - 0.1 * grad, value

            return jax.lax.scan(body, w, length=5)

        w, x = arguments()
        assert_close(jax.jit(lambda w, x: train(step, w, x))(w, x), train(loss, w, x))


def test_a_lowered_program_tells_its_cost_and_its_module() -> None:
    lowered = planned(values).lower(*arguments())
    assert lowered.cost_analysis()["flops"] > 0
    assert "sdy.sharding_constraint" in str(lowered.compiler_ir())
