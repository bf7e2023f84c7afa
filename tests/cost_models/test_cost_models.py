"""Every row of the table keeps the promises of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models import COST_MODELS, default_cost_model
from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.protocol import CollectiveKind, CostModel, MeshAxis, Work, wire_bytes
from autoshard.errors import InputError, UnknownNameError

ROWS = sorted(COST_MODELS)
KINDS: tuple[CollectiveKind, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "permute",
)
DTYPES = ("bf16", "f32", "f16", "i8", "f8E4M3FN", "i32", "i1", "f64", "ui4")

rows = st.sampled_from(ROWS)
axes = st.lists(st.integers(1, 16), min_size=1, max_size=3).map(
    lambda sizes: tuple(MeshAxis(f"a{i}", n) for i, n in enumerate(sizes))
)


@dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_a_cost_model_of_that_name(row: str) -> None:
    model = COST_MODELS[row]()
    assert isinstance(model, CostModel)
    assert model.name.startswith(row)
    assert model.memory_bytes is None or model.memory_bytes > 1e9
    assert (model.compiler == "cpu") is (row == "cpu")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_of_every_type_have_a_finite_price(row: str, dtype: str) -> None:
    model = COST_MODELS[row]()
    dims = np.array([[1, 8, 16, 32], [4, 128, 256, 512], [0, 0, 0, 0]])
    flops = 2.0 * dims.prod(axis=1)
    nbytes = np.array([1e3, 1e6, 0.0])
    for work in (
        Work("stablehlo.dot_general", dtype, flops, nbytes, dims),
        Work("stablehlo.tanh", dtype, flops, nbytes),
    ):
        for times in (model.compute_s(work), model.hbm_s(work), model.op_s(work)):
            assert times.shape == (3,)
            assert times.dtype == np.float64
            assert np.isfinite(times).all()
            assert (times >= 0).all()
            assert times[2] == 0
        assert (model.op_s(work) >= model.compute_s(work)).all()
        assert (model.op_s(work) >= model.hbm_s(work)).all()


@given(rows, st.sampled_from(KINDS), axes, st.floats(0, 1e11), st.floats(0, 1e11))
def test_more_bytes_never_cost_less(
    row: str, kind: CollectiveKind, group: tuple[MeshAxis, ...], one: float, two: float
) -> None:
    few, many = COST_MODELS[row]().collective_s(kind, np.sort(np.array([one, two])), group)
    assert 0 <= few <= many


@given(rows, st.sampled_from(KINDS), st.floats(0, 1e11))
def test_an_axis_of_one_device_costs_nothing(row: str, kind: CollectiveKind, nbytes: float) -> None:
    model = COST_MODELS[row]()
    one = (MeshAxis("x", 1), MeshAxis("y", 1))
    assert model.collective_s(kind, np.array([nbytes]), one) == [0]
    assert model.collective_s(kind, np.array([nbytes]), ()) == [0]


@given(rows, st.floats(1, 1e10), st.floats(1, 1e10), st.floats(1, 4))
def test_more_work_never_takes_less_time(
    row: str, flops: float, nbytes: float, times: float
) -> None:
    model = COST_MODELS[row]()
    work = Work(
        "stablehlo.add", "f32", np.array([flops, flops * times]), np.array([nbytes, nbytes * times])
    )
    less, more = model.op_s(work)
    assert 0 < less <= more


@pytest.mark.parametrize("row", [r for r in ROWS if r != "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_network_is_faster_than_its_links(row: str, kind: CollectiveKind) -> None:
    # What must leave a device, over every link it could have.
    model = COST_MODELS[row]()
    links = {"tpu": 6 * 1e11, "gpu": 9e11}["tpu" if row.startswith("v") else "gpu"]
    for size in (2, 4, 8, 16):
        taken = model.collective_s(kind, np.array([1e9]), (MeshAxis("x", size),))[0]
        assert taken >= wire_bytes(kind, 1e9, size) / links


def test_an_unknown_cost_model_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no cost model is called 'v5'"):
        COST_MODELS["v5"]


def test_cpu_meshes_get_the_calibrated_model_at_their_size() -> None:
    work = Work("stablehlo.add", "f32", np.zeros(1), np.array([1e6]))
    eight, sixteen = (default_cost_model([FakeDevice("cpu", "cpu")] * n) for n in (8, 16))
    assert isinstance(eight, CalibratedModel)
    assert sixteen.op_s(work) == pytest.approx(2 * eight.op_s(work))


def test_tpu_meshes_get_the_model_of_their_chip() -> None:
    assert default_cost_model([FakeDevice("tpu", "TPU v5 lite")] * 4).name == "v5e"
    assert default_cost_model([FakeDevice("gpu", "NVIDIA H200")] * 4).name == "h200"


def test_a_mesh_without_devices_has_no_cost_model() -> None:
    with pytest.raises(InputError, match="a mesh without devices"):
        default_cost_model([])
