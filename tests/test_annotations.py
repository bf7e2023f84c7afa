"""The text that a plan gives out is a program: it runs, and it means the plan's shardings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
from flax.linen.spmd import logical_to_mesh
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import Plan, autoshard
from autoshard.errors import InputError
from tests.lowering import mesh_of
from tests.training import BATCH, PARAMS, planned, train_step

MESH = mesh_of(4, 2)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def specs(tree: Any) -> list[Any]:
    return [s.spec for s in jax.tree.leaves(tree)]


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def test_plain_jit_takes_the_specs_as_they_are() -> None:
    plan = planned()
    names = run(plan.to_partition_specs())
    assert leaves(names["in_specs"]) == specs(plan.in_shardings)
    assert leaves(names["out_specs"]) == specs(plan.out_shardings)
    values = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (PARAMS, BATCH))
    with jax.set_mesh(MESH):
        jitted = jax.jit(
            train_step, in_shardings=names["in_specs"], out_shardings=names["out_specs"]
        )
        state, loss = jitted(*values)
    expected, _ = train_step(*values)
    np.testing.assert_allclose(state["up"], expected["up"], rtol=1e-5)
    wanted = NamedSharding(MESH, plan.out_shardings[0]["up"].spec)
    assert state["up"].sharding.is_equivalent_to(wanted, 2)
    assert loss.shape == ()


class Pair(NamedTuple):
    left: Any
    right: Any


def nested(pair: Any, rest: Any, *, scale: Any) -> Any:
    return [pair.left @ pair.right, (rest[0]["x"] * scale,)], None


def test_trees_of_every_builtin_kind_are_written_down() -> None:
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    sharded = autoshard(nested, MESH, cost_model="cpu")
    plan = sharded.plan(Pair(x, x), [{"x": x, "none": None}], scale=x)
    names = run(plan.to_partition_specs())
    assert structure(names["in_specs"]) == structure(plan.in_shardings)
    assert leaves(names["in_specs"]) == specs(plan.in_shardings)
    assert structure(names["out_specs"]) == structure(plan.out_shardings)
    assert isinstance(names["in_specs"][0], Pair)
    assert set(names["keyword_specs"]) == {"scale"}


def state_of(model: Any, x: Any) -> Any:
    def make(key: Any, x: Any) -> Any:
        params = nn.meta.unbox(model.init(key, x))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    return jax.eval_shape(make, jax.random.key(0), x)


class Model(nn.Module):
    axes: Any = None

    def names(self, path: str, default: Any) -> Any:
        return nn.with_logical_partitioning(default, self.axes[path]) if self.axes else default

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.initializers.lecun_normal()
        zeros = nn.initializers.zeros_init()
        for name, width in (("up", 512), ("down", 64)):
            x = nn.Dense(
                width,
                name=name,
                kernel_init=self.names(f"{name}/kernel", init),
                bias_init=self.names(f"{name}/bias", zeros),
            )(x)
            x = jnp.tanh(x)
        return x


def flax_step(state: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


@pytest.fixture(scope="module")
def flax_plan() -> Plan:
    x = jax.ShapeDtypeStruct((256, 64), np.float32)
    pins = {"state.params['up']['kernel']": PartitionSpec(None, ("a", "b")),
            "state.params['down']['kernel']": PartitionSpec("a", "b")}  # fmt: skip
    sharded = autoshard(flax_step, MESH, donate_argnums=0, in_shardings=pins)
    return sharded.plan(state_of(Model(), x), x)


@pytest.mark.parametrize("loaded", [False, True])
def test_containers_of_the_callers_own_get_their_specs_by_name(
    flax_plan: Plan, loaded: bool, tmp_path: Path
) -> None:
    plan = flax_plan
    if loaded:
        plan.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
    x = jax.ShapeDtypeStruct((256, 64), np.float32)
    state = state_of(Model(), x)
    names = run(plan.to_partition_specs())
    made = (names["specs_of"]("state", state), names["specs_of"]("x", x))
    assert leaves(made) == specs(flax_plan.in_shardings)
    out = names["specs_of"]("result", jax.eval_shape(flax_step, state, x))
    assert leaves(out) == specs(flax_plan.out_shardings)


def test_flax_gets_the_specs_of_the_plan_from_names_and_rules(flax_plan: Plan) -> None:
    names = run(flax_plan.to_flax_rules())
    assert names["LOGICAL_AXES"]["up/kernel"] == (None, "a_b_512")
    assert names["LOGICAL_AXES"]["down/kernel"] == ("a_512", "b_64")
    assert ("a_b_512", ("a", "b")) in names["RULES"]
    wanted = jax.tree.map(lambda s: s.spec, flax_plan.in_shardings[0].params)

    x = jnp.ones((256, 64))
    boxed = jax.eval_shape(Model(names["LOGICAL_AXES"]).init, jax.random.key(0), x)
    specs_of_init = logical_to_mesh(nn.get_partition_spec(boxed), names["RULES"])["params"]
    plain = jax.eval_shape(Model().init, jax.random.key(0), x)["params"]
    again = nn.get_partition_spec(names["partitioned"](plain))
    specs_of_boxes = logical_to_mesh(again, names["RULES"])
    for found in (specs_of_init, specs_of_boxes):
        pairs = zip(leaves(found), leaves(wanted), strict=True)
        for ours, theirs in pairs:
            same = (NamedSharding(MESH, spec) for spec in (ours, theirs))
            assert next(same).is_equivalent_to(next(same), 2)


def test_parameters_are_found_where_they_are_called_so() -> None:
    plan = planned()
    assert "'up': (" in plan.to_flax_rules()
    assert run(plan.to_flax_rules("batch"))["LOGICAL_AXES"].keys() == {"x", "y"}
    with pytest.raises(InputError, match="no argument is called 'weights'"):
        plan.to_flax_rules("weights")
