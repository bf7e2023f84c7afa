from __future__ import annotations

import jax
import numpy as np
import pytest

from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import Calibration
from autoshard.cost_models.microbenchmark import MIN_ROUNDS, calibrate
from autoshard.cost_models.protocol import MeshAxis, Work
from autoshard.errors import InputError


@pytest.fixture(scope="module")
def measured() -> tuple[Calibration, list[tuple[str, float]]]:
    """A real calibration, as short as it gets, on four devices."""
    said: list[tuple[str, float]] = []
    calibration = calibrate(
        jax.devices()[:4], budget_s=1.0, progress=lambda *words: said.append(words)
    )
    return calibration, said


@pytest.mark.slow
def test_a_short_calibration_measures_everything_that_a_model_needs(
    measured: tuple[Calibration, list[tuple[str, float]]],
) -> None:
    calibration, said = measured
    assert calibration.devices == 4
    assert calibration.cores >= 1
    assert 0 < calibration.cpu_share <= 1.5
    assert 0 < calibration.dispatch_s < 1
    assert all(o.seconds > 0 and o.samples >= MIN_ROUNDS for o in calibration.observations)
    assert Calibration.from_json(calibration.to_json()) == calibration
    told = calibration.held_out()
    assert {"all_reduce", "matmul", "elementwise", "program"} <= told.keys()
    assert all(error.worst >= error.median >= 0 < error.points for error in told.values())
    assert 0 < calibration.op_factor < 100
    assert 0 < calibration.collective_factor < 100
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert any("timing" in words for words, _ in said)


@pytest.mark.slow
def test_measured_prices_grow_with_the_work(
    measured: tuple[Calibration, list[tuple[str, float]]],
) -> None:
    model = CalibratedModel(measured[0])
    dims = np.array([[1, 64, 64, 64], [1, 512, 512, 512]])
    flops = 2.0 * dims.prod(axis=1)
    small, large = model.op_s(
        Work("stablehlo.dot_general", "f32", flops, np.array([49152.0, 3145728.0]), dims)
    )
    # 512 times the arithmetic: well over ten times the time, whatever else the machine does.
    assert large > 10 * small > 0
    few, many = model.collective_s("all_reduce", np.array([8192.0, 64e6]), (MeshAxis("x", 4),))
    assert many > 10 * few > 0


def test_a_single_device_cannot_be_calibrated() -> None:
    with pytest.raises(InputError, match="has no collectives to measure"):
        calibrate(jax.devices()[:1])
