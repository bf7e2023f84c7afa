"""Plans survive being saved, and nothing else passes for one."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InputError, PlanMismatchError
from autoshard.experiments.random_plans import RandomPlans
from autoshard.extract import extract
from autoshard.plan import Plan, spec
from tests.lowering import MESH, graph_of, shape_of
from tests.test_planner import plan_of
from tests.zoo import PROGRAMS


@pytest.fixture(scope="module")
def plan() -> Plan:
    program = PROGRAMS["scan_layers_grad"]
    return plan_of(
        program.fn,
        *program.values(),
        ties=[(0, 0), (1, 1)],
        solver=RandomPlans(5),
        memory_limit=10**9,
    )


@pytest.fixture(scope="module")
def data(plan: Plan) -> Any:
    return json.loads(json.dumps(plan.to_json()))


def test_a_saved_plan_is_the_same_when_loaded(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_saving_replaces_a_file_or_leaves_it(plan: Plan, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    plan.save(target)
    assert Plan.load(target) == plan
    with pytest.raises(InputError, match="nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"kind": "autoshard plan"}', "\x00", "null"])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError):
        Plan.load(tmp_path / "plan.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        Plan.load(tmp_path / "none.json")


def test_another_format_is_refused_by_number(data: Any) -> None:
    with pytest.raises(InputError, match="format 3"):
        Plan.from_json({**data, "format": 99})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every part of a JSON value, of long lists the first entries."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 3)):
            yield from places(value[i], (*path, i))


def changed(data: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    result = copy.copy(data)
    result[path[0]] = changed(data[path[0]], path[1:], new)
    return result


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.integers(0, 10**6), new=JSON)
def test_a_damaged_plan_is_refused_or_is_a_plan(data: Any, where: int, new: Any) -> None:
    every = list(places(data))
    damaged = changed(data, every[where % len(every)], new)
    if not isinstance(damaged, dict) or damaged == data:
        return
    with pytest.raises(InputError):
        Plan.from_json(damaged)


@pytest.mark.parametrize("key", ["mesh", "ops", "predicted", "signature"])
def test_a_missing_or_unknown_field_is_named(data: Any, key: str) -> None:
    with pytest.raises(InputError, match=f"missing.*{key}"):
        Plan.from_json({k: v for k, v in data.items() if k != key})
    with pytest.raises(InputError, match=r"unknown.*novelty"):
        Plan.from_json({**data, "novelty": 1})


def test_the_program_it_was_made_for_passes(plan: Plan) -> None:
    program = PROGRAMS["scan_layers_grad"]
    plan.check(graph_of(program.fn, *program.values()).signature(), MESH)


def test_another_program_is_refused_with_the_first_difference(plan: Plan) -> None:
    lines = list(plan.signature)
    lines[4] = "stablehlo.other() -> %4"
    lines[7] = "later"
    with pytest.raises(PlanMismatchError) as caught:
        plan.check(lines, MESH)
    assert "line 4" in str(caught.value)
    assert "stablehlo.other" in str(caught.value)
    assert "later" not in str(caught.value)


def test_a_longer_program_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="lines"):
        plan.check((*plan.signature, "more"), MESH)


def test_another_mesh_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="a=8"):
        plan.check(plan.signature, shape_of(8))


def test_the_table_has_a_row_per_op_and_adds_up(plan: Plan) -> None:
    table = plan.table()
    assert len(table) == len(plan.ops)
    assert table["communication_s"].sum() == pytest.approx(
        plan.predicted.communication_s
        - sum(c.seconds * c.trips for c in plan.collectives if c.op >= len(plan.signature))
        - _for_results(plan)
    )
    assert table["flops"].sum() >= plan.predicted.flops
    assert set(table["op"]) == {op.index for op in plan.ops}


def _for_results(plan: Plan) -> float:
    last = max(op.index for op in plan.ops)
    return sum(c.seconds * c.trips for c in plan.collectives if c.op > last)


def test_the_text_shows_every_argument_and_the_dearest_collective(plan: Plan) -> None:
    text = str(plan)
    for boundary in (*plan.arguments, *plan.results):
        assert boundary.name in text
    dearest = max(plan.collectives, key=lambda c: c.seconds * c.trips)
    assert dearest.why in text


def test_a_plan_without_devices_says_how_to_get_them(plan: Plan) -> None:
    with pytest.raises(InputError, match="not bound"):
        plan.in_shardings  # noqa: B018
    with pytest.raises(InputError, match="not bound"):
        plan.place(np.ones(3))


def test_shardings_are_shown_as_partition_specs() -> None:
    assert spec((("a",), (), ("b", "c"))) == "P('a', None, ('b', 'c'))"


def test_a_plan_holds_the_program_it_was_made_from(plan: Plan, data: Any) -> None:
    for one in (plan, Plan.from_json(data)):
        assert one.origin is not None
        assert one.origin.whole
        module = one.origin.open()
        graph = extract(
            module, plan.mesh, one.origin.arguments, one.origin.results, one.origin.ties
        )
        assert graph.signature() == plan.signature
        assert all(graph.ops[op.index].source == op.source for op in plan.ops)
    assert Plan.from_json(data).origin == plan.origin


def test_values_of_large_constants_are_left_out_of_a_plan(monkeypatch: Any) -> None:
    table = np.arange(512, dtype=np.float32).reshape(128, 4)
    values = jax.ShapeDtypeStruct((8, 128), np.float32)

    def read(x: Any) -> Any:
        return x @ table

    full = plan_of(read, values)
    monkeypatch.setattr("autoshard.origin.MAX_CONSTANT_BYTES", 1000)
    lean = plan_of(read, values)
    assert full.origin is not None
    assert lean.origin is not None
    assert (full.origin.whole, lean.origin.whole) == (True, False)
    assert len(lean.origin.module) < len(full.origin.module)
    for origin in (full.origin, lean.origin):
        graph = extract(origin.open(), MESH, origin.arguments, origin.results, origin.ties)
        assert graph.signature() == full.signature


def test_a_damaged_program_inside_a_plan_is_an_input_error(plan: Plan) -> None:
    assert plan.origin is not None
    for module in ("", "!", plan.origin.module[:-8], "eJwDAAAAAAE="):
        with pytest.raises(InputError, match="cannot be read"):
            dataclasses.replace(plan.origin, module=module).open()
