"""Cost models as text and back, so that a saved plan can be priced again anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.calibration import Calibration
from autoshard.cost_models.chips import CHIPS
from autoshard.cost_models.protocol import CostModel
from autoshard.cost_models.topology import parse_layout
from autoshard.errors import InputError


def describe(model: CostModel) -> str | None:
    """A cost model of this package as text; None for the caller's own, or one of a chip of theirs.

    A calibrated model is kept with its fits, an analytic one with the name of its chip and the
    options it was made with.
    """
    if type(model) is CalibratedModel:
        fits = replace(model.calibration, observations=())
        row = {"kind": "calibrated", "devices": model.devices, "calibration": fits.to_json()}
        return json.dumps(row)
    if (
        type(model) is AnalyticModel
        and model.chip.name in tuple(CHIPS)
        and model.chip == CHIPS[model.chip.name]
    ):
        where = {} if model.layout is None else {"layout": str(model.layout)}
        return json.dumps({"kind": "analytic", "chip": model.chip.name, **model.options, **where})
    return None


def restore(text: str) -> CostModel:
    """The cost model that :func:`describe` wrote.

    Raises:
        InputError: It is no such text.
    """
    try:
        row: dict[str, Any] = json.loads(text)
        kind = row.pop("kind")
        if kind == "calibrated":
            calibration = Calibration.from_json(row.pop("calibration"), at="a saved cost model")
            return CalibratedModel(calibration, **row)
        if kind == "analytic":
            where = row.pop("layout", None)
            layout = None if where is None else parse_layout(where)
            return AnalyticModel(row.pop("chip"), layout=layout, **row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(str(error)) from error
    raise _unreadable(f"kind {kind!r}")


def _unreadable(what: str) -> InputError:
    return InputError(
        f"not a cost model that was saved: {what}", fix="plan again with this version"
    )
