"""Planning grows no faster than the program: what repeated layers have in common is made once."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.experiments.growth import Growth, Task, exponent, main, table
from autoshard.experiments.workloads import make
from autoshard.pricing import Priced, price
from tests.lowering import MESH, Simple, graph_of


def priced(layers: int) -> Priced:
    workload = make("llama_unrolled", "tiny", layers=layers)
    return price(graph_of(workload.fn, *workload.args), MESH, Simple())


def test_more_layers_make_no_more_strategies_and_matrices() -> None:
    two, four = priced(2), priced(4)
    assert len(four.nodes) > 1.5 * len(two.nodes)
    sets = [{id(n.strategies) for n in p.nodes} for p in (two, four)]
    matrices = [{id(m) for m in p.problem.edge_costs} for p in (two, four)]
    assert len(sets[0]) == len(sets[1])
    vectors = [{id(v) for v in (*p.problem.costs, *p.problem.usages)} for p in (two, four)]
    assert len(vectors[1]) < 1.05 * len(vectors[0])
    assert len(matrices[0]) == len(matrices[1])


def row(layers: int, seconds: float) -> Growth:
    task = Task("llama_unrolled", "tiny", layers, "4,2", "v5e")
    return Growth(task, 1.0, seconds, {"solve": 0.5}, seconds, 2**30, 9, 9, 1.0, 1.0, 5, "", 0.0)


def test_the_exponent_is_that_of_the_larger_half() -> None:
    linear = [row(n, 0.1 * n) for n in (8, 16, 32)]
    assert exponent(linear) == pytest.approx(1.0)
    assert exponent([row(1, 9.0), row(2, 9.0), row(4, 9.0), *linear]) == pytest.approx(1.0)
    assert exponent([row(n, n**2) for n in (2, 4)]) == pytest.approx(2.0)
    assert exponent([row(4, 1.0)]) is None


def test_a_row_says_what_was_proved() -> None:
    sure, unsure = row(1, 1.0), dataclasses.replace(row(1, 1.0), gap=0.05)
    assert "optimal" in table([sure])
    assert "within 5.00%" in table([unsure])


@pytest.mark.slow
def test_the_command_measures_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--layers", "1", "--meshes", "--mesh", "2,2", "--size", "tiny", "--cost-model", "v5e"])
    printed = capsys.readouterr().out
    assert "| llama_unrolled | 1 | (2,2) | v5e |" in printed
