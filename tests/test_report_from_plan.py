from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from autoshard import Plan, autoshard
from autoshard.report import ReportData, report_data
from autoshard.report.from_plan import brackets


def program(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, w)[0].sum(axis=0)


@functools.cache
def planned() -> tuple[Plan, ReportData]:
    """A plan whose weights have to be gathered, and its report."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    pins = (PartitionSpec(None, "model", "data"), PartitionSpec("data", "model"))
    w = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plan: Plan = autoshard(program, mesh, in_shardings=pins).plan(w, x)
    return plan, report_data(plan, title="t", machine="m", date="d", versions=())


def test_the_report_of_a_plan_lists_its_arguments_as_pinned() -> None:
    _, data = planned()
    assert data.arguments["path"].tolist() == ["w", "x"]
    assert data.arguments["sharding"].map(brackets).tolist() == [
        "[-, model, data]",
        "[data, model]",
    ]
    assert data.arguments["bytes"].tolist() == [3 * 64 * 64 * 4 // 8, 256 * 64 * 4 // 8]


def test_times_and_bytes_of_the_report_add_up_to_the_plans_totals() -> None:
    plan, data = planned()
    assert plan.collectives
    assert data.collectives["bytes"].sum() == pytest.approx(plan.predicted.collective_bytes)
    assert data.collectives["seconds"].sum() == pytest.approx(plan.predicted.communication_s)
    assert data.memory["bytes"].max() == plan.predicted.peak_bytes
    own = data.comparison.iloc[0]
    assert (own["step_s"], own["flops"]) == (plan.predicted.step_s, plan.predicted.flops)


def test_edges_join_ops_of_the_plan_and_carry_its_reshards() -> None:
    plan, data = planned()
    makers = set(data.edges["producer"]) - {-1}
    assert (data.edges["producer"] < data.edges["consumer"]).all()
    products = [op.index for op in plan.ops if op.name == "stablehlo.dot_general"]
    assert products
    assert set(products) <= set(data.edges["consumer"])
    assert makers & {op.index for op in plan.ops}
    resharded = data.edges[data.edges["reshard"] != ""]
    assert len(resharded) >= len([r for r in plan.reshards if r.reader < len(data.memory)]) > 0


def test_the_schedule_of_the_report_is_the_plans() -> None:
    plan, data = planned()
    ends = data.timeline["start_s"] + data.timeline["seconds"]
    told = dict(zip(data.schedule["what"], data.schedule["seconds"], strict=True))
    assert ends.max() == pytest.approx(plan.predicted.step_s - plan.predicted.dispatch_s)
    assert told["schedule of a step"] == plan.predicted.step_s
    parts = told["communication hidden"] + told["communication exposed"]
    assert parts == pytest.approx(told["communication, sum"])
