"""The bench of the solver: what it reads, what its rows say, where its table goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.experiments.solver_bench import (
    HEAD,
    INSTANCES,
    Row,
    against,
    bench,
    cells,
    contest,
    markdown,
    rows_json,
    rows_of,
    write_table,
)
from autoshard.problem import load_problem, save_problem
from autoshard.solve_runs import run_apart
from tests.solvers.test_checked import PROBLEM

ROW = Row(
    "B", 816, 39, 1096, 60.0, "FEASIBLE", cost=532_850, lower_bound=532_000, gap=0.0016,
    first_s=0.5, first_cost=600_000, usable_s=1.0, near_s=2.0, seconds=60.0, reading_s=0.1,
    peak_rss_bytes=300 * 2**20, best=532_843, optimum=532_843,
)  # fmt: skip


def test_three_instances_of_the_contest_come_along_with_what_is_known_of_them() -> None:
    cases = {case.name: case for case in contest(INSTANCES)}
    assert set(cases) == {"B", "G", "V"}
    assert (cases["B"].time_limit_s, cases["B"].optimum) == (60.0, 532_843)
    assert (cases["V"].time_limit_s, cases["V"].best, cases["V"].optimum) == (300.0, 1617084, None)
    problem = load_problem(cases["G"].path)
    assert (len(problem.costs), len(problem.edges)) == (816, 1023)


def test_a_folder_of_ones_own_is_run(tmp_path: Path) -> None:
    save_problem(PROBLEM, tmp_path / "mine.json")
    (case,) = contest(tmp_path)
    assert (case.name, case.best) == ("mine", None)
    (row,) = bench([case], time_limit_s=10.0)
    assert (row.cost, row.lower_bound, row.gap, row.status) == (7, 7, 0.0, "OPTIMAL")
    assert row.first_cost is not None
    assert row.first_cost >= 7
    assert row.first_s is not None
    assert row.usable_s is not None
    assert row.near_s is not None
    assert row.first_s <= row.usable_s <= row.near_s
    assert row.peak_rss_bytes is not None
    assert rows_of(json.loads(json.dumps(rows_json([row])))) == [row]


def test_a_cost_printed_with_nine_digits_is_no_record_by_its_rounding(tmp_path: Path) -> None:
    rows = ["instance,contest_best,best_published_after,proved_optimum"]
    rows += ["P,662197407330,6.62197407e+11,", "M,49928460991,4.99281575e+10,", "A,9,9,7", "Z,,,"]
    (tmp_path / "reference.csv").write_text("\n".join(rows) + "\n")
    for name in "PMAZ":
        save_problem(PROBLEM, tmp_path / f"iopddl-{name}.json")
    best = {case.name: case.best for case in contest(tmp_path)}
    assert best == {"P": 662197407330, "M": 49928157500, "A": 7, "Z": None}


def test_a_folder_without_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no problem"):
        list(contest(tmp_path))


def test_a_solver_that_gives_no_answer_is_a_row_as_well(tmp_path: Path) -> None:
    run = run_apart(tmp_path / "none.json", "exact", time_limit_s=1.0)
    assert run == {"solver": "exact", "error": "there is no such file"}
    row = Row("x", 1, 2, 0, 1.0, "ERROR", "ended by SIGKILL")
    assert cells(row)[-1] == "ended by SIGKILL"


@pytest.mark.parametrize(
    ("cost", "said"),
    [(532_843, "optimum"), (532_850, "+0.001%"), (None, "-")],
)
def test_a_cost_is_set_against_the_best_known(cost: int | None, said: str) -> None:
    changed = Row(**{**rows_json([ROW])[0], "cost": cost})
    assert against(changed) == said


def test_the_table_goes_between_its_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- contest -->\nold\n<!-- end of contest -->\n\nrest\n")
    table = markdown([ROW, Row("x", 1, 2, 0, 1.0, "ERROR", "ended")], "exact", 0)
    write_table(page, "contest", table)
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- contest -->\n")
    assert text.endswith("<!-- end of contest -->\n\nrest\n")
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| B")]
    assert rows[0].count("|") == len(HEAD) + 1
    with pytest.raises(InputError, match="no place for the table of other"):
        write_table(page, "other", table)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "Z"], "no problem is called 'Z'"),
        (["--time-limit", "soon"], "the time limit is 'soon'"),
        (["--instances", "nowhere"], "no such folder"),
        (["--solver", "exat"], "did you mean 'exact'"),
        (["--source", "contst"], "did you mean 'contest'"),
    ],
)
def test_what_a_user_can_mend_is_said(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "solver", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_rows_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_problem(PROBLEM, tmp_path / "mine.json")
    words = ["bench", "solver", "--instances", str(tmp_path), "--time-limit", "5", "--json"]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["cost"]) == ("mine", 7)
