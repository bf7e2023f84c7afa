from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import (
    Calibration,
    HeldOut,
    LinearFit,
    Observation,
    calibration_path,
    load_calibration,
    save_calibration,
)
from autoshard.cost_models.fitting import fit_linear, held_out, predicted_s
from autoshard.cost_models.protocol import CollectiveKind, MeshAxis, Work
from autoshard.errors import InputError

KINDS: tuple[CollectiveKind, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "permute",
)


def collective(fixed_us: float, ns_per_byte: float) -> LinearFit:
    return LinearFit(fixed_us * 1e-6, {"bytes": ns_per_byte * 1e-9}, None, 0.0, 0.1, 6)


@pytest.fixture
def calibration() -> Calibration:
    """Round numbers that are easy to follow by hand; they come from no machine."""
    return Calibration(
        machine="a made-up processor",
        date="2020-01-01T00:00:00+00:00",
        jax_version="0.0",
        devices=8,
        cores=2,
        cpu_share=1.0,
        dispatch_s=2e-4,
        matmul={"f32": LinearFit(1e-5, {"flops": 1e-10, "bytes": 1e-9}, None, 0.0, 0.1, 9)},
        elementwise={
            "f32": LinearFit(
                2e-6, {"bytes": 5e-10, "transcendentals": 1e-9, "powers": 1e-8}, None, 0.0, 0.2, 8
            )
        },
        collectives={
            kind: {2: collective(40, 1), 4: collective(60, 2), 8: collective(80, 3)}
            for kind in KINDS
        },
        observations=(Observation("dispatch", 2e-4, 0.1, 5),),
    )


def test_a_saved_calibration_is_loaded_unchanged(calibration: Calibration, tmp_path: Path) -> None:
    file = save_calibration(calibration, tmp_path / "deep" / "cpu.json")
    assert load_calibration(file) == calibration
    assert [p.name for p in file.parent.iterdir()] == ["cpu.json"]


def test_the_calibration_lies_in_the_users_cache(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert save_calibration(calibration) == tmp_path / "autoshard" / "calibration.json"
    assert load_calibration() == calibration
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert calibration_path() == tmp_path / "home" / ".cache" / "autoshard" / "calibration.json"


def test_without_one_of_its_own_a_machine_gets_the_shipped_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = load_calibration()
    assert shipped.machine
    assert shipped.date
    assert shipped.jax_version
    assert len(shipped.observations) > 40


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        json.dumps({"format": "autoshard-calibration", "version": 0}),
        json.dumps({"format": "autoshard-calibration", "version": 1, "machine": "x"}),
    ],
)
def test_another_file_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(InputError, match="not a calibration of version 2") as error:
        load_calibration(file)
    assert str(file) in error.value.at
    assert "autoshard calibrate" in error.value.fix


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such calibration"):
        load_calibration(tmp_path / "none.json")


def test_a_matmul_takes_its_start_its_arithmetic_and_its_traffic(calibration: Calibration) -> None:
    dims = np.array([[1, 10, 10, 10]])
    work = Work("stablehlo.dot_general", "f32", np.array([1e6]), np.array([1e4]), dims)
    model = CalibratedModel(calibration)
    assert model.compute_s(work) == pytest.approx([1e-4])
    assert model.hbm_s(work) == pytest.approx([1e-5])
    assert model.op_s(work) == pytest.approx([1e-5 + 1e-4 + 1e-5])


def test_only_slow_elementwise_ops_pay_for_arithmetic(calibration: Calibration) -> None:
    model = CalibratedModel(calibration)
    for op, seconds in (
        ("stablehlo.add", 0.0),
        ("stablehlo.tanh", 1e-3),
        ("stablehlo.power", 1e-2),
    ):
        work = Work(op, "f32", np.array([1e6]), np.array([0.0]))
        assert model.op_s(work) == pytest.approx([seconds])


def test_more_devices_than_were_calibrated_crowd_the_cores(calibration: Calibration) -> None:
    work = Work("stablehlo.add", "f32", np.zeros(1), np.array([1e6]))
    times = {n: CalibratedModel(calibration, devices=n).op_s(work)[0] for n in (1, 2, 4, 8, 16)}
    assert times[16] == pytest.approx(2 * times[8])
    assert times[4] == pytest.approx(times[8] / 2)
    # Two cores: a second device costs nothing.
    assert times[1] == pytest.approx(times[2])


