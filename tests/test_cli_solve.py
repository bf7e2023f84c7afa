"""Problems in files are solved, checked, compared and priced from the shell."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.cli_solve import parse_limit, table
from autoshard.problem import Problem, load_problem, save_problem
from autoshard.report.curves import Scale
from tests.solvers.problems import dense

EXAMPLE = Path(__file__).parent / "data" / "iopddl" / "example.json"


def answer(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main(["solve", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_solution_is_kept_checked_and_started_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "solution.json"
    data = answer(capsys, EXAMPLE, "--save", kept)
    assert (data["cost"], data["lower_bound"], data["status"]) == (445, 445, "OPTIMAL")
    assert data["timeline"][-1]["cost"] == 445
    assert data["peak_rss_bytes"] > 2**20
    told = answer(capsys, EXAMPLE, "--check", kept)
    assert (told["feasible"], told["cost"], told["peak_usage"]) == (True, 445, data["peak_usage"])
    assert told["wrong_claims"] == {}
    again = answer(capsys, EXAMPLE, "--hint", kept)
    assert again["timeline"][0] == {"seconds": 0.0, "cost": 445, "lower_bound": None}
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(data["choices"]))
    assert answer(capsys, EXAMPLE, "--check", bare)["cost"] == 445


def test_a_solution_that_does_not_hold_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps({"choices": [0, 0, 1, 1, 0], "cost": 3}))
    told = answer(capsys, EXAMPLE, "--check", path, code=1)
    assert (told["feasible"], told["over"]) == (False, [{"time": 50, "bytes": 5}])
    assert told["wrong_claims"] == {"cost": 3}
    told = answer(capsys, EXAMPLE, "--check", path, "--limit", "none", code=1)
    assert (told["feasible"], told["wrong_claims"]) == (True, {"cost": 3})
    assert main(["solve", str(EXAMPLE), "--check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "over the limit at one time point, by 5 bytes at 50" in out
    assert "the file says otherwise: cost 3" in out


def test_the_limit_is_the_one_that_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, EXAMPLE, "--limit", "none")["cost"] == 415
    data = answer(capsys, EXAMPLE, "--limit", "10", code=1)
    assert (data["status"], data["cost"], data["gap"]) == ("INFEASIBLE", None, None)
    short = data["shortage"]
    assert (short["time"], short["missing_bytes"]) == (50, data["least_usage_limit"] - 10)
    assert short["held_by"][0] == {"node": 1, "name": "node 1", "bytes": 25}
    assert main(["solve", str(EXAMPLE), "--limit", "10"]) == 1
    assert "at least 40 bytes are missing" in capsys.readouterr().out
    assert parse_limit("9007199254740993") == 9007199254740993
    assert parse_limit("1.5 KiB") == 1536


def test_a_problem_that_time_does_not_suffice_for_has_its_own_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    save_problem(dense(np.random.default_rng(0), nodes=60, states=12, limit=1500), path)
    data = answer(capsys, path, "--time-limit", "0.000001", code=3)
    assert (data["status"], data["cost"], data["choices"]) == ("UNKNOWN", None, [])


@pytest.mark.slow
def test_solvers_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "runs.svg"
    words = ["solve", str(EXAMPLE), "--compare", "exact,ilp", "--time-limit", "20"]
    words += ["--svg", str(picture)]
    assert main(words) == 0
    out = capsys.readouterr().out
    for name in ("exact", "ilp"):
        assert any(line.startswith(name) and "445" in line for line in out.splitlines())
    drawn = ET.parse(picture).getroot()
    assert drawn.tag.endswith("svg")
    texts = [element.text for element in drawn.iter() if element.text]
    assert {"exact: cost", "exact: bound", "time [s]"} <= set(texts)


def test_solvers_compared_agree_that_nothing_is_feasible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = answer(capsys, EXAMPLE, "--limit", "0", "--compare", "exact", code=1)
    assert [run["status"] for run in runs] == ["INFEASIBLE"]


def test_a_front_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "front.svg"
    data = answer(capsys, EXAMPLE, "--pareto", "--svg", picture)
    assert [(p["peak_usage"], p["cost"]) for p in data["front"]] == [(55, 415), (50, 445)]
    assert data["front"][0]["cost_per_gib"] == pytest.approx(6 * 2**30)
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert main(["solve", str(EXAMPLE), "--pareto"]) == 0
    assert "cost per GiB less" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--compare", "exat"], "did you mean 'exact'"),
        (["--solver", "exat"], "did you mean 'exact'"),
        (["--limit", "many"], "cannot read 'many'"),
        (["--points", "0"], "--points is 0"),
        (["--time-limit", "nan"], "the time limit is nan"),
        (["--time-limit", "inf"], "the time limit is inf"),
        (["--hint", "nowhere.json"], "no such file"),
        (["--check", str(EXAMPLE)], "choices are null"),
        (["--save", "nowhere/at/all.json"], "no folder"),
        (["--save", str(EXAMPLE.parent)], "this is a folder"),
        (["--svg", str(EXAMPLE.parent)], "this is a folder"),
        (["--compare", "--save", "kept.json"], "--save does nothing with --compare"),
        (["--pareto", "--hint", "kept.json"], "--hint does nothing with --pareto"),
    ],
)
def test_what_a_user_can_mend_is_said(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", str(EXAMPLE), *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert "fix:" in said.err
    assert said.out == ""


def test_an_empty_problem_has_an_answer_only_where_its_limit_can_be_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    none = np.zeros((0, 2), np.int64)
    save_problem(Problem((), (), none, none, (), usage_limit=0), empty)
    assert answer(capsys, empty)["cost"] == 0
    save_problem(Problem((), (), none, none, (), usage_limit=-1), empty)
    told = answer(capsys, empty, code=1)
    assert (told["status"], told["cost"], told["peak_usage"]) == ("INFEASIBLE", None, None)


def test_names_neither_steer_nor_stop_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "named.json"
    names = ("gr\u00f6\u00dfe", "\x1b[31m", "\ud800", "d", "e")
    save_problem(replace(load_problem(EXAMPLE), names=names), path)
    assert main(["solve", str(path), "--limit", "0"]) == 1
    held = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if " bytes  " in line]
    assert held == [r"\x1b[31m", r"\ud800", "gr\u00f6\u00dfe"]


def test_a_hint_for_another_problem_is_refused_and_one_with_names_is_matched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hint = tmp_path / "p.json", tmp_path / "h.json"
    hint.write_text("[0, 0]")
    assert main(["solve", str(EXAMPLE), "--hint", str(hint)]) == 2
    assert "2 choices for 5 nodes" in capsys.readouterr().err
    named = replace(load_problem(EXAMPLE), names=("a", "b", "c", "d", "e"))
    save_problem(named, path)
    hint.write_text(json.dumps({"choices": [1, 0], "names": ["c", "x"]}))
    assert answer(capsys, path, "--hint", hint)["cost"] == 445


INTERRUPTED = """
import os, signal, sys
from contextlib import contextmanager
from autoshard import cli, cli_solve

