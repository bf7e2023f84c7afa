"""``partition``: the program of one device, for the passes that work on its collectives."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.mlir import ir

from autoshard import partition as shardy
from autoshard.errors import InputError
from autoshard.passes.context import PassContext
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import register_pass
from autoshard.plan import Plan


@register_pass(
    "partition",
    summary="Has Shardy write the program of one device, with exactly the plan's collectives",
    preserves=("numerics", "boundary"),
    not_idempotent="a partitioned module has no shardings left to partition by",
)
@dataclass(frozen=True, slots=True)
class Partition:
    """Shardy's partitioner as a pass; the sharding pass comes before it.

    What it cannot partition is an error that names the op, unless the pipeline runs inside
    ``autoshard(...)``: then XLA partitions, without the passes that come after this one.
    """

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Turn the body of ``main`` into one manual computation over all axes.

        Raises:
            InputError: Nothing has sharded the module.
            UnsupportedError: Shardy cannot partition it.
        """
        names = ("shard", "shard-expert")
        made = [found for name in names if (found := context.result(name, Plan)) is not None]
        plan = context.plan or (made[0] if made else None)
        if plan is None or not made:
            raise InputError(
                "the pass partition finds no plan",
                fix="have a sharding pass before it, as in flatten-calls,shard,partition",
            )
        shardy.partition(module, plan)


def around_partition(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """The passes before ``partition``, and it with those after it; these are none without it.

    Raises:
        InputError: It is there twice.
    """
    found = [i for i, each in enumerate(pipeline.passes) if isinstance(each, Partition)]
    if len(found) > 1:
        raise InputError(
            "the pass partition is there twice", at=f"pipeline {pipeline}", fix="have it once"
        )
    first = found[0] if found else len(pipeline.passes)
    return Pipeline(pipeline.passes[:first]), Pipeline(pipeline.passes[first:])
