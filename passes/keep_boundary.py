"""A pass may not change what goes into and comes out of a program that others call."""

from __future__ import annotations

from jax.extend.mlir import ir

from autoshard.errors import InputError
from autoshard.passes.context import PassContext
from autoshard.passes.manager import Instrument, Step
from autoshard.passes.pipeline import Pipeline
from autoshard.program import main_block


class KeepBoundary(Instrument):
    """Refuses a pass that changes the number, the order or the types of arguments and results.

    Such a pass belongs into the function: its caller must know of the other shapes.
    """

    def __init__(self) -> None:
        self._types = ""

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Remember the types."""
        self._types = _types(module)

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Compare them.

        Raises:
            InputError: They are others.
        """
        found = _types(module)
        if found != self._types:
            raise InputError(
                f"the pass {step.name} changes the arguments or results of the program",
                at=f"{self._types} became {found}",
                fix="leave it out here, and use it where the caller gives the other arrays: on a "
                "module with autoshard opt",
            )


def _types(module: ir.Module) -> str:
    return str(main_block(module).owner.attributes["function_type"])