def test_unmeasured_group_sizes_lie_between_and_beyond_the_measured_ones(
    calibration: Calibration,
) -> None:
    model = CalibratedModel(calibration)

    def fixed_us(*sizes: int) -> float:
        axes = tuple(MeshAxis(f"a{i}", n) for i, n in enumerate(sizes))
        return float(model.collective_s("all_reduce", np.array([1e-9]), axes)[0] * 1e6)

    assert fixed_us(2) == pytest.approx(40)
    assert fixed_us(2, 2) == pytest.approx(60)
    assert 60 < fixed_us(6) < 80
    assert fixed_us(4, 4) == pytest.approx(100)
    assert fixed_us(1) == 0


def test_bytes_that_no_longer_fit_a_cache_cost_extra() -> None:
    sizes = [2.0**e for e in range(12, 25)]
    seconds = [1e-6 + 1e-10 * b + 4e-10 * max(0.0, b - 2**20) for b in sizes]
    fit = fit_linear(
        [{"bytes": b} for b in sizes], seconds, ["bytes"], knees_bytes=[2.0**18, 2.0**20, 2.0**22]
    )
    assert fit.near_bytes == 2**20
    assert fit.per_far_byte_s == pytest.approx(4e-10)
    assert list(fit.fixed_s + fit.bytes_s(np.array(sizes))) == pytest.approx(seconds)


def test_a_straight_line_gets_no_second_price() -> None:
    sizes = [2.0**e for e in range(12, 25)]
    fit = fit_linear(
        [{"bytes": b} for b in sizes],
        [1e-6 + 1e-10 * b for b in sizes],
        ["bytes"],
        knees_bytes=[2.0**18, 2.0**20],
    )
    assert fit.near_bytes is None


def test_an_outlier_of_a_doubtful_time_does_not_bend_the_fit() -> None:
    sizes = [1e3, 1e5, 1e6, 1e7]
    seconds = [1e-9, 1e-4, 1e-3, 1e-2]
    fit = fit_linear([{"bytes": b} for b in sizes], seconds, ["bytes"], doubt_s=[1e-5] * 4)
    assert fit.per_unit_s["bytes"] == pytest.approx(1e-9, rel=0.02)


def test_a_narrow_convolution_takes_as_long_as_a_wide_one_and_a_grouped_one_longer(
    calibration: Calibration,
) -> None:
    def convolution_s(model: CalibratedModel, groups: int, features: int) -> float:
        sizes = np.array([[groups, 1000, features, 100]])
        flops = 2.0 * sizes.prod(axis=1).astype(np.float64)
        work = Work("stablehlo.convolution", "f32", flops, np.zeros(1), sizes)
        return float(model.compute_s(work)[0])

    units = {"bytes": 0.0, "convolutions": 1e-3, "convolved": 1e-9, "grouped": 1e-8}
    measured = replace(calibration, elementwise={"f32": LinearFit(0.0, units, None, 0.0, 0.1, 6)})
    model = CalibratedModel(measured)
    assert convolution_s(model, 1, 4) == pytest.approx(1e-3 + 6.4e6 * 1e-9)
    assert convolution_s(model, 1, 32) == convolution_s(model, 1, 4)
    assert convolution_s(model, 2, 4) == pytest.approx(1e-3 + 1.6e6 * 1e-8)
    # One that was made before convolutions were measured prices them as matmuls.
    older = CalibratedModel(calibration)
    per_flop = calibration.matmul["f32"].per_unit_s["flops"]
    assert convolution_s(older, 1, 4) == pytest.approx(8e5 * per_flop)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1, 1e9)), min_size=4, max_size=20))
def test_a_fit_finds_the_constants_that_made_the_times(rows: list[tuple[float, float]]) -> None:
    work = [{"flops": a, "bytes": b} for a, b in rows]
    seconds = [1e-5 + 2e-10 * a + 3e-9 * b for a, b in rows]
    fit = fit_linear(work, seconds, ["flops", "bytes"])
    again = [
        fit.fixed_s + fit.per_unit_s["flops"] * a + fit.per_unit_s["bytes"] * b for a, b in rows
    ]
    assert again == pytest.approx(seconds, rel=1e-6)
    assert fit.error < 1e-6


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1.0)), min_size=1, max_size=12))
def test_no_fitted_constant_is_below_zero(rows: list[tuple[float, float]]) -> None:
    fit = fit_linear([{"bytes": b} for b, _ in rows], [s for _, s in rows], ["bytes"])
    assert fit.fixed_s >= 0
    assert fit.per_unit_s["bytes"] >= 0


