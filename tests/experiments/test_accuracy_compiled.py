"""Plans against compiled programs: what is counted as right, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import main
from autoshard.experiments.accuracy_compiled import POINTS, Point, Row, check, load, summarize

RIGHT = {"flops": 100.0, "collective_bytes": 50.0, "peak_bytes": 1000.0}
ONLY = "llama_decode 8b on v5e"
NAMES = [str(point) for point in POINTS if ONLY in str(point)]


def row(point: str, fits: bool = True, outcome: str = "fits", **compiled: float) -> Row:
    return Row(point, outcome, RIGHT, {**RIGHT, **compiled}, fits, 1.0)


def goals(*rows: Row) -> dict[str, tuple[int, int, bool]]:
    return {goal.figure: (goal.met, goal.programs, goal.holds) for goal in summarize(rows)}


def test_forty_programs_and_more_for_three_chips_are_compared() -> None:
    assert len({str(point) for point in POINTS}) == len(POINTS) >= 40
    chips = {point.topology.partition(":")[0] for point in POINTS}
    assert chips == {"v5e", "v5p", "v6e"}


def test_a_figure_is_right_within_its_bound_and_a_goal_met_by_its_share() -> None:
    near, far = row("near", peak_bytes=1090.0), row("far", flops=97.0, peak_bytes=500.0)
    found = goals(*[near] * 9, far)
    assert found["flops"] == (9, 10, False)
    assert found["peak_bytes"] == (9, 10, True)
    assert found["collective_bytes"] == (10, 10, True)


def test_programs_that_do_not_fit_are_judged_by_that_alone() -> None:
    full = row("full", fits=False, outcome="out of memory", flops=1.0)
    wrong = row("wrong", fits=True, outcome="out of memory")
    assert goals(full, wrong, row("fits"))["fits or not"] == (2, 3, False)
    assert goals(full, row("fits"))["flops"] == (1, 1, True)
    assert replace(full, outcome="crashed").verdict is None


def test_the_command_goes_on_from_its_rows_and_says_which_goals_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    page.write_text("before\n<!-- compiled -->\n<!-- end of compiled -->\nafter\n", "utf-8")
    lines = [json.dumps(asdict(row(name))) for name in NAMES]
    kept.write_text("\n".join((*lines, '{"point": "cut off')), "utf-8")
    asked = ["accuracy", "--compiled", "--topology", "v5e:4x4", "--only", ONLY]
    asked += ["--rows", str(kept), "--write", str(page)]
    assert main([*asked, "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert [row["point"] for row in told["rows"]] == NAMES
    assert all(goal["holds"] for goal in told["goals"])
    text = page.read_text("utf-8")
    assert all(f"| {name} | +0.0% |" in text for name in NAMES)
    assert text.endswith("<!-- end of compiled -->\nafter\n")

    worse = [json.dumps(asdict(row(name, peak_bytes=1.0))) for name in NAMES]
    kept.write_text("\n".join(worse) + "\n", "utf-8")
    assert main(asked) == 1
    assert "peak_bytes         within 10% for 0 of 2 programs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (["--compiled", "--topology", "v5e:1x1"], "no program is left"),
        (["--compiled", "--points", "runs.csv"], "are of published runs"),
        (["--only", "llama"], "belong to --compiled"),
    ],
)
def test_what_does_not_go_together_is_refused(
    asked: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accuracy", *asked]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert "fix:" in told


@pytest.mark.tpu
@pytest.mark.slow
def test_a_program_is_planned_compiled_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    found = check(Point("mlp", "small", "v5e:2x2", "data=4,model=1", "dp"))
    assert (found.outcome, found.fits) == ("fits", True)
    assert found.error("flops") == pytest.approx(0.0, abs=0.02)
    assert found.error("collective_bytes") == pytest.approx(0.0, abs=0.02)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(found)) + "\n", "utf-8")
    assert load(path) == {found.point: found}
