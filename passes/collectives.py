"""``collectives``: fewer, smaller and rarer collectives in the program of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.mlir import ir

from autoshard.passes.buckets import combine
from autoshard.passes.communication import (
    forget_a_gather,
    merge_sums,
    narrow_early,
    scatter_a_reduction,
    share_a_repeated_one,
    transpose_after_a_scatter,
    transpose_before_a_gather,
    widen_late,
)
from autoshard.passes.context import PassContext
from autoshard.passes.driver import apply_patterns, blocks
from autoshard.passes.exchanges import Traffic
from autoshard.passes.loop_exchanges import accumulations, hoist, loops_of, sink
from autoshard.passes.option_values import Bytes
from autoshard.passes.registry import register_pass
from autoshard.program import MANUAL, carry_captures, main_block, operations, remove_unread

REPLACING = (
    share_a_repeated_one,
    scatter_a_reduction,
    forget_a_gather,
    merge_sums,
    widen_late,
    narrow_early,
    transpose_before_a_gather,
    transpose_after_a_scatter,
)
"""Patterns that replace one value."""

BUCKET = Bytes(2**20)
"""Bytes up to which small collectives are put together, unless something else is asked for."""

PatternName = Literal[
    "hoist",
    "sink",
    "repeated",
    "reduce-scatter",
    "forget-gather",
    "merge-sums",
    "widen-late",
    "narrow-early",
    "transpose-before-gather",
    "transpose-after-scatter",
    "combine",
]
"""All patterns, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Savings:
    """What a pass saves in one call on one device, counted on the program.

    Attributes:
        before: What was exchanged before.
        after: What is exchanged now.
        rewrites: How often each pattern was applied.
    """

    before: Traffic
    after: Traffic
    rewrites: Mapping[str, int]

    def __str__(self) -> str:
        applied = ", ".join(f"{name} {count}" for name, count in self.rewrites.items())
        return (
            f"collectives {self.before.count} -> {self.after.count}, sent "
            f"{self.before.sent_bytes:,.0f} -> {self.after.sent_bytes:,.0f} bytes"
            f" ({applied or 'nothing to do'})"
        )


@register_pass(
    "collectives",
    summary="Combines, hoists, sinks, narrows and scatters the collectives of one device's program",
    preserves=("numerics", "boundary", "effects"),
)
@dataclass(frozen=True)
class Collectives:
    """Collectives made fewer, smaller and rarer, in a program that has them.

    It works on the program of one device: the body of a ``shard_map``, or what the partitioner
    ``"shardy"`` writes. Sums may be taken in another order. ``sink`` and ``hoist`` hold larger
    values while a loop runs.

    Attributes:
        bucket: Bytes up to which small collectives are put together; 0 leaves them apart.
        held: The largest value that a loop may hold for ``hoist`` and ``sink``; none for any.
        only: The patterns to use; all if none is named.
    """

    bucket: Bytes = BUCKET
    held: Bytes | None = None
    only: tuple[PatternName, ...] = ()

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place; publishes the :class:`Savings`."""
        before = Traffic.of(module)
        self._loops(module, context)
        apply_patterns(module, [each for each in REPLACING if self._uses(each.name)], context)
        if self.bucket and self._uses("combine"):
            for block in blocks(module):
                combine(block, context.allow, self.bucket)
        counts = dict(context.rewrites.counts)
        context.publish("collectives", Savings(before, Traffic.of(module), counts))

    def _uses(self, pattern: str) -> bool:
        return not self.only or pattern in self.only

    def _loops(self, module: ir.Module, context: PassContext) -> None:
        start = context.rewrites.total
        position = 0
        # A loop is replaced when something is sunk, so each step looks anew for the next one.
        while position < len(loops := loops_of(main_block(module))):
            loop = loops[position]
            if self._uses("hoist"):
                hoist(loop, context.allow, self.held)
            if self._uses("sink"):
                found = [
                    one
                    for one in accumulations(loop)
                    if (self.held is None or one.exchange.nbytes <= self.held)
                    and context.allow("sink", one.exchange.op)
                ]
                if found:
                    sink(found)
            position += 1
        if context.rewrites.total > start:
            remove_unread(main_block(module))
            for block in _bodies(module):
                carry_captures(block)


def _bodies(module: ir.Module) -> Iterator[ir.Block]:
    """The body of ``main`` and those of its manual computations."""
    yield main_block(module)
    manual = [o for o in operations(main_block(module)) if o.name == MANUAL]
    for operation in manual:
        yield operation.regions[0].blocks[0]