def test_what_is_held_out_of_an_exact_law_is_predicted_exactly() -> None:
    work = [{"bytes": float(n), "powers": float(n % 3)} for n in range(1, 20)]
    seconds = [2.0 + 0.5 * w["bytes"] + 3.0 * w["powers"] for w in work]
    errors = held_out(work, seconds, ("bytes", "powers"))
    assert errors == pytest.approx([0.0] * 19, abs=1e-6)


def test_an_outlier_is_far_off_where_it_is_held_out() -> None:
    work = [{"bytes": float(n)} for n in range(1, 13)]
    seconds = [1.0 + w["bytes"] for w in work]
    seconds[4] *= 3
    errors = [abs(e) for e in held_out(work, seconds, ("bytes",)) if e is not None]
    assert max(range(12), key=errors.__getitem__) == 4
    assert errors[4] > 0.5


def test_work_of_a_kind_that_no_other_observation_has_cannot_be_held_out() -> None:
    work = [{"bytes": 1.0}, {"bytes": 2.0}, {"bytes": 3.0, "powers": 1.0}, {"bytes": 4.0}]
    errors = held_out(work, [1.0, 2.0, 9.0, 4.0], ("bytes", "powers"))
    assert errors[2] is None
    assert None not in (errors[0], errors[1], errors[3])
    assert held_out([{"bytes": 1.0}], [1.0], ("bytes",)) == (None,)


@given(st.lists(st.floats(1.0, 1e6), min_size=3, max_size=12))
def test_errors_of_what_is_held_out_never_look_at_the_time_itself(nbytes: list[float]) -> None:
    """Another time of one observation changes its own error by the times' ratio, no more."""
    work = [{"bytes": b} for b in nbytes]
    seconds = [1.0 + b for b in nbytes]
    before = held_out(work, seconds, ("bytes",), folds=len(work))
    after = held_out(work, [2 * seconds[0], *seconds[1:]], ("bytes",), folds=len(work))
    assert before[0] is not None
    assert after[0] is not None
    assert (1 + after[0]) * 2 == pytest.approx(1 + before[0])


def test_a_fit_predicts_what_it_was_fitted_to() -> None:
    fit = LinearFit(1.0, {"bytes": 2.0, "powers": 3.0}, 10.0, 5.0, 0.0, 3)
    assert predicted_s(fit, {"bytes": 12.0, "powers": 1.0}) == 1 + 24 + 10 + 3


def test_errors_are_told_by_kind(calibration: Calibration) -> None:
    seen = tuple(
        Observation(f"{kind}/{n}", 1.0, 0.1, 5, kind, error)
        for kind, errors in (("matmul", (0.1, -0.3, 0.2)), ("permute", (None, 0.5)))
        for n, error in enumerate(errors)
    )
    told = replace(calibration, observations=seen).held_out()
    assert told["matmul"] == HeldOut(median=0.2, worst=0.3, points=3)
    assert told["permute"] == HeldOut(median=0.5, worst=0.5, points=1)


def test_the_factors_of_programs_scale_ops_and_collectives_and_not_the_dispatch(
    calibration: Calibration,
) -> None:
    plain = CalibratedModel(calibration)
    slower = CalibratedModel(replace(calibration, op_factor=1.5, collective_factor=2.5))
    dims = np.array([[1, 64, 64, 64]])
    work = Work("stablehlo.dot_general", "f32", np.array([5e5]), np.array([5e4]), dims)
    assert slower.op_s(work) == pytest.approx(1.5 * plain.op_s(work))
    sent, axes = np.array([1e6]), (MeshAxis("x", 4),)
    assert slower.collective_s("all_reduce", sent, axes) == pytest.approx(
        2.5 * plain.collective_s("all_reduce", sent, axes)
    )
    assert slower.dispatch_s == plain.dispatch_s


def test_devices_that_do_not_share_cores_are_as_fast_however_many(
    calibration: Calibration,
) -> None:
    gpus = replace(calibration, platform="gpu", device_kind="a made-up GPU")
    few, many = (CalibratedModel(gpus, devices=n) for n in (2, 64))
    work = Work("stablehlo.add", "f32", np.array([0.0]), np.array([1e6]))
    assert few.op_s(work) == many.op_s(work)
    assert (few.name, few.compiler) == ("gpu", "gpu")
    assert calibration_path("gpu").name == "calibration-gpu.json"
