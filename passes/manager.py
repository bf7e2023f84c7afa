"""Runs a pipeline, with instruments that look on before and after each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from autoshard.passes.context import PassContext, Rewrites
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import Pass


@dataclass(frozen=True, slots=True)
class Step:
    """One pass in its place.

    Attributes:
        index: Its position in the pipeline.
        made: The pass.
        pipeline: The whole pipeline.
    """

    index: int
    made: Pass
    pipeline: Pipeline

    @property
    def name(self) -> str:
        """The pass's name."""
        return self.made.pass_info.name


class Instrument:
    """Looks on while a pipeline runs; the methods that are not overridden do nothing."""

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Before the first pass."""

    def before(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Before a pass."""

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """After a pass; what is raised here counts as a failure of the pass."""

    def failed(
        self, step: Step, module: ir.Module, context: PassContext, error: BaseException
    ) -> None:
        """After a pass, or an instrument after it, has failed; the error is raised then."""


def run_pipeline(
    pipeline: Pipeline | str,
    module: ir.Module,
    context: PassContext | None = None,
    instruments: Sequence[Instrument] = (),
) -> PassContext:
    """Run the passes of a pipeline on a module, in place.

    Args:
        pipeline: The passes.
        module: The program.
        context: What the passes are told; a new one if None.
        instruments: Who looks on, in this order before a pass and in the opposite order after it.

    Returns:
        The context, with what the passes published.
    """
    pipeline = Pipeline.of(pipeline)
    context = PassContext() if context is None else context
    for instrument in instruments:
        instrument.start(pipeline, module, context)
    for index, made in enumerate(pipeline.passes):
        step = Step(index, made, pipeline)
        limits = context.rewrites
        context.rewrites = Rewrites(limits.limit, limits.listener)
        for instrument in instruments:
            instrument.before(step, module, context)
        try:
            with module.context, ir.Location.unknown():
                made.run(module, context)
            for instrument in reversed(instruments):
                instrument.after(step, module, context)
        except BaseException as error:
            for instrument in reversed(instruments):
                instrument.failed(step, module, context, error)
            raise
    return context
