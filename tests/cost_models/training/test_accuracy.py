from __future__ import annotations

import csv
import json
from importlib import resources
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cost_models.training.accuracy import accuracy
from autoshard.cost_models.training.rankings import call_rankings, compact_shape, model_named
from autoshard.errors import InputError

FILES = resources.files("autoshard.cost_models.training")
DENSE = "dense, bf16, high or medium confidence"


def test_programs_that_were_left_out_are_predicted_as_well_as_published_runs_repeat() -> None:
    found = accuracy()
    assert not found.refused
    assert found.counts == {DENSE: 48, "bf16": 75, "all": 81}
    assert found.errors[DENSE]["left out"] < 0.08
    assert found.errors["bf16"]["left out"] < 0.11
    for errors in found.errors.values():
        assert errors["fitted"] < errors["left out"] < errors["median MFU of the chip"]
        assert errors["median MFU of the chip"] < errors["roofline"]
    assert all(of["step time"] > 0.93 for of in found.rank_correlation.values())


def test_a_table_of_other_runs_is_predicted_without_the_times_in_it(tmp_path: Path) -> None:
    rows = list(csv.DictReader(FILES.joinpath("points.csv").read_text("utf-8").splitlines()))
    chosen = [row for row in rows if row["model"] == "llama3.1-8b"]
    found = {}
    for factor in (1, 10):
        path = tmp_path / f"{factor}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            for row in chosen:
                step = str(factor * float(row["measured_step_s"]))
                writer.writerow({**row, "measured_step_s": step})
        found[factor] = accuracy(path)
    assert [r.left_out_s for r in found[1].rows] == [r.left_out_s for r in found[10].rows]
    assert found[1].errors["bf16"]["left out"] < 0.15


def test_hard_rows_are_refused_or_predicted_but_stop_nothing(tmp_path: Path) -> None:
    rows = list(csv.DictReader(FILES.joinpath("points.csv").read_text("utf-8").splitlines()))
    changes: list[dict[str, str]] = [
        {"id": "new chip", "chip": "v3", "topology": "8x8", "mesh": "ici: data=128; dcn: data=1"},
        {"id": "odd mesh", "mesh": "ici: fsdp=3; dcn: data=1"},
        {"id": "crossed mesh", "topology": "4x4x12", "chip": "v5p", "mesh": "ici: fsdp=9,a=16"},
        {"id": "no flops", "own_tflop_per_device_step_causal_half": "", "model": "new model"},
        {"id": "no time", "measured_step_s": "", "mfu_causal_half_bf16peak": ""},
        {"id": "rubbish", **dict.fromkeys(rows[0], "x")},
        {"id": "nothing", **dict.fromkeys(rows[0], "")},
    ]
    path = tmp_path / "hard.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({**rows[0], **change} for change in changes)
    found = accuracy(path)
    assert {row.name for row in found.rows} >= {"new chip", "no flops", "no time"}
    assert all(0.1 < row.left_out_s < 1e4 for row in found.rows)
    assert len(found.rows) + len(found.refused) == len(changes)
    assert all(reason for _, reason in found.refused)


def test_published_comparisons_are_called_right() -> None:
    found = call_rankings()
    assert not [call.name for call in found.calls if not call.right]
    assert len(found.calls) >= 55
    assert sum(call.same_sign for call in found.calls) >= 50
    assert len(found.calls) + len(found.not_called) == 63


def test_a_table_that_is_no_table_of_comparisons_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rankings.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="is no table of comparisons"):
        call_rankings(path)
    path.write_text(
        "id,kind,same_program,model_config,chip_slice,option_a,option_b,better\n"
        'X,sharding,train step,"a model nobody knows",v5e 1x256 vs 2x256,fsdp=256,fsdp=256,A\n'
        'Y,sharding,train step,"llama2-70b, seq 4096",v5e 1x7 vs 1x9,fsdp=7,fsdp=9,A\n',
        encoding="utf-8",
    )
    found = call_rankings(path)
    assert dict(found.not_called) == {
        "X": "no model is known in 'a model nobody knows'",
        "Y": "there is no slice of 7 chips",
    }


def test_default_models_follow_their_rule() -> None:
    sizes = {
        billions: model_named(f"maxtext-default-{billions}b").d_model
        for billions in (16, 32, 128, 1024)
    }
    assert sizes == {16: 4096, 32: 8192, 128: 8192, 1024: 16384}


@pytest.mark.parametrize(
    ("pod", "chips", "shape"),
    [((16, 20, 28), 64, "4x4x4"), ((16, 20, 28), 4, "2x2x1"), ((16, 16), 32, "4x8")],
)
def test_slices_without_a_shape_are_taken_compact(
    pod: tuple[int, ...], chips: int, shape: str
) -> None:
    assert compact_shape(pod, chips) == shape


@pytest.fixture
def few(tmp_path: Path) -> list[str]:
    """Options that name small files; of two comparisons one says the contrary of what is true."""
    options = []
    for word, count in (("points", 3), ("rankings", 2)):
        path = tmp_path / f"{word}.csv"
        lines = FILES.joinpath(f"{word}.csv").read_text("utf-8").splitlines()
        text = "\n".join(lines[: 1 + count])
        path.write_text(text.replace(",1822,10382,ms,A,", ",10382,1822,ms,B,"), encoding="utf-8")
        options += [f"--{word}", str(path)]
    return options


def test_the_command_prints_everything_as_json(
    few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accuracy", "--json", *few]) == 0
    read = json.loads(capsys.readouterr().out)
    assert len(read["points"]["rows"]) == 3
    assert read["rankings"]["right"] == 1


def test_the_command_prints_tables_and_names_bad_files(
    few: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accuracy", *few]) == 0
    out = capsys.readouterr().out
    assert "Spearman" in out
    assert "wrong: R38" in out
    assert main(["accuracy", "--points", "nowhere.csv"]) == 2
    assert "cannot be read" in capsys.readouterr().err
