from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from autoshard import Plan, autoshard
from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.protocol import MeshAxis, is_asynchronous, links
from autoshard.cost_models.topology import Topology
from autoshard.errors import InputError
from autoshard.experiments.random_plans import RandomPlans
from autoshard.experiments.workloads import make
from autoshard.streams import COMPUTE

P = PartitionSpec


def two_layers(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.tanh(x @ first) @ second


SHAPES = tuple(
    jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 4096), (4096, 4096))
)
GATHERED = (P("x", None), P("x", None), P("x", None))
"""Batch and weights over one axis: the weights of both layers are gathered."""


def planned(topology: str, pins: tuple[PartitionSpec, ...] = GATHERED) -> Plan:
    mesh = Topology(topology).mesh({"x": 16})
    plan: Plan = autoshard(two_layers, mesh, in_shardings=pins, out_shardings=P("x", None)).plan(
        *SHAPES
    )
    assert {c.kind for c in plan.collectives} == {"all_gather"}
    return plan


def test_where_gathers_are_asynchronous_that_of_the_second_layer_hides_behind_the_first() -> None:
    plan = planned("v5e:4x4")
    p = plan.predicted
    first, second = (c.seconds for c in plan.collectives)
    assert p.exposed_s < p.communication_s
    assert p.exposed_s >= min(first, second) * (1 - 1e-9)  # nothing to hide the first one behind
    assert p.step_s == pytest.approx(p.sum_s - p.hidden_s)


@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v6e:4x4", "cpu:16"])
def test_where_gathers_are_synchronous_the_step_is_the_sum(topology: str) -> None:
    p = planned(topology).predicted
    assert p.communication_s > 0
    assert p.step_s == pytest.approx(p.sum_s)
    assert p.hidden_s == pytest.approx(0.0, abs=1e-12)


@functools.cache
def many_plans() -> tuple[Plan, ...]:
    llama, mlp = make("llama", layers=2), make("mlp")
    slice_, node = Topology("v5e:2x2").mesh({"a": 2, "b": 2}), Topology("h100:8").mesh({"a": 8})
    return tuple(
        autoshard(workload.fn, mesh, solver=RandomPlans(seed)).plan(*workload.args)
        for workload, mesh, seed in ((llama, slice_, 0), (mlp, slice_, 1), (mlp, node, 2))
    )


@pytest.mark.slow
def test_a_predicted_step_lies_between_its_bounds_and_the_sum() -> None:
    for plan in many_plans():
        p = plan.predicted
        assert p.communication_s > 0
        assert p.compute_s <= p.step_s <= p.sum_s * (1 + 1e-9)
        assert p.hidden_s + p.exposed_s == pytest.approx(p.communication_s)
    assert any(plan.predicted.hidden_s > 0 for plan in many_plans())


@pytest.mark.slow
def test_everything_that_takes_time_is_in_the_timeline_once() -> None:
    for plan in many_plans():
        leaves = [e for e in plan.timeline if e.kind != "loop"]
        compute_s = math.fsum(e.seconds * e.executions for e in leaves if e.kind == "compute")
        sent_s = math.fsum(e.seconds * e.executions for e in leaves if e.kind != "compute")
        assert compute_s == pytest.approx(plan.predicted.compute_s)
        assert sent_s == pytest.approx(plan.predicted.communication_s)


@pytest.mark.slow
def test_events_of_one_stream_do_not_overlap_but_for_a_loop_and_its_first_round() -> None:
    for plan in many_plans():
        p = plan.predicted
        end = max(e.start_s + e.seconds for e in plan.timeline)
        assert end == pytest.approx(p.compute_s + p.exposed_s)
        for stream in {s for e in plan.timeline for s in e.streams}:
            spans = sorted(
                (e.start_s, e.start_s + e.seconds)
                for e in plan.timeline
                if stream in e.streams and e.kind != "loop"
            )
            pairs = itertools.pairwise(spans)
            assert all(stop <= start * (1 + 1e-9) + 1e-15 for (_, stop), (start, _) in pairs)


def test_a_plan_keeps_its_timeline_when_it_is_saved(tmp_path: Path) -> None:
    plan = planned("v5e:4x4")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").timeline == plan.timeline


def test_a_trace_is_json_of_complete_events_with_the_plans_totals(tmp_path: Path) -> None:
    plan = planned("v5e:4x4")
    plan.write_trace(tmp_path / "trace.json")
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text("utf-8"))
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"X", "M"}
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= e.keys() for e in complete)
    assert rows[0] == COMPUTE
    compute = sum(e["dur"] for e in complete if rows[e["tid"]] == COMPUTE)
    assert compute == pytest.approx(1e6 * plan.predicted.compute_s)
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(1e6 * plan.predicted.step_s)
    told = trace["otherData"]
    assert told["hidden_s"] + told["exposed_s"] == pytest.approx(told["communication_sum_s"])


def test_a_trace_is_not_written_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        planned("v5e:4x4").write_trace(tmp_path / "absent" / "trace.json")


def test_the_text_of_a_plan_says_what_is_hidden_and_what_is_exposed() -> None:
    assert "of it hidden" in str(planned("v5e:4x4"))
    assert "hidden" not in str(planned("v6e:4x4"))


def test_mesh_axes_on_one_physical_axis_share_its_links() -> None:
    topology = Topology("v5e:4x4")
    apart = AnalyticModel("v5e", layout=topology.layouts({"a": 4, "b": 4})[0])
    a, b = (links(apart, (MeshAxis(name, 4),)) for name in ("a", "b"))
    assert not {*a} & {*b}
    folded = AnalyticModel("v5e", layout=topology.layouts({"a": 2, "b": 2, "c": 4})[0])
    used = [links(folded, (MeshAxis(name, 2),)) for name in ("a", "b")]
    assert used[0] == used[1]


def test_a_cost_model_that_does_not_tell_overlaps_nothing() -> None:
    from autoshard.cost_models.calibrated import cpu

    assert not is_asynchronous(cpu(), "permute")
    assert is_asynchronous(AnalyticModel("v5p"), "permute")
    assert not is_asynchronous(AnalyticModel("v5p"), "all_gather")
