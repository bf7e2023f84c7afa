"""A plan that is opened again is the plan that was made, whoever made it and wherever."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.experiments.random_plans import RandomPlans
from autoshard.plan import Plan
from autoshard.problem import evaluate
from autoshard.replan import Replanner
from autoshard.solvers import SOLVERS
from tests.test_planner import plan_of
from tests.training import planned
from tests.zoo import PROGRAMS


@pytest.mark.parametrize(
    "name", ["mlp_step", "scan_layers_grad", "nested_scans", "branches", "experts", "uneven",
             "shared_operands", "embedding_grad"]
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_the_choices_of_any_plan_are_found_again(name: str, seed: int) -> None:
    program = PROGRAMS[name]
    plan = plan_of(program.fn, *program.values(), solver=RandomPlans(seed))
    opened = Replanner.of(plan)  # compares predicted totals, and refuses what differs
    found = evaluate(opened.priced.problem, opened.choices)
    assert found.feasible
    # A hub may have been chosen badly by the random plan; the rest is as it was.
    assert found.cost <= round(plan.solver.objective_s * 1e12)


def test_solving_again_without_other_wishes_gives_the_same_plan(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    for one in (plan, Plan.load(tmp_path / "plan.json")):
        again = Replanner.of(one).again()
        assert again.predicted == plan.predicted
        assert again.argument_shardings == plan.argument_shardings
        assert again.solver.objective_s == plan.solver.objective_s


@pytest.mark.parametrize("limited", [False, True])
def test_a_restricted_plan_costs_what_an_unhinted_one_does(limited: bool) -> None:
    plan = planned()
    if limited:
        plan = planned(memory_limit=int(0.97 * plan.predicted.peak_bytes))
    opened = Replanner.of(plan)
    node = opened.priced.problem.names.index("batch['x']")
    others = np.arange(len(opened.priced.problem.costs[node])) != opened.choices[node]
    ours = opened.again({node: others})
    problem = opened.priced.problem
    costs = list(problem.costs)
    costs[node] = np.where(others, costs[node], 10**18)
    fresh = dataclasses.replace(problem, costs=tuple(costs), usage_limit=None)
    best = SOLVERS["exact"].solve(fresh, time_limit_s=60)
    assert ours.solver.objective_s >= best.cost / 1e12
    if not limited:
        assert ours.solver.objective_s == best.cost / 1e12
    else:
        assert ours.predicted.peak_bytes <= (plan.memory_limit or 0)


def test_a_cost_model_of_the_callers_own_is_asked_while_it_lives(tmp_path: Path) -> None:
    program = PROGRAMS["mlp_step"]
    plan = plan_of(program.fn, *program.values())
    assert Replanner.of(plan).again().predicted == plan.predicted
    plan.save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="cost model 'simple', which is the caller's own") as told:
        Plan.load(tmp_path / "plan.json").explain("argument 0")
    assert "plan again with that cost model" in told.value.fix


def test_a_plan_of_other_prices_is_refused(monkeypatch: Any) -> None:
    plan = planned()
    changed = dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, step_s=plan.predicted.step_s * 1.01)
    )
    with pytest.raises(InputError, match="means something else under this version"):
        Replanner.of(changed)


def test_a_plan_without_its_program_is_refused() -> None:
    with pytest.raises(InputError, match="does not hold the program"):
        Replanner.of(dataclasses.replace(planned(), origin=None))


def test_a_program_in_a_file_that_ends_the_process_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("autoshard.origin.READER", (sys.executable, "-c", "import os; os.abort()"))
    Replanner.of(plan)  # its program was made here
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(InputError, match="cannot be read: the process died of SIGABRT"):
        Replanner.of(loaded)
    with pytest.raises(InputError, match="cannot be read: the process died of SIGABRT"):
        loaded.write_stablehlo(tmp_path / "plan.mlir")


def test_a_damaged_program_in_a_file_is_refused_by_the_child() -> None:
    plan = planned()
    assert plan.origin is not None
    plan.origin.try_out()
    with pytest.raises(InputError, match="the program inside the plan cannot be read"):
        dataclasses.replace(plan.origin, module="eJwDAAAAAAE=").try_out()
