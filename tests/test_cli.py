from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.problem import Problem, save_problem
from autoshard.shardings import MeshShape
from autoshard.typed import parse_mesh


def test_a_mesh_is_read_as_typed() -> None:
    assert parse_mesh("data=4,model=2") == MeshShape(("data", "model"), (4, 2))
    assert parse_mesh(" x = 8 ") == MeshShape(("x",), (8,))
    assert parse_mesh(str(MeshShape(("a", "b", "c"), (2, 4, 1)))).sizes == (2, 4, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "cannot read the mesh axis ''"),
        ("4,2", "cannot read the mesh axis '4'"),
        ("data", "cannot read the mesh axis 'data'"),
        ("data=4,", "cannot read the mesh axis ''"),
        ("data=four", "mesh axis 'data' has size 'four', which is no positive number"),
        ("data=0", "mesh axis 'data' has size '0', which is no positive number"),
        ("data=-2", "mesh axis 'data' has size '-2', which is no positive number"),
        ("x=2,x=4", "mesh axis 'x' is there twice"),
        ("x=4000,y=4000", "the mesh has 16000000 devices"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_mesh(text)
    assert str(caught.value).startswith(complaint)
    assert f"at:  mesh {text!r}" in str(caught.value)


def two_nodes(limit: int | None = None) -> Problem:
    """Each node may pay 1 (and 5 bytes) or 3 (and 1 byte); unequal choices cost 10 more."""
    return Problem(
        costs=(np.array([1, 3]), np.array([1, 3])),
        usages=(np.array([5, 1]), np.array([5, 1])),
        intervals=np.array([[0, 2], [1, 3]]),
        edges=np.array([[0, 1]]),
        edge_costs=(np.array([[0, 10], [10, 0]]),),
        usage_limit=limit,
    )


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_solve_prints_the_solution_as_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problem.json.gz"
    save_problem(two_nodes(limit=9), path)
    assert main(["solve", str(path), "--time-limit", "10", "--json"]) == 0
    answer = printed_json(capsys)
    assert answer["status"] == "OPTIMAL"
    assert (answer["cost"], answer["lower_bound"], answer["gap"]) == (6, 6, 0.0)
    assert answer["choices"] == [1, 1]
    assert (answer["peak_usage"], answer["usage_limit"]) == (2, 9)


def test_solve_says_when_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    save_problem(two_nodes(limit=1), path)
    assert main(["solve", str(path), "--json"]) == 1
    answer = printed_json(capsys)
    assert answer["status"] == "INFEASIBLE"
    assert answer["cost"] is None
    assert main(["solve", str(path)]) == 1
    assert "no choice meets the memory limit" in capsys.readouterr().out


def test_workloads_lists_every_program_with_its_hand_made_plans(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["workloads", "--json"]) == 0
    rows = {row["name"]: row for row in printed_json(capsys)}
    assert {"mlp", "llama", "llama_unrolled", "moe", "llama_decode", "flax_transformer"} <= set(
        rows
    )
    assert {"dp", "fsdp", "tp", "2d"} <= set(rows["llama"]["experts"])
    assert main(["workloads"]) == 0
    assert "llama_decode" in capsys.readouterr().out


def test_workloads_says_what_to_install_for_those_that_need_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "autoshard.experiments.workloads.haiku_model"
    monkeypatch.delitem(sys.modules, model, raising=False)
    monkeypatch.setitem(sys.modules, "haiku", None)
    assert main(["workloads"]) == 0
    shown = capsys.readouterr().out
    assert "pip install 'autoshard[haiku]'" in shown
    assert "MLP-Mixer" in shown


def test_devices_are_made_before_a_workload_whose_library_starts_jax() -> None:
    program = (
        "import sys\n"
        "from autoshard.cli import main\n"
        "from autoshard.experiments import comparison\n"
        "comparison.compare = lambda workload, mesh, **_: sys.exit(mesh.size)\n"
        "sys.exit(main(['validate', 'flax_transformer', '--mesh', 'data=4,model=2']))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == 8


FIGURES = {"flops", "collective_bytes", "peak_bytes", "step_s"}
PARTS = {"hbm_bytes", "compute_s", "communication_s", "hidden_s", "exposed_s"}


def test_validate_prints_predicted_compiled_and_measured_as_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    words = ["validate", "mlp", "--mesh", "data=4,model=2", "--json", "--report", str(page)]
    assert main(words) == 0
    answer = printed_json(capsys)
    assert (answer["workload"], answer["size"]) == ("mlp", "tiny")
    assert answer["mesh"] == {"data": 4, "model": 2}
    for row in (answer, *answer["experts"].values()):
        for figure in ("predicted", "compiled", "measured"):
            assert set(row[figure]) == FIGURES | PARTS
        assert all(row["predicted"][key] > 0 for key in FIGURES)
        p = row["predicted"]
        assert p["hidden_s"] + p["exposed_s"] == pytest.approx(p["communication_s"])
        assert all(row["compiled"][key] > 0 for key in FIGURES - {"step_s"})
        assert row["measured"]["step_s"] > 0
    assert answer["max_relative_error"] < 1e-4
    assert answer["unnamed_collectives"] == []
    assert answer["involuntary_remat"] == 0
    assert answer["planning_s"] > 0
    assert {"dp", "fsdp", "tp", "2d"} <= set(answer["experts"])
    for row in answer["experts"].values():
        assert answer["predicted"]["step_s"] <= row["predicted"]["step_s"]
    assert "Against hand-made plans" in page.read_text(encoding="utf-8")


def test_validate_has_the_program_split_by_whom_one_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["validate", "mlp", "--mesh", "x=2", "--no-measure", "--json"]
    for partitioner in ("xla", "shardy"):
        assert main([*words, "--partitioner", partitioner]) == 0
        answer = printed_json(capsys)
        assert (answer["partitioner"], answer["fallback_reason"]) == (partitioner, "")


def test_validate_without_a_clock_compiles_only_and_prints_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate", "mlp", "--mesh", "x=2", "--no-measure"]) == 0
    text = capsys.readouterr().out
    assert "mlp (tiny) on x=2" in text
    assert "measured" not in text.splitlines()[-1]
    assert "fsdp" in text
    assert "cannot name: 0" in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["solve", "no-such-file.json"], "no-such-file.json"),
        (["solve", "x.json", "--time-limit", "0"], "the time limit is 0.0 s"),
        (["validate", "mlp", "--mesh", "8"], "cannot read the mesh axis '8'"),
        (["validate", "mpl"], "did you mean 'mlp'?"),
        (["validate", "mlp", "--mesh", "x=64"], "needs 64 devices"),
    ],
)
def test_what_a_user_can_mend_is_told_without_a_traceback(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert "fix:" in captured.err
    assert captured.out == ""


def test_a_problem_file_that_is_no_problem_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(b'{"problem": 3}'))
    assert main(["solve", str(path)]) == 2
    assert "fix:" in capsys.readouterr().err


def autoshard_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *words],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_the_command_knows_its_version_and_its_words() -> None:
    done = autoshard_command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("autoshard ")
    done = autoshard_command()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
    assert autoshard.__doc__
