from __future__ import annotations

from autoshard.experiments.partitioners import compare, page
from autoshard.experiments.workloads import make
from tests.lowering import mesh_of


def test_a_page_says_what_each_partitioner_made_of_a_plan() -> None:
    row = compare(make("mlp"), mesh_of(4, 2), repeats=2, budget_s=5.0)
    assert [v.partitioner for v in row.validations] == ["xla", "shardy"]
    text = page([row], [("haiku_lstm", "haiku is missing")], 1.0)
    assert "1 run through Shardy" in text
    assert text.count("| mlp |") == 2
    assert "None." in text
    assert "- haiku_lstm: haiku is missing" in text