@contextmanager
def live(what, limit_s):
    yield lambda sign: os.kill(os.getpid(), signal.SIGINT)

cli_solve.live = live
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, with Ctrl-C at its solver's first sign of life."""


def test_ctrl_c_prints_the_best_so_far(tmp_path: Path) -> None:
    path, hint = tmp_path / "p.json", tmp_path / "h.json"
    save_problem(dense(np.random.default_rng(1), nodes=60, states=12), path)
    hint.write_text(json.dumps([0] * 60))
    words = ["solve", str(path), "--time-limit", "300", "--json", "--hint", str(hint)]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *words],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert done.returncode == 0
    assert data["interrupted"] == "Ctrl-C"
    assert len(data["choices"]) == 60
    assert data["status"] == "FEASIBLE"


def test_scales_keep_order_and_edges() -> None:
    scale = Scale.signed_log("x", [-1e9, 0.0, 5.0], 0.01, "{:g}")
    places = [scale.place(v) for v in (-1e9, -5.0, 0.0, 0.001, 5.0, 1e9)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    flat = Scale.linear("x", [3.0, 3.0])
    assert flat.place(3.0) == 0.5


def test_a_short_row_of_a_table_ends_in_its_remark() -> None:
    lines = table(("a", "b", "c"), [("x", "1", "22"), ("y", "no answer at all")])
    assert lines == ["a  b   c", "x  1  22", "y  no answer at all"]
