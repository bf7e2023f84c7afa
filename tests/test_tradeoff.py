"""A plan's problem can be taken away, solved elsewhere, and priced in memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, autoshard
from autoshard.cli import main
from autoshard.errors import InputError, SolverError
from autoshard.pricing import total_seconds
from autoshard.problem import load_problem, save_problem
from autoshard.solvers import SOLVERS, Status
from tests.solvers.test_checked import TRUE, Says

S = jax.ShapeDtypeStruct
MESH = jax.make_mesh((4, 2), ("data", "model"))


def step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jax.nn.relu(x @ w)
    return w - 0.1 * (x.T @ hidden), jnp.sum((hidden @ v) ** 2)


SHAPES = (S((256, 512), "float32"), S((512, 256), "float32"), S((1024, 256), "float32"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autoshard(step, MESH, cost_model="v5e").plan(*SHAPES)


def test_solving_the_exported_problem_gives_the_plans_objective(plan: Plan, tmp_path: Path) -> None:
    save_problem(plan.problem(), tmp_path / "p.json.gz")
    problem = load_problem(tmp_path / "p.json.gz")
    assert len(problem.names) == len(problem.costs) == plan.solver.nodes
    assert problem.usage_limit == plan.memory_limit
    for name in ("exact", "ilp"):
        solved = SOLVERS[name].solve(problem, time_limit_s=60)
        assert total_seconds(solved.cost) == plan.solver.objective_s
    assert solved.lower_bound <= solved.cost


def test_a_loaded_plan_gives_the_same_problem(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    save_problem(plan.problem(), tmp_path / "p.json")
    first = (tmp_path / "p.json").read_bytes()
    save_problem(Plan.load(tmp_path / "plan.json").problem(), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_bytes() == first


def test_a_front_of_plans_trades_time_for_memory(plan: Plan) -> None:
    found = plan.pareto(points=5, time_limit_s=30)
    assert len(found.points) >= 2
    assert found.points[0].step_s == pytest.approx(plan.predicted.step_s)
    for rich, lean in itertools.pairwise(found.points):
        assert rich.peak_bytes > lean.peak_bytes
        assert rich.step_s < lean.step_s
        assert rich.seconds_per_gib is not None
        spared = (rich.peak_bytes - lean.peak_bytes) / 2**30
        assert rich.seconds_per_gib * spared == pytest.approx(lean.step_s - rich.step_s)
    assert found.points[-1].seconds_per_gib is None
    assert "one GiB less costs" in str(found)
    assert json.loads(json.dumps(found.to_json()))["points"][0]["step_s"] > 0
    with pytest.raises(InputError, match="points"):
        plan.pareto(points=0)


def test_the_shell_writes_the_problem_and_the_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path(__file__)
    words = ["plan", f"{here}:step", "--example", f"{here}:SHAPES", "--mesh", "data=4,model=2"]
    words += ["--cost-model", "v5e", "--save-problem", str(tmp_path / "p.json"), "--pareto"]
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) >= 2
    assert load_problem(tmp_path / "p.json").names


def test_a_solver_that_lies_is_refused_by_the_planner() -> None:
    lying = Says(TRUE)  # choices of another problem
    with pytest.raises(SolverError, match="the solver Says chose strategies that"):
        autoshard(step, MESH, cost_model="v5e", solver=lying).plan(*SHAPES)


def test_a_solver_of_ones_own_is_asked(plan: Plan) -> None:
    mine = SOLVERS["ilp"]
    found = autoshard(step, MESH, cost_model="v5e", solver=mine).plan(*SHAPES)
    named = autoshard(step, MESH, cost_model="v5e", solver="ilp").plan(*SHAPES)
    assert found.solver.objective_s == named.solver.objective_s == plan.solver.objective_s
    assert (found.solver.solver, named.solver.solver) == ("PairIlp", "ilp")
    assert named.solver.status in (Status.OPTIMAL.value, Status.FEASIBLE.value)
