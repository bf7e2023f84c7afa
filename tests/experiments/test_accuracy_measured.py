from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest

from autoshard import cli
from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import load_calibration
from autoshard.errors import InputError
from autoshard.experiments.accuracy_measured import (
    BEGIN,
    END,
    SAMPLES,
    Row,
    Summary,
    Trial,
    check,
    load,
    plans,
    table,
    write,
)
from autoshard.experiments.workloads import make

MESH = jax.make_mesh((4, 2), ("data", "model"))


def row(*times: tuple[float, float], workload: str = "mlp") -> Row:
    """A row of trials that are (predicted, measured)."""
    trials = tuple(
        Trial(str(n), predicted, measured, measured, measured, predicted, 0.0, 0)
        for n, (predicted, measured) in enumerate(times)
    )
    return Row(workload, load_calibration().date, trials, 5, 1.0)


def test_error_rank_correlation_and_regret_of_a_row_by_hand() -> None:
    found = row((1.0, 1.0), (2.0, 4.0), (3.0, 2.0), (1.1, 1.0))
    assert found.error == pytest.approx(0.3)
    # Pairs: 01 +, 02 +, 03 0 (measured equal), 12 -, 13 +, 23 +.
    assert found.tau == pytest.approx((4 - 1) / 6)
    assert found.regret == 0.0
    assert row((1.0, 3.0), (2.0, 2.0)).regret == 0.5
    assert found.spread == 4.0


def test_plans_that_are_predicted_to_be_equal_are_no_evidence_of_a_ranking() -> None:
    assert row((1.0, 1.0), (1.0, 2.0), (1.0, 3.0)).tau == 0.0


def test_goals_are_over_all_workloads() -> None:
    good, bad = row((1.0, 1.0), (2.0, 2.0)), row((1.0, 3.0), (2.0, 2.0), workload="moe")
    assert Summary.of([good]).holds
    both = Summary.of([good, bad])
    assert (both.tau, both.regret) == (-1.0, 0.25)
    assert not both.holds
    assert "not met" in str(both)


def test_rows_are_kept_until_the_machine_is_calibrated_anew(tmp_path: Path) -> None:
    file, calibration = tmp_path / "rows.jsonl", load_calibration()
    mine = row((1.0, 2.0))
    file.write_text(json.dumps(asdict(mine)) + '\n{"cut off', "utf-8")
    assert load(file, calibration) == {"mlp": mine}
    assert load(file, replace(calibration, date="2000-01-01")) == {}
    assert load(tmp_path / "none.jsonl", calibration) == {}


def test_the_table_is_written_between_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    rows = [row((1.0, 1.0), (2.0, 2.0))]
    write(page, rows, load_calibration())
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n{BEGIN}\n{table(rows)}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    page.write_text("no marks", "utf-8")
    with pytest.raises(InputError, match="where the table belongs"):
        write(page, rows, load_calibration())


@pytest.mark.slow
def test_plans_of_a_workload_are_different_ones_and_the_chosen_one_is_first() -> None:
    model = CalibratedModel(load_calibration(), devices=8)
    found = list(plans(make("mlp"), MESH, model, 7))
    names = [name for name, _, _ in found]
    assert names[0] == "auto"
    assert len({*names}) == len(names) == 7
    assert {"dp", "fsdp", "tp"} <= {*names}
    steps = [plan.predicted.step_s for _, _, plan in found]
    assert steps[0] == min(steps)
    assert len({*steps}) > 4


@pytest.mark.slow
def test_a_workload_is_predicted_and_timed() -> None:
    found = check(make("mlp"), MESH, load_calibration(), count=2, rounds=2, budget_s=5.0)
    assert [t.name for t in found.trials] == ["auto", "dp"]
    assert all(t.low_s <= t.measured_s <= t.high_s for t in found.trials)
    assert all(t.predicted_s > 0 < t.measured_s for t in found.trials)


def test_from_the_shell_a_workload_that_there_is_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["accuracy", "--measured", "--rows", str(tmp_path / "rows.jsonl")]
    assert cli.main([*words, "--only", "nothing"]) == 2
    assert "no workload holds 'nothing'" in capsys.readouterr().err
    assert cli.main([*words, "--compiled"]) == 2
    assert "leave out --points" in capsys.readouterr().err


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_workloads_of_their_names(name: str) -> None:
    assert make(name, **SAMPLES[name]).experts
