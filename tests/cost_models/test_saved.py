"""A cost model that is kept as text prices as before."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autoshard.cost_models import COST_MODELS
from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import load_calibration
from autoshard.cost_models.chips import CHIPS
from autoshard.cost_models.protocol import CostModel, MeshAxis, Work
from autoshard.cost_models.saved import describe, restore
from autoshard.errors import InputError

MODELS: list[Any] = [
    CalibratedModel(load_calibration(), devices=32),
    AnalyticModel("v5p", f32_passes=2.0, hbm_efficiency=0.5),
    *(COST_MODELS[name]() for name in COST_MODELS),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_restored_model_gives_the_same_prices(model: CostModel) -> None:
    text = describe(model)
    assert text is not None
    again = restore(text)
    assert (again.name, again.memory_bytes, again.dispatch_s, again.compiler) == (
        model.name,
        model.memory_bytes,
        model.dispatch_s,
        model.compiler,
    )
    sizes = np.array([[1, 64, 64, 64], [2, 512, 128, 1024]])
    work = Work(
        "stablehlo.dot_general", "f32", 2.0 * sizes.prod(axis=1), np.array([3e4, 2e6]), sizes
    )
    assert (again.op_s(work) == model.op_s(work)).all()
    axes = (MeshAxis("a", 4),)
    nbytes = np.array([100.0, 1e7])
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"):
        before = model.collective_s(kind, nbytes, axes)
        assert (again.collective_s(kind, nbytes, axes) == before).all()


def test_a_model_of_the_callers_own_has_no_text() -> None:
    class Mine(AnalyticModel):
        pass

    assert describe(Mine("v5e")) is None
    assert describe(AnalyticModel(dataclasses.replace(CHIPS["v5e"], name="mine"))) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "other"}', '{"kind": "analytic"}'])
def test_what_is_no_saved_model_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a cost model"):
        restore(text)
