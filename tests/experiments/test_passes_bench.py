"""The table of what passes buy: rows that are not run again stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.experiments.passes_bench import LINES, PAGE, Bench
from autoshard.experiments.passes_bench_rewriting import collective_matmul
from autoshard.experiments.passes_bench_row import Row
from autoshard.passes.registry import info_of


def test_a_row_shows_the_change_and_what_is_not_known() -> None:
    row = Row("a program", "bytes sent", (2048.0, 1024.0), None, "why")
    assert row.text("pass") == "| pass | a program | bytes sent | 2,048 → 1,024 (-50%) | - | why |"
    assert "0 → 1.5 |" in Row("p", "ms", (0.0, 1.5), (0.25, 0.5)).text("x")


def test_rows_that_are_not_run_again_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    first = {
        "b": [Row("p", "f", (1.0, 2.0), None).text("b")],
        "a": [Row("q", "f", None, None).text("a")],
    }
    page.write_text(Bench(first).page(1.0), encoding="utf-8")
    read = Bench.read(page)
    assert dict(read.rows) == first
    assert Bench(read.rows).page(1.0).index("| a |") < Bench(read.rows).page(1.0).index("| b |")
    assert Bench.read(tmp_path / "none.md").rows == {}


def test_every_line_is_a_pass_and_on_the_page() -> None:
    assert {info_of(name).name for name in LINES} == set(LINES)
    assert set(Bench.read(PAGE).rows) == set(LINES)


@pytest.mark.slow
def test_a_line_gives_rows() -> None:
    rows = collective_matmul()
    gains = [row for row in rows if row.predicted is not None]
    same = [row for row in rows if row.compiled is not None]
    assert all(row.predicted[1] < row.predicted[0] for row in gains if row.predicted)
    assert all(row.compiled[0] == row.compiled[1] for row in same if row.compiled)
    assert len(gains) == len(same) == 2
