"""The table of our own workloads' problems: what is planned, limited, solved and said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoshard.experiments.own_problems import TASKS, Solved, Task, main, table, written
from autoshard.problem import load_problem

TINY = Task("mlp", "tiny", "2,2", "v5e")


def row(**changed: object) -> Solved:
    known = Solved(TINY, 0.0, 10, 40, 12, 0.5, 0.25, "optimal", 0.0, 1e-3)
    return dataclasses.replace(known, **changed)  # type: ignore[arg-type]


def test_a_row_says_what_is_proved_under_which_limit() -> None:
    lines = table(
        [
            row(),
            row(share=0.6, gap=0.01, status="feasible"),
            row(share=0.4, gap=None, cost_s=None, status="infeasible"),
        ]
    ).splitlines()[2:]
    assert "| none |" in lines[0]
    assert lines[0].endswith("| optimal |")
    assert "| 60% |" in lines[1]
    assert lines[1].endswith("| within 1.000% |")
    assert lines[2].endswith("| - | infeasible |")


def test_names_tell_the_tasks_apart() -> None:
    assert len({task.name for task in TASKS}) == len(TASKS)


@pytest.mark.slow
def test_the_command_plans_in_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.experiments.own_problems.TASKS", (TINY,))
    main(["--time-limit", "10"])
    printed = capsys.readouterr().out
    unlimited, whole = (
        next(line for line in printed.splitlines() if line.startswith(f"| {TINY.name} | {limit} |"))
        for limit in ("none", "100%")
    )
    assert unlimited.endswith("| optimal |")
    assert whole.endswith("| optimal |")
    (path,) = written(tmp_path, (TINY,))
    assert load_problem(path).usage_limit is None
