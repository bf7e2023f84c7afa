from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import autoshard
from autoshard.cost_models import named_cost_model
from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.measured import MeasuredModel, Measurement, load_measurements
from autoshard.cost_models.protocol import CostModel, MeshAxis, Work
from autoshard.cost_models.topology import Topology
from autoshard.errors import AutoshardError

BASE = AnalyticModel("v5e")
DOT, ADD = "stablehlo.dot_general", "stablehlo.add"
TABLE = (
    Measurement(DOT, "bf16", (1, 1024, 1024, 1024), 5e-5),
    Measurement(DOT, "bf16", (1, 8192, 1024, 1024), 2e-4),
    Measurement(ADD, "f32", (1e6,), 4e-6),
    Measurement(ADD, "f32", (1e8,), 3e-4),
    Measurement("all_gather", "", (4, 1e6), 5e-5),
    Measurement("all_gather", "", (4, 1e8), 2e-3),
)
MODEL = MeasuredModel(TABLE, BASE)
FOUR = (MeshAxis("x", 4),)


def product(m: int, n: int, k: int, dtype: str = "bf16") -> Work:
    dims = np.array([[1, m, n, k]])
    nbytes = np.array([2.0 * (m * k + k * n + m * n)])
    return Work(DOT, dtype, 2.0 * dims.prod(axis=1), nbytes, dims)


def add(nbytes: float) -> Work:
    return Work(ADD, "f32", np.array([nbytes / 12]), np.array([nbytes]))


def test_it_is_a_cost_model() -> None:
    assert isinstance(MODEL, CostModel)
    assert MODEL.name == "v5e+table"
    assert MODEL.memory_bytes == BASE.memory_bytes


def test_what_was_measured_costs_what_was_measured() -> None:
    assert MODEL.op_s(product(1024, 1024, 1024))[0] == pytest.approx(5e-5)
    assert MODEL.op_s(product(8192, 1024, 1024))[0] == pytest.approx(2e-4)
    assert MODEL.op_s(add(1e8))[0] == pytest.approx(3e-4, rel=0.02)
    times = MODEL.collective_s("all_gather", np.array([1e6, 1e8]), FOUR)
    assert times == pytest.approx([5e-5, 2e-3])


def test_what_was_not_measured_is_scaled_from_the_nearest_that_was() -> None:
    bigger = product(1024, 2048, 1024)
    scale = BASE.op_s(bigger)[0] / BASE.op_s(product(1024, 1024, 1024))[0]
    assert MODEL.op_s(bigger)[0] == pytest.approx(5e-5 * scale)


def test_what_nothing_like_was_measured_of_is_left_to_the_model_underneath() -> None:
    for work in (product(8, 8, 8), product(1024, 1024, 1024, "i8")):
        assert MODEL.op_s(work) == BASE.op_s(work)
    tanh = Work("stablehlo.tanh", "f32", np.array([1e6]), np.array([1e6]))
    assert MODEL.op_s(tanh) == BASE.op_s(tanh)
    eight = (MeshAxis("x", 8),)
    nbytes = np.array([1e6])
    assert MODEL.collective_s("all_gather", nbytes, eight) == BASE.collective_s(
        "all_gather", nbytes, eight
    )


def test_a_group_over_two_axes_differs_from_one_as_the_model_underneath_says() -> None:
    nbytes, two = np.array([1e7]), (MeshAxis("x", 2), MeshAxis("y", 2))
    scale = BASE.collective_s("all_gather", nbytes, two) / BASE.collective_s(
        "all_gather", nbytes, FOUR
    )
    measured = MODEL.collective_s("all_gather", nbytes, FOUR)
    assert MODEL.collective_s("all_gather", nbytes, two) == pytest.approx(measured * scale)


@given(st.floats(1e3, 1e10), st.floats(1e3, 1e10))
def test_an_op_is_never_faster_than_its_arithmetic_or_its_traffic(one: float, two: float) -> None:
    for work in (add(one), add(two)):
        assert MODEL.op_s(work) >= MODEL.compute_s(work)
        assert MODEL.op_s(work) >= MODEL.hbm_s(work)


FILE = """device,op,dtype,batch,m,n,k,bytes,devices,seconds
v5e,stablehlo.dot_general,bf16,1,1024,1024,1024,,,5e-5
v5e,stablehlo.add,f32,,,,,1e6,,4e-6
v5e,all_gather,,,,,,1e6,4,5e-5
"""


def test_a_file_of_measurements_is_named_like_any_cost_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(FILE, encoding="utf-8")
    device, table = load_measurements(path)
    assert device == "v5e"
    assert set(table) == {TABLE[0], TABLE[2], TABLE[4]}
    model = named_cost_model(str(path), {"x": 4})
    assert model.op_s(product(1024, 1024, 1024))[0] == pytest.approx(5e-5)
    mesh = Topology("cpu:4").mesh({"x": 4})
    plan = autoshard(lambda x: x + x, mesh, cost_model=str(path)).plan(np.ones((256, 256)))
    assert plan.predicted.step_s > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("5e-5\n", "\n", "needs batch, m, n, k, seconds"),
        ("1e6,4,", "1e6,,", "needs devices, bytes, seconds"),
        ("add,f32", "add,", "needs op, dtype"),
        ("4e-6", "-1", "numbers above 0"),
        ("v5e,all", "v6e,all", "does not say of which device"),
        ("v5e", "v5x", "no cost model is called 'v5x'"),
    ],
)
def test_what_a_file_of_measurements_lacks_is_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(AutoshardError, match=message):
        named_cost_model(str(path), {"x": 4})
    with pytest.raises(AutoshardError, match="cannot be read"):
        named_cost_model(str(tmp_path / "nowhere.csv"), {"x": 4})
