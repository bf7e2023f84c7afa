"""The price of a pin is that of planning afresh with it; names mean what a plan prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import Plan, autoshard
from autoshard.errors import InputError, UnknownNameError
from autoshard.shardings import to_partition_spec
from tests.lowering import mesh_of
from tests.training import planned

f32 = jnp.float32


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.mark.parametrize("name", ["params['up']", "batch['x']"])
def test_the_price_of_a_pin_is_that_of_planning_afresh_with_it(plan: Plan, name: str) -> None:
    told = plan.explain(name, alternatives=100)
    assert told.left_out == 0
    # All ways to place two axes on two dimensions, less the present one.
    assert len(told.alternatives) == 9 - 1
    for alternative in told.alternatives:
        fresh = planned(in_shardings={name: to_partition_spec(alternative.sharding)})
        assert alternative.step_s == pytest.approx(fresh.predicted.step_s, rel=1e-9)
        assert alternative.step_delta_s == pytest.approx(
            fresh.predicted.step_s - plan.predicted.step_s, abs=1e-12
        )
        assert alternative.peak_bytes == fresh.predicted.peak_bytes
        assert alternative.status == fresh.solver.status == "proved optimal"


def test_the_price_of_a_pinned_result_is_that_of_planning_afresh_with_it(plan: Plan) -> None:
    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    args = jax.ShapeDtypeStruct((64, 128), f32), jax.ShapeDtypeStruct((512, 64), f32)
    sharded = autoshard(forward, mesh_of(4, 2), cost_model="v5e")
    told = sharded.plan(*args).explain("result", alternatives=100)
    assert len(told.alternatives) == 9 - 1
    for alternative in told.alternatives:
        pin = to_partition_spec(alternative.sharding)
        pinned = autoshard(forward, mesh_of(4, 2), cost_model="v5e", out_shardings=pin)
        fresh = pinned.plan(*args)
        assert alternative.step_s == pytest.approx(fresh.predicted.step_s, rel=1e-9)


def test_few_alternatives_still_name_the_next_best(plan: Plan) -> None:
    every = plan.explain("params['down']", alternatives=100)
    few = plan.explain("params['down']", alternatives=3)
    assert len(few.alternatives) == 3
    assert few.left_out == len(every.alternatives) - 3
    assert few.next_best == every.next_best == every.alternatives[0]
    assert ((), ()) in {a.sharding for a in (*few.alternatives,)} | {few.sharding}


def test_a_loaded_plan_explains_as_the_living_one(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.explain("params['up']", alternatives=2) == plan.explain(
        "params['up']", alternatives=2
    )


def test_what_a_pinned_argument_would_be_without_its_pin_is_told() -> None:
    free = planned()
    pinned = planned(in_shardings={"params['up']": P("a")})
    told = pinned.explain("params['up']", alternatives=100)
    assert told.sharding == (("a",), ())
    assert "pin" in {t.kind for t in told.ties}
    back = next(a for a in told.alternatives if a.sharding == free.arguments[1].sharding)
    assert back.step_s == free.predicted.step_s
    assert told.next_best == back


def test_parts_of_the_cost_are_those_of_the_plan(plan: Plan) -> None:
    told = plan.explain("dot_general #0")
    (dot,) = [op for op in plan.ops if op.index == 0]
    assert [c.seconds for c in told.costs if c.what.endswith("makes it")] == [dot.seconds]
    moved = [c for c in told.costs if c.kind in ("reshard", "reduction")]
    reductions = [c for c in plan.collectives if c.kind == "all_reduce"]
    assert {c.nbytes for c in moved if c.kind == "reduction"} <= {c.nbytes for c in reductions}
    assert told.nbytes == 1024 * 512 * 4 / plan.mesh.size(a for d in told.sharding for a in d)
    assert told.source.startswith("training.py:")
    assert json.dumps(told.to_json())
    assert "dot_general #0" in str(told)
    assert "(the plan)" in str(told)


def test_ties_are_told(plan: Plan) -> None:
    donated = plan.explain("params['up']", alternatives=0)
    assert [t.what for t in donated.ties if t.kind == "donation"] == [
        "result[0]['up'] replaces the donated params['up']: both have one sharding"
    ]
    same = plan.explain("result[0]['up']", alternatives=0)
    assert same.sharding == donated.sharding

    def loop(w: Any, x: Any) -> Any:
        x = jax.lax.optimization_barrier(x)
        y = jax.lax.with_sharding_constraint(x @ w[0], P("a"))
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), y, w)[0]

    args = jax.ShapeDtypeStruct((3, 16, 16), f32), jax.ShapeDtypeStruct((12, 16), f32)
    other = autoshard(loop, mesh_of(4, 2), cost_model="v5e").plan(*args)
    weights = other.explain("w", alternatives=0)
    assert [t.kind for t in weights.ties] == ["loop", "uneven", "uneven"]
    assert "carries it unchanged" in weights.ties[0].what
    assert "alias" in {t.kind for t in other.explain("x", alternatives=0).ties}
    (constraint,) = [op for op in other.ops if op.name == "sdy.sharding_constraint"]
    fixed = other.explain(f"#{constraint.index}")
    assert "prescribed" in {t.kind for t in fixed.ties}
    assert fixed.alternatives == ()
    assert "it can have no other sharding" in str(fixed)


def test_chosen_pins_are_priced(plan: Plan) -> None:
    told = plan.explain("batch['x']", pins=[P("a"), P(("a", "b")), P(("b", "a"))])
    assert "next best" not in str(told)  # a cheaper one may not have been asked for
    assert "cheapest of these" in str(told)
    assert {a.sharding for a in told.alternatives} == {
        (("a",), ()),
        (("a", "b"), ()),
        (("b", "a"), ()),
    }
    for alternative in told.alternatives:
        fresh = planned(in_shardings={"batch['x']": to_partition_spec(alternative.sharding)})
        assert alternative.step_s == pytest.approx(fresh.predicted.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("pin", "complaint"),
    [
        (P("c"), "names an axis that the mesh lacks"),
        (P("a", "a"), "does not fit"),
        (P(None, None, "a"), "does not fit"),
    ],
)
def test_a_pin_that_does_not_fit_is_explained(plan: Plan, pin: P, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        plan.explain("params['up']", pins=[pin])


def test_an_uneven_pin_is_refused() -> None:
    arg = jax.ShapeDtypeStruct((6, 9), f32)
    plan = autoshard(jnp.tanh, mesh_of(4, 2), cost_model="v5e").plan(arg)
    with pytest.raises(InputError, match="evenly"):
        plan.explain(plan.arguments[0].name, pins=[P("a")])


def test_a_name_may_be_shortened_if_one_thing_ends_so(plan: Plan) -> None:
    assert plan.explain("['x']", alternatives=0).name == "batch['x']"
    with pytest.raises(UnknownNameError, match="could be 2 things"):
        plan.explain("['up']", alternatives=0)
    with pytest.raises(UnknownNameError) as told:
        plan.explain("params['upp']")
    assert "did you mean params['up']" in told.value.fix
    for name in ("#999", "%99999", "nowhere.py:3", ""):
        with pytest.raises(UnknownNameError):
            plan.explain(name)


def test_a_source_line_means_its_dearest_op(plan: Plan) -> None:
    line = next(op.source for op in plan.ops if op.name == "stablehlo.dot_general")
    told = plan.explain(line, alternatives=0)
    assert told.source == line
    assert told.others
    assert told.name.startswith("dot_general")


def test_a_free_value_takes_any_sharding() -> None:
    def fill(x: Any) -> Any:
        return x + jnp.arange(64.0)[:, None]

    plan = autoshard(fill, mesh_of(4, 2), cost_model="v5e").plan(
        jax.ShapeDtypeStruct((64, 64), f32)
    )
    assert plan.explain("x", alternatives=1).alternatives
