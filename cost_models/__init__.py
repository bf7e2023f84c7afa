"""What things cost on a device mesh: chips, collectives, compute, memory, and what XLA says.

A cost model answers the questions of :class:`~autoshard.cost_models.protocol.CostModel`. Rows of
:data:`COST_MODELS` are called without arguments: ``COST_MODELS["v5e"]()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.layout import layout_of
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


def default_cost_model(
    devices: Sequence[Device] | NDArray[Any], axis_names: Sequence[str] = ()
) -> CostModel:
    """The cost model that fits the devices of a mesh.

    Args:
        devices: The devices, all of one kind; with axis names, as an array in the mesh's shape.
        axis_names: The mesh's axes. With them, collectives on a TPU are priced where its axes lie,
            if the devices say where they are and make up a whole slice.

    Returns:
        For CPU devices the calibrated model at that number of devices, else the analytic model of
        the chip.

    Raises:
        InputError: There are no devices, or no model is known for their kind.
    """
    flat: list[Any] = list(devices.flat) if isinstance(devices, np.ndarray) else list(devices)
    if not flat:
        raise InputError("a mesh without devices has no cost model", fix="give at least one device")
    # Imported here because the models read data files that `import autoshard` does not need.
    from autoshard.cost_models.analytic import AnalyticModel, chip_of_kind
    from autoshard.cost_models.calibrated import CalibratedModel
    from autoshard.cost_models.calibration import load_calibration
    from autoshard.cost_models.topology import topology_of

    if flat[0].platform == "cpu":
        return CalibratedModel(load_calibration(), devices=len(flat))
    topology = topology_of(flat)
    layout = None
    if topology is not None and isinstance(devices, np.ndarray) and axis_names:
        layout = layout_of(devices, axis_names, topology)
    known = None if topology is None else topology.chip
    return AnalyticModel(known or chip_of_kind(flat[0].device_kind), layout=layout)


def named_cost_model(name: str, axis_sizes: Mapping[str, int]) -> CostModel:
    """A cost model by the text a user gives.

    Args:
        name: A row of :data:`COST_MODELS`; a topology, ``v5e:4x4``, on which the mesh is laid out
            best; a file with a chip, ``mychip.toml``; or a table of measurements, ``mine.csv``
            (:mod:`~autoshard.cost_models.measured`).
        axis_sizes: Sizes of the mesh's axes.

    Raises:
        UnknownNameError: There is no such model or chip.
        InputError: The topology or file cannot be used, or the mesh does not fit.
    """
    if name.endswith(".csv"):
        from autoshard.cost_models.measured import MeasuredModel, load_measurements

        device, table = load_measurements(name)
        return MeasuredModel(table, named_cost_model(device, axis_sizes))
    if ":" not in name and not name.partition("#")[0].endswith((".toml", ".json")):
        return COST_MODELS[name]()
    from autoshard.cost_models.analytic import AnalyticModel
    from autoshard.cost_models.calibrated import CalibratedModel
    from autoshard.cost_models.calibration import load_calibration
    from autoshard.cost_models.topology import Topology

    if ":" not in name:
        return AnalyticModel(name)
    topology = Topology(name)
    if topology.chip is None:
        return CalibratedModel(load_calibration(), devices=topology.devices)
    return AnalyticModel(topology.chip, layout=topology.layouts(axis_sizes)[0])
