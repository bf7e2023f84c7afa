"""A plan does not differ from itself; what differs between two is told, with its price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import Plan, autoshard
from autoshard.errors import InputError
from tests.lowering import mesh_of
from tests.training import BATCH, PARAMS, planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return planned(in_shardings={"batch['x']": P("b")})


def test_a_plan_does_not_differ_from_itself(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    for other in (plan, planned(), Plan.load(tmp_path / "plan.json")):
        same = plan.diff(other)
        assert not same
        assert (same.changes, same.gained, same.lost) == ((), (), ())
        assert str(same) == "the plans are the same"
        assert same.same_program


def test_a_difference_names_what_is_sharded_otherwise(plan: Plan, pinned: Plan) -> None:
    told = plan.diff(pinned)
    assert told
    changed = {c.name: c for c in told.changes}
    x = changed["batch['x']"]
    assert (x.before, x.after) == (plan.arguments[2].sharding, (("b",), ()))
    assert (x.bytes_before, x.bytes_after) == (plan.arguments[2].nbytes, 1024 * 256 * 4 // 2)
    for c in told.changes:
        assert c.before != c.after
    figures = {f.name: f for f in told.predicted}
    delta = pinned.predicted.step_s - plan.predicted.step_s
    assert figures["step_s"].delta == delta > 0
    assert "batch['x']" in str(told)
    assert json.dumps(told.to_json())


def test_collectives_gained_and_lost_balance_the_plans(plan: Plan, pinned: Plan) -> None:
    told = plan.diff(pinned)
    assert told.gained
    assert set(told.gained) <= set(pinned.collectives)
    assert set(told.lost) <= set(plan.collectives)
    count = len(plan.collectives) + len(told.gained) - len(told.lost)
    assert count == len(pinned.collectives)
    sent = sum(c.seconds * c.trips for c in told.gained)
    sent -= sum(c.seconds * c.trips for c in told.lost)
    more = pinned.predicted.communication_s - plan.predicted.communication_s
    assert sent == pytest.approx(more)


def test_the_other_way_round_it_is_mirrored(plan: Plan, pinned: Plan) -> None:
    there, back = plan.diff(pinned), pinned.diff(plan)
    assert there.gained == back.lost
    assert there.lost == back.gained
    assert {(c.name, c.before, c.after) for c in there.changes} == {
        (c.name, c.after, c.before) for c in back.changes
    }


def test_plans_of_other_meshes_and_programs_are_compared_by_name(plan: Plan) -> None:
    def other(params: Any, batch: Any) -> Any:
        return jnp.sum((batch["x"] @ params["up"]) ** 2)

    smaller = planned(sizes=(2, 2), cost_model="v5e")
    told = plan.diff(smaller)
    assert told.same_program
    assert told.meshes == ("a=4,b=2", "a=2,b=2")
    assert "cost model: cpu -> v5e" in str(told)
    second = autoshard(other, mesh_of(4, 2)).plan(PARAMS, BATCH)
    told = plan.diff(second)
    assert not told.same_program
    gone = {c.name for c in told.changes if c.kind == "result" and c.after is None}
    assert gone == {"result[0]['up']", "result[0]['down']", "result[1]"}
    assert {c.name for c in told.changes if c.kind == "result" and c.before is None} == {"result"}
    assert "different programs" in str(told)


def test_ops_are_matched_by_line_when_programs_differ() -> None:
    def shifted(extra: bool) -> Any:
        def f(x: Any, w: Any) -> Any:
            y = jnp.sin(x) if extra else x
            return jnp.tanh(y @ w)

        return f

    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    plans = [
        autoshard(shifted(extra), mesh_of(4, 2), cost_model="v5e", in_shardings=P()).plan(*args)
        for extra in (False, True)
    ]
    told = plans[0].diff(plans[1])
    assert not told.same_program
    ops = [c for c in told.changes if c.kind == "op"]  # the others may be sharded otherwise now
    assert [c.name for c in ops if c.before is None] == ["sine #0"]
    assert all(c.after is not None for c in ops)


def test_a_plan_is_compared_with_plans_alone(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"Plan\.load"):
        plan.diff("plan.json")  # type: ignore[arg-type]
