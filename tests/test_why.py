"""Every collective has a reason, a line of the program, and an honest way to be rid of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard.experiments.workloads as workloads
from autoshard import Plan, autoshard
from autoshard.cost_models.compiled import read_compiled
from autoshard.errors import UnknownNameError, UnknownOpWarning
from autoshard.experiments.workloads import make
from autoshard.interpret import interpret
from autoshard.plan_parts import PlannedCollective
from autoshard.plan_text import collective_text
from autoshard.problem import evaluate
from autoshard.replan import Replanner
from autoshard.validate import match_collectives
from autoshard.why import why
from tests.lowering import mesh_of
from tests.test_planner import plan_of
from tests.training import BATCH, PARAMS, planned, train_step

REDUCTIONS = ("all_reduce", "reduce_scatter")


@pytest.fixture(scope="module")
def llama() -> Plan:
    workload = make("llama", "tiny")
    step = autoshard(workload.fn, mesh_of(4, 2), donate_argnums=workload.donate_argnums)
    return step.plan(*workload.args)


@pytest.fixture(scope="module")
def opened(llama: Plan) -> Replanner:
    return Replanner.of(llama)


def test_every_collective_of_llama_has_a_line_and_a_clash(opened: Replanner) -> None:
    files = {path.name for path in Path(workloads.__file__).parent.glob("*.py")}
    assert len(opened.plan.collectives) > 10
    for number in range(len(opened.plan.collectives)):
        told = why(opened, number, remedy=False)
        file, _, line = told.source.partition(":")
        assert file in files
        assert line.isdecimal()
        assert told.clashes
        for clash in told.clashes:
            assert clash.has != clash.wants
            assert clash.because
        assert told.remedy is None
        assert told.unavoidable == ""
        assert json.dumps(told.to_json())
        assert told.source in str(told)


def test_shares_of_all_collectives_add_up_to_the_communication(opened: Replanner) -> None:
    p = opened.plan.predicted
    reasons = [why(opened, c, remedy=False) for c in opened.plan.collectives]
    assert sum(r.seconds for r in reasons) == pytest.approx(p.communication_s)
    assert sum(r.share for r in reasons) == pytest.approx(p.communication_s / p.step_s)
    assert sum(r.sent_bytes for r in reasons) == pytest.approx(p.collective_bytes)


def every_plan(opened: Replanner) -> Iterator[tuple[int, Plan]]:
    """All plans there are, with their costs."""
    problem = opened.priced.problem
    for choices in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        found = evaluate(problem, choices)
        if found.feasible:
            plan, _ = interpret(
                opened.graph, opened.priced, opened.plan.mesh, opened.means.cost_model, choices
            )
            yield found.cost, plan


def product(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("pins", "kind"),
    [
        ({"pins": {0: ((), ("a",)), 1: (("a",), ())}}, "all_reduce"),
        ({"pins": {0: (("a",), ()), 1: (("a",), ())}}, "reshard"),
        ({"pins": {0: (("a",), ()), 1: ((), ())}, "result_pins": {0: ((), ("a",))}}, "reshard"),
    ],
)
def test_the_way_to_be_rid_of_it_is_the_best_of_all_plans_without_it(pins: Any, kind: str) -> None:
    x, w = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32)
    plan = plan_of(product, x, w, **pins)
    opened = Replanner.of(plan)
    assert plan.collectives
    everything = list(every_plan(opened))
    assert min(cost for cost, _ in everything) == round(plan.solver.objective_s * 1e12)
    for c in plan.collectives:
        same = (c.value, c.op, c.kind in REDUCTIONS)
        lacking = [
            (cost, other)
            for cost, other in everything
            if same not in {(d.value, d.op, d.kind in REDUCTIONS) for d in other.collectives}
        ]
        told = why(opened, c)
        if not lacking:
            assert told.remedy is None
            assert "cannot be avoided" in told.unavoidable
            continue
        assert told.remedy is not None
        least = min(cost for cost, _ in lacking)
        steps = [other.predicted.step_s for cost, other in lacking if cost == least]
        assert told.remedy.step_s in [pytest.approx(s) for s in steps]
        assert same not in {(d.value, d.op, d.kind in REDUCTIONS) for d in told.remedy.instead}
        assert told.remedy.step_delta_s == pytest.approx(told.remedy.step_s - plan.predicted.step_s)


def test_what_pins_force_cannot_be_avoided() -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)

    def given_back(x: Any) -> Any:
        return x, jnp.tanh(x)

    plan = plan_of(given_back, x, pins={0: (("a",), ())}, result_pins={0: ((), ("b",))})
    number = next(i for i, c in enumerate(plan.collectives) if "for the result" in c.why)
    told = plan.why(number)
    assert told.remedy is None
    assert told.unavoidable.startswith("cannot be avoided")
    assert "cannot be avoided" in str(told)
    assert told.clashes[0].because == "the caller pinned it"


def test_what_a_shard_map_sends_is_the_programs_own() -> None:
    mesh = mesh_of(4, 2)

    def summed(x: Any) -> Any:
        inner: Any = jax.shard_map(
            lambda x: jax.lax.psum(jnp.sin(x), "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
        )
        return jnp.tanh(inner(x))

    plan = autoshard(summed, mesh, cost_model="v5e").plan(jax.ShapeDtypeStruct((8, 64), "float32"))
    number = next(i for i, c in enumerate(plan.collectives) if "written" in c.why)
    told = plan.why(number)
    assert told.clashes == ()
    assert "asks for it itself" in told.unavoidable
    assert told.source.startswith("test_why.py:")


def test_what_a_callback_sends_is_told() -> None:
    def call(x: Any) -> Any:
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.warns(UnknownOpWarning):
        plan = autoshard(call, mesh_of(4, 2), cost_model="v5e").plan(
            jax.ShapeDtypeStruct((512, 512), "float32")
        )
    for c in plan.collectives:
        told = plan.why(c)
        assert told.clashes
        assert "no other way to run the op" in told.unavoidable


def test_without_a_reduction_the_plan_has_none_there() -> None:
    plan = planned()
    number, found = next(
        (i, c) for i, c in enumerate(plan.collectives) if c.kind == "all_reduce" and c.nbytes > 100
    )
    told = plan.why(number)
    assert told.planned == (found,)
    assert told.remedy is not None
    assert told.remedy.step_delta_s > 0
    assert told.remedy.status == "proved optimal"
    assert all(change.before != change.after for change in told.remedy.changes)


def test_a_collective_is_found_by_number_text_and_part_of_it() -> None:
    plan = planned()
    opened = Replanner.of(plan)
    _, absent = match_collectives(plan.collectives, ())
    for number, c in enumerate(plan.collectives):
        for name in (number, str(number), c, collective_text(c), collective_text(c).strip()):
            assert why(opened, name, remedy=False).planned == (c,)
        head = f"  [{number}] "
        (printed,) = [line for line in str(plan).splitlines() if line.startswith(head)]
        text = printed.removeprefix(head)
        assert why(opened, text, remedy=False).planned == (c,)
    for description in absent:  # as a validation prints what is missing
        (told,) = why(opened, description, remedy=False).planned
        assert told.why in description


def test_what_is_no_collective_is_refused_with_a_way_out() -> None:
    plan = planned()
    opened = Replanner.of(plan)
    for name in (-1, len(plan.collectives), "999", "all-reduce.99", "nothing"):
        with pytest.raises(UnknownNameError):
            why(opened, name, remedy=False)
    with pytest.raises(UnknownNameError, match="are called 'all_reduce'") as told:
        why(opened, "all_reduce", remedy=False)
    assert "give its number" in told.value.fix
    text = jax.jit(jnp.tanh).lower(1.0).compile().as_text()
    with pytest.raises(UnknownNameError, match="compiled program has no collective"):
        why(opened, "all-reduce.99", program=text, remedy=False)


def test_a_collective_of_the_compiled_program_is_traced_to_the_plan() -> None:
    step = autoshard(train_step, mesh_of(4, 2), donate_argnums=0)
    plan = step.plan(PARAMS, BATCH)
    executable = step.compile(PARAMS, BATCH)
    program = read_compiled(executable.compiled)
    opened = Replanner.of(plan)
    traced: list[PlannedCollective] = []
    for collective in program.collectives:
        told = why(opened, collective.name, program=program, remedy=False)
        assert told == why(opened, collective, program=executable, remedy=False)
        assert told.planned
        assert sum(c.nbytes for c in told.planned) == pytest.approx(collective.nbytes)
        assert told.source.startswith("training.py:")
        assert collective.name in str(told)
        traced += told.planned
    assert sorted(map(str, traced)) == sorted(map(str, plan.collectives))


def test_a_collective_that_the_plan_does_not_ask_for_is_called_the_compilers() -> None:
    jitted = jax.jit(
        lambda x: x * 2,
        in_shardings=jax.NamedSharding(mesh_of(4, 2), P("a")),
        out_shardings=jax.NamedSharding(mesh_of(4, 2), P()),
    )
    program = read_compiled(jitted.lower(jax.ShapeDtypeStruct((8, 24), jnp.float32)).compile())
    (gather,) = program.collectives
    told = planned().why(gather.name, program=program)
    assert told.planned == ()
    assert "the compiler made it by itself" in told.unavoidable
    ((description,), _) = match_collectives((), program.collectives)
    assert planned().why(description, program=program) == told
