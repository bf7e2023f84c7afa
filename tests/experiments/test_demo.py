from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from autoshard.experiments.comparison import Row
from autoshard.experiments.demo import comparison_frame, demo
from autoshard.experiments.workloads import make
from autoshard.validate import Figures


def mesh_of_two() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])


def test_the_demo_prints_plan_and_comparison_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    page = tmp_path / "report.html"
    compared = demo(make("mlp"), mesh_of_two(), page, said.append)
    text = capsys.readouterr().out
    assert text.startswith("Plan on x=2")
    assert "hand-made plan" in text
    assert page.stat().st_size > 50_000
    assert said[0] == "planning and compiling"
    assert [r.name for r in compared.rows] == ["autoshard", *make("mlp").experts]
    assert all((r.measured.step_s or 0) > 0 for r in compared.rows)
    assert (compared.validation.max_relative_error or 0) < 1e-4


def test_absent_figures_reach_the_report_as_nan() -> None:
    row = Row("a", Figures(1.0, 2.0, 3, 4.0), Figures(1.0, 2.0, 3), Figures(step_s=5.0))
    frame = comparison_frame([row])
    assert list(frame["figure"]) == ["predicted", "compiled", "measured"]
    assert frame["step_s"].isna().tolist() == [False, True, False]
    assert frame["peak_bytes"].isna().tolist() == [False, False, True]
