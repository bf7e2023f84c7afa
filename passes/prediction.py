"""What a program is predicted to cost: under the best plan, or under the shardings it states."""

from __future__ import annotations

import warnings
from dataclasses import replace

from jax.extend.mlir import ir

from autoshard.cost_models import COST_MODELS
from autoshard.errors import UnknownOpWarning
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.manager import Instrument, Step
from autoshard.passes.module_state import copy_of, to_bytes
from autoshard.passes.patterns import sharding_of
from autoshard.passes.pipeline import Pipeline
from autoshard.plan_parts import Predicted
from autoshard.planner import plan_module
from autoshard.program import arrays, main_block
from autoshard.shardings import MeshShape, splitting

TIME_LIMIT_S = 10.0
"""Time that the solver may take for one prediction [s]."""

ONE_DEVICE = MeshShape(("device",), (1,))
"""The mesh of a program that is for none."""


def predict(module: ir.Module, context: PassContext) -> Predicted:
    """Predicted figures of a module, which is left as it is.

    Shardings that the module states are kept; all others are those of the best plan found.
    """
    mesh = context.mesh or ONE_DEVICE
    given = _with_stated(module, context.boundaries_of(module), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOpWarning)  # told where the program is planned
        plan = plan_module(
            copy_of(module),
            given.arguments,
            given.results,
            mesh,
            ties=given.ties,
            cost_model=context.cost_model or COST_MODELS["cpu"](),
            time_limit_s=min(TIME_LIMIT_S, context.time_limit_s),
        )
    return plan.predicted


def _with_stated(module: ir.Module, given: Boundaries, mesh: MeshShape) -> Boundaries:
    """The boundaries with shardings of the arguments pinned that the module states."""
    arguments = []
    for boundary, value in zip(given.arguments, arrays(main_block(module).arguments), strict=True):
        stated = sharding_of(value)
        pin = None if stated is None else splitting(stated, mesh)
        arguments.append(boundary if pin is None else replace(boundary, pin=pin))
    return Boundaries(tuple(arguments), given.results, given.ties)


class Prediction(Instrument):
    """Predicted time and peak memory before the first pass and after every pass.

    Attributes:
        before_first: Of the program that the pipeline is given.
        passes: Of what each pass has left.
    """

    def __init__(self) -> None:
        self.before_first: Predicted | None = None
        self.passes: list[Predicted] = []
        self._last = b""

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Predict what the pipeline is given."""
        self.before_first = predict(module, context)
        self._last = to_bytes(module)

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Predict what the pass has left, if that is something else."""
        assert self.before_first is not None
        data = to_bytes(module)
        last = self.passes[-1] if self.passes else self.before_first
        self.passes.append(last if data == self._last else predict(module, context))
        self._last = data
