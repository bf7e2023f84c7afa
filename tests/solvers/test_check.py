"""The independent count: by hand, against the solvers' own count, and from bare files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InputError
from autoshard.problem import Problem, evaluate, load_problem, save_problem
from autoshard.solvers.check import check, check_file
from tests.solvers.problems import problems

EXAMPLE = Path(__file__).parents[1] / "data" / "iopddl" / "example.json"


def test_the_contest_example_is_counted_as_by_hand() -> None:
    found = check_file(EXAMPLE, (0, 0, 2, 1, 0))
    assert (found.cost, found.peak_usage, found.peak_time, found.over) == (445, 50, 50, ())
    assert found.feasible
    over = check_file(EXAMPLE, (0, 0, 1, 1, 0))
    assert over.over == ((50, 5),)
    assert "over the limit at one time point, by 5 bytes at 50" in str(over)
    assert check_file(EXAMPLE, (0, 0, 1, 1, 0), limit=55).feasible


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), data=st.data())
def test_both_counts_agree(
    problem: Problem, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    choices = [data.draw(st.integers(0, len(cost) - 1)) for cost in problem.costs]
    one, other = evaluate(problem, choices), check(problem, choices)
    assert (one.cost, one.peak_usage, one.feasible) == (
        other.cost,
        max(other.peak_usage, 0),
        other.feasible,
    )
    if one.peak_usage:
        assert one.peak_time == other.peak_time
    path = tmp_path_factory.mktemp("check") / "p.json"
    save_problem(problem, path)
    assert check_file(path, choices) == other


def test_sums_that_64_bits_do_not_hold_are_exact() -> None:
    count = 64
    problem = Problem(
        costs=(np.array([10**18 - 1]),) * count,
        usages=(np.array([1]),) * count,
        intervals=np.array([[0, 1]] * count),
        edges=np.zeros((0, 2), np.int64),
        edge_costs=(),
    )
    assert check(problem, (0,) * count).cost == count * (10**18 - 1)


def test_what_is_forbidden_is_named() -> None:
    problem = replace(load_problem(EXAMPLE), usage_limit=None)
    matrices = list(problem.edge_costs)
    matrices[2] = np.full_like(matrices[2], 10**18)
    found = check(replace(problem, edge_costs=tuple(matrices)), (0,) * 5)
    assert found.forbidden.startswith("edge 2 (")
    assert "forbidden" in str(found)
    assert not found.feasible


@pytest.mark.parametrize("choices", [(0, 0), (0, 0, 9, 0, 0), (0, 0, -1, 0, 0)])
def test_choices_of_another_problem_are_refused(choices: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="problem"):
        check_file(EXAMPLE, choices)
