"""Each seeded fault is found, by its rule and in its place; a clean plan is let alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import Plan, autoshard
from autoshard.errors import UnknownOpWarning
from autoshard.finding import Finding
from tests.lowering import mesh_of
from tests.training import BATCH, PARAMS, planned, train_step

S = jax.ShapeDtypeStruct


def found(plan: Plan, rule: str) -> list[Finding]:
    return [f for f in plan.lint() if f.rule == rule]


def clean() -> Plan:
    # Both axes split the batch, both matrices are kept whole by wish.
    def forward(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params = {"up": S((64, 64), jnp.float32), "down": S((64, 64), jnp.float32)}
    return autoshard(forward, mesh_of(4, 2), cost_model="v5e").plan(
        params, S((65536, 64), jnp.float32)
    )


def test_there_is_nothing_to_say_about_a_clean_plan() -> None:
    plan = clean()
    told = plan.lint()
    assert list(told) == []
    assert len(told) == 0
    assert str(told) == "nothing to say about this plan"


def test_a_pin_that_hurts_is_measured() -> None:
    pin = {"batch['x']": P("b")}
    free, plan = planned(), planned(in_shardings=pin)
    (told,) = found(plan, "harmful-pin")
    assert told.severity == "warning"
    assert told.place == "batch['x']"
    assert told.seconds == pytest.approx(plan.predicted.step_s - free.predicted.step_s)
    assert "hurts" in str(told)


def test_a_pin_that_does_nothing_is_named() -> None:
    free = planned()
    spec = P(*(axes or None for axes in free.arguments[1].sharding))
    (told,) = found(planned(in_shardings={"params['up']": spec}), "idle-pin")
    assert told.severity == "note"
    assert told.place == "params['up']"
    assert not found(free, "idle-pin")


def test_a_pinned_result_is_judged_too() -> None:
    def forward(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    args = S((4096, 64), jnp.float32), S((64, 4096), jnp.float32)
    mesh = mesh_of(4, 2)
    plan = autoshard(forward, mesh, cost_model="v5e", out_shardings=P()).plan(*args)
    (told,) = found(plan, "harmful-pin")
    assert told.place == "result"


def constrained(spec: P) -> Plan:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jax.nn.relu(batch["x"] @ params["up"])
            hidden = lax.with_sharding_constraint(hidden, spec)
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return planned(step)


def test_a_constraint_that_hurts_is_measured_with_its_gradients_one() -> None:
    free, plan = planned(), constrained(P())
    (told,) = found(plan, "harmful-constraint")
    line = next(op.source for op in plan.ops if op.name == "sdy.sharding_constraint")
    assert told.place == line
    assert len([op for op in plan.ops if op.source == line and "constraint" in op.name]) == 2
    # Without the constraints the program is the plain one.
    assert told.seconds == pytest.approx(plan.predicted.step_s - free.predicted.step_s)


def test_a_constraint_that_does_nothing_is_named() -> None:
    dot = next(op for op in planned().ops if op.name == "stablehlo.dot_general")
    spec = P(*(axes or None for axes in dot.results[0]))
    told = found(constrained(spec), "idle-constraint")
    assert [t.severity for t in told] == ["note"]


def test_a_large_tensor_held_whole_is_priced() -> None:
    # A collective costs a microsecond at least, so the table is better held whole.
    def look_up(table: Any, ids: Any) -> Any:
        return table[ids] * 2

    plan = autoshard(look_up, mesh_of(4, 2), cost_model="v5e").plan(
        S((4096, 64), jnp.float32), S((8,), jnp.int32)
    )
    told = [f for f in found(plan, "replicated") if f.place == "table"]
    if not any(plan.arguments[0].sharding):
        assert told
        assert told[0].nbytes == 4096 * 64 * 4
        alternative = plan.explain("table").next_best
        assert alternative is not None
        assert told[0].seconds == alternative.step_delta_s
    plan = autoshard(look_up, mesh_of(4, 2), cost_model="v5e", in_shardings={"table": P()}).plan(
        S((4096, 64), jnp.float32), S((8,), jnp.int32)
    )
    assert not [f for f in found(plan, "replicated") if f.place == "table"]  # asked for


def test_what_no_axis_divides_is_told_with_its_way_out() -> None:
    def scaled(table: Any) -> Any:
        return table * 2

    plan = autoshard(scaled, mesh_of(4, 2), cost_model="v5e").plan(S((4097, 63), jnp.float32))
    (told,) = [f for f in found(plan, "replicated") if f.place == "table"]
    assert told.severity == "warning"
    assert "no axis of the mesh" in told.problem
    assert "pad" in told.fix


def test_a_number_is_nothing_to_split() -> None:
    def scaled(table: Any, by: Any) -> Any:
        return table * by

    args = S((4096, 64), jnp.float32), S((), jnp.float32)
    plan = autoshard(scaled, mesh_of(4, 2), cost_model="v5e").plan(*args)
    told = plan.lint(large_bytes=1).findings
    assert "by" not in [finding.place for finding in told]


def test_an_idle_axis_is_named() -> None:
    plan = autoshard(jnp.tanh, mesh_of(4, 2), cost_model="v5e", in_shardings=P("a")).plan(
        S((4, 1), jnp.float32)
    )
    (told,) = found(plan, "idle-axis")
    assert "b=2" in told.problem
    assert "a=4" not in told.problem


def test_donation_in_vain_and_donation_missed_are_told() -> None:
    def shrink(x: Any) -> Any:
        return x.sum(axis=0)

    plan = autoshard(shrink, mesh_of(4, 2), donate_argnums=0, cost_model="v5e").plan(
        S((64, 64), jnp.float32)
    )
    (told,) = found(plan, "donated-in-vain")
    assert told.place == "x"
    kept = autoshard(train_step, mesh_of(4, 2)).plan(PARAMS, BATCH)
    given = planned()
    (missed,) = found(kept, "not-donated")
    assert missed.place == "params"
    assert missed.nbytes == kept.predicted.peak_bytes - given.predicted.peak_bytes
    assert not found(given, "not-donated")


def test_a_tiny_collective_in_a_loop_is_told_with_the_way_to_be_rid_of_it() -> None:
    def round_(c: Any, _: Any) -> Any:
        c = lax.with_sharding_constraint(jnp.tanh(c), P("a"))
        return lax.with_sharding_constraint(c, P()), None

    def loop(x: Any) -> Any:
        return lax.scan(round_, x, None, length=10)[0]

    def once(x: Any) -> Any:
        return round_(x, None)[0]

    x = S((64, 8), jnp.float32)
    plan = autoshard(loop, mesh_of(4, 2), cost_model="cpu").plan(x)
    told = found(plan, "tiny-collective")
    assert told
    for finding in told:
        number = int(finding.place.split(",")[0].removeprefix("collective "))
        c = plan.collectives[number]
        assert c.trips == 10
        assert finding.seconds == c.seconds * c.trips
        assert f"plan.why({number})" in finding.fix
    plan = autoshard(once, mesh_of(4, 2), cost_model="cpu").plan(x)
    assert plan.collectives
    assert not found(plan, "tiny-collective")


def test_an_op_without_a_rule_that_takes_time_is_told() -> None:
    def call(x: Any) -> Any:
        return jax.pure_callback(lambda x: x, S(x.shape, x.dtype), x)

    with pytest.warns(UnknownOpWarning):
        plan = autoshard(call, mesh_of(4, 2), cost_model="v5e").plan(S((512, 512), jnp.float32))
    (told,) = found(plan, "no-rule")
    assert told.severity == "warning"
    assert told.place.startswith("custom_call #")
    assert "register_rule" in told.fix


def test_loops_of_unknown_length_and_open_gaps_are_told(tmp_path: Path) -> None:
    def until(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    plan = autoshard(until, mesh_of(4, 2), cost_model="v5e").plan(S((64, 64), jnp.float32))
    (told,) = found(plan, "uncounted-loop")
    assert told.place.startswith("test_lint.py:")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").lint() == plan.lint()
    assert json.dumps(plan.lint().to_json())


def test_hints_beyond_the_largest_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr("autoshard.lint_hints.SOLVES", 1)
    plan = planned(in_shardings={"batch['x']": P(), "batch['y']": P()})
    (told,) = found(plan, "hints")
    assert told.place == "1 further hints"
