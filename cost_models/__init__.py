"""What things cost on a device mesh: chips, collectives, compute, memory, and what XLA says.

A cost model answers the questions of :class:`~autoshard.cost_models.protocol.CostModel`. Rows of
:data:`COST_MODELS` are called without arguments: ``COST_MODELS["v5e"]()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InputError
from autoshard.table import Table


class Device(Protocol):
    """The part of a ``jax.Device`` that says what it costs."""

    @property
    def platform(self) -> str:
        """``cpu``, ``tpu`` or ``gpu``."""
        ...

    @property
    def device_kind(self) -> str:
        """E.g. ``TPU v5 lite``."""
        ...


_ANALYTIC = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x", "a100", "h100", "h200", "b200", "gb200")

COST_MODELS: Table[Callable[[], CostModel]] = Table(
    "cost model",
    {
        "cpu": "autoshard.cost_models.calibrated:cpu",
        **{name: f"autoshard.cost_models.analytic:{name}" for name in _ANALYTIC},
    },
)
"""Cost models by name: ``cpu`` from the machine's calibration, others from a chip's figures."""


def default_cost_model(devices: Sequence[Device]) -> CostModel:
    """The cost model that fits the devices of a mesh.

    Args:
        devices: The devices, all of one kind.

    Returns:
        For CPU devices the calibrated model at that number of devices, else the analytic model of
        the chip.

    Raises:
        InputError: There are no devices, or no model is known for their kind.
    """
    if not devices:
        raise InputError("a mesh without devices has no cost model", fix="give at least one device")
    # Imported here because the models read data files that `import autoshard` does not need.
    from autoshard.cost_models.analytic import analytic_model, chip_of_kind
    from autoshard.cost_models.calibrated import CalibratedModel
    from autoshard.cost_models.calibration import load_calibration

    if devices[0].platform == "cpu":
        return CalibratedModel(load_calibration(), devices=len(devices))
    return analytic_model(chip_of_kind(devices[0].device_kind))
