"""Problems: counted by hand, checked, written and read back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.errors import InputError
from autoshard.problem import (
    FORBIDDEN,
    Problem,
    evaluate,
    load_problem,
    save_problem,
    usage_over_time,
    validate_problem,
)
from autoshard.solvers import SOLVERS, Status
from tests.solvers.problems import problems

EXAMPLE = Path(__file__).parent / "data" / "iopddl" / "example.json"


def same(a: Problem, b: Problem) -> bool:
    return (
        a.usage_limit == b.usage_limit
        and a.names == b.names
        and np.array_equal(a.intervals, b.intervals)
        and np.array_equal(a.edges, b.edges)
        and all(map(np.array_equal, a.costs, b.costs))
        and all(map(np.array_equal, a.usages, b.usages))
        and all(map(np.array_equal, a.edge_costs, b.edge_costs))
    )


def test_the_contest_example_is_counted_as_by_hand() -> None:
    problem = load_problem(EXAMPLE)
    found = evaluate(problem, (0, 0, 2, 1, 0))
    # Nodes 15 + 55 + 35 + 75 + 95; edges 30 + 40 + 10 + 30 + 60.
    assert found.cost == 445
    # From 50 on, nodes 0, 1 and 2 live together: 10 + 25 + 15.
    assert (found.peak_usage, found.peak_time, found.feasible) == (50, 50, True)
    over = evaluate(problem, (0, 0, 1, 1, 0))
    assert (over.peak_usage, over.peak_time, over.feasible) == (55, 50, False)
    solved = SOLVERS["exact"].solve(problem, time_limit_s=10)
    want = SOLVERS["brute"].solve(problem, time_limit_s=10)
    assert (solved.status, solved.cost) == (Status.OPTIMAL, want.cost)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
def test_a_written_problem_reads_back_the_same(
    problem: Problem, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("problems")
    named = replace(problem, names=tuple(f"op {i}" for i in range(len(problem.costs))))
    for each in (problem, named):
        for name in ("p.json", "p.json.gz"):
            save_problem(each, folder / name)
            assert same(load_problem(folder / name), each)


def test_equal_problems_give_equal_bytes(tmp_path: Path) -> None:
    problem = load_problem(EXAMPLE)
    save_problem(problem, tmp_path / "a.json.gz")
    first = (tmp_path / "a.json.gz").read_bytes()
    save_problem(load_problem(tmp_path / "a.json.gz"), tmp_path / "a.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == first


def test_costs_stay_exact_beyond_what_a_float_holds(tmp_path: Path) -> None:
    odd = 2**53 + 1
    problem = replace(small(), costs=(np.array([odd, FORBIDDEN]), np.array([-odd])))
    save_problem(problem, tmp_path / "p.json")
    again = load_problem(tmp_path / "p.json")
    assert again.costs[0].tolist() == [odd, FORBIDDEN]
    assert evaluate(again, (0, 0)).cost == 7


@pytest.mark.parametrize("huge", [10**18, 2**63 - 1, 2**63, 2**64, 10**30])
def test_huge_costs_in_a_file_are_read_as_forbidden(tmp_path: Path, huge: int) -> None:
    data = json.loads(EXAMPLE.read_text())
    data["problem"]["nodes"]["costs"][1] = [huge, 65]
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    problem = load_problem(tmp_path / "p.json.gz")
    assert problem.costs[1].tolist() == [FORBIDDEN, 65]
    assert evaluate(problem, (0, 0, 0, 0, 0)).cost == FORBIDDEN


def test_a_forbidden_entry_is_not_paid_off_by_negative_costs() -> None:
    problem = replace(small(), costs=(np.array([FORBIDDEN, 0]), np.array([-(10**15)])))
    found = evaluate(problem, (0, 0))
    assert (found.cost, found.feasible) == (FORBIDDEN, False)


def test_many_large_costs_add_up_exactly() -> None:
    count = 40
    problem = Problem(
        costs=(np.array([FORBIDDEN - 1]),) * count,
        usages=(np.array([0]),) * count,
        intervals=np.zeros((count, 2), np.int64),
        edges=np.zeros((0, 2), np.int64),
        edge_costs=(),
    )
    assert evaluate(problem, (0,) * count).cost == count * (FORBIDDEN - 1)


def test_a_node_is_live_from_its_start_until_before_its_end() -> None:
    problem = replace(small(), intervals=np.array([[2, 5], [5, 6]]))
    times, usage = usage_over_time(problem, [3, 4])
    assert (times.tolist(), usage.tolist()) == ([2, 5, 6], [3, 4, 0])
    empty = replace(small(), intervals=np.array([[2, 2], [5, 5]]))
    assert evaluate(empty, (0, 0)).peak_usage == 0


def test_equal_matrices_in_a_file_become_one_array(tmp_path: Path) -> None:
    problem = replace(small(), edges=np.array([[0, 1], [0, 1]]))
    problem = replace(problem, edge_costs=(np.array([[1], [2]]), np.array([[1], [2]])))
    save_problem(problem, tmp_path / "p.json")
    first, second = load_problem(tmp_path / "p.json").edge_costs
    assert first is second


def small() -> Problem:
    return Problem(
        costs=(np.array([1, 2]), np.array([3])),
        usages=(np.array([1, 2]), np.array([3])),
        intervals=np.array([[0, 2], [1, 3]]),
        edges=np.array([[0, 1]]),
        edge_costs=(np.array([[7], [8]]),),
        usage_limit=9,
        names=("left", "right"),
    )


def wrong(**changes: Any) -> Callable[[], Problem]:
    return lambda: replace(small(), **changes)


MISFITS: dict[str, tuple[Callable[[], Problem], str]] = {
    "usages": (wrong(usages=(np.array([1, 2]),)), "1 usage rows for 2 nodes"),
    "intervals": (wrong(intervals=np.zeros((3, 2), np.int64)), r"give .* shape \(2, 2\)"),
    "names": (wrong(names=("left",)), "1 names for 2 nodes"),
    "no strategy": (wrong(costs=(np.array([1, 2]), np.zeros(0, np.int64))), "at:  right"),
    "usage": (wrong(usages=(np.array([1]), np.array([3]))), "at:  left"),
    "float": (wrong(costs=(np.array([1.5, 2]), np.array([3]))), "whole units"),
    "edge count": (wrong(edge_costs=()), "0 edge matrices"),
    "edge node": (wrong(edges=np.array([[0, 2]])), r"at:  edge \(0, 2\)"),
    "edge shape": (wrong(edge_costs=(np.array([[7, 8]]),)), r"shape \(1, 2\).*\(2, 1\)"),
    "edge float": (wrong(edge_costs=(np.array([[7.0], [8.0]]),)), "float64"),
    "far below": (wrong(costs=(np.array([-FORBIDDEN, 2]), np.array([3]))), "too far below zero"),
    "usage sum": (wrong(usages=(np.array([2**61, 0]), np.array([2**61]))), "larger unit"),
    "limit": (wrong(usage_limit=2**62), "a smaller one, or none"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_named(name: str) -> None:
    validate_problem(small())
    make, message = MISFITS[name]
    with pytest.raises(InputError, match=message):
        validate_problem(make())


@pytest.mark.parametrize(
    ("choices", "message"),
    [((0,), "1 choices were given for 2 nodes"), ((2, 0), "at:  left"), ((0, -1), "at:  right")],
)
def test_a_choice_that_does_not_exist_is_named(choices: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(small(), choices)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"problem": {"nodes": {"intervals": [[0, 1]], "costs": [[1]]}}}',
        EXAMPLE.read_text().replace("[55, 65]", "[55.5, 65]"),
        EXAMPLE.read_text().replace("[55, 65]", '["55", 65]'),
        EXAMPLE.read_text().replace("[30, 40]", "[30]"),
        EXAMPLE.read_text().replace("[0, 1],", "[0, 9],"),
    ],
)
def test_a_file_that_is_no_problem_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"p\.json"):
        load_problem(path)


def test_a_missing_file_is_said() -> None:
    with pytest.raises(InputError, match="no such file"):
        load_problem("nowhere.json.gz")


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="not gzipped"):
        load_problem(tmp_path / "p.json.gz")
