"""Applies patterns everywhere in a program until none is found any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from autoshard.errors import AutoshardError
from autoshard.passes.context import PassContext
from autoshard.passes.patterns import Builder, Match, Pattern
from autoshard.program import MANUAL, REGION_OPS, TERMINATORS, is_dead

MAX_ROUNDS = 32
"""Walks over the program after which patterns that still find something are taken to go on for
ever; a chain of transposes as long as this is not seen in programs."""


class PatternError(AutoshardError, RuntimeError):
    """Patterns that go on for ever, or give what does not fit in the place of the match."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a driver did.

    Attributes:
        rounds: Walks over the program, the last of which found nothing.
        rewrites: Rewrites made.
        removed: Ops that nothing read any more afterwards.
    """

    rounds: int
    rewrites: int
    removed: int


def apply_patterns(
    module: ir.Module,
    patterns: Sequence[Pattern],
    context: PassContext,
    *,
    max_rounds: int = MAX_ROUNDS,
) -> Rewritten:
    """Rewrite what matches, in all functions and in the bodies of loops, branches and shard_maps.

    Ops are visited in order; of the patterns that match at an op the first is applied. Each rewrite
    is asked for by :meth:`PassContext.allow`, so it is counted and can be bisected. What nothing
    reads afterwards is removed.

    Args:
        module: The program, edited in place.
        patterns: The patterns, in order of preference.
        context: What the pass was given.
        max_rounds: Walks over the program at most.

    Raises:
        PatternError: There is something to rewrite after all those walks.
    """
    by_name: dict[str, list[Pattern]] = {}
    anywhere: list[Pattern] = []
    for each in patterns:
        for name in each.root.names:
            by_name.setdefault(name, []).append(each)
        if not each.root.names:
            anywhere.append(each)
    rewrites = removed = 0
    for round_number in range(1, max_rounds + 1):
        made = 0
        for block in blocks(module):
            for op in list(block.operations):
                candidates = (*by_name.get(op.operation.name, ()), *anywhere)
                if candidates:
                    made += _rewrite_at(op.operation, candidates, context)
        rewrites += made
        if made:
            removed += sum(remove_dead(block) for block in reversed(list(blocks(module))))
        else:
            return Rewritten(round_number, rewrites, removed)
    names = ", ".join(context.rewrites.counts)
    raise PatternError(
        f"after {max_rounds} walks over the program there is still something to rewrite",
        at=f"patterns {names}",
        fix="let no pattern match what it or another one makes",
    )


def blocks(module: ir.Module) -> Iterator[ir.Block]:
    """Every block of ops of the program: functions, and what loops, branches, shard_maps hold.

    The blocks of other ops, such as the combiner of a reduction, are part of their op.
    """
    for op in module.body.operations:
        if op.operation.name == "func.func":
            for block in op.operation.regions[0].blocks:
                yield from _blocks_in(block)


def remove_dead(block: ir.Block) -> int:
    """Remove what nothing reads from a block, last op first; how many ops that was."""
    count = 0
    for op in reversed(list(block.operations)):
        if is_dead(op.operation):
            op.operation.erase()
            count += 1
    return count


def _blocks_in(block: ir.Block) -> Iterator[ir.Block]:
    yield block
    for op in block.operations:
        if op.operation.name in REGION_OPS or op.operation.name == MANUAL:
            for region in op.operation.regions:
                for inner in region.blocks:
                    yield from _blocks_in(inner)


def _rewrite_at(
    operation: ir.Operation, candidates: Sequence[Pattern], context: PassContext
) -> bool:
    if operation.name in TERMINATORS or is_dead(operation):
        return False
    for each in candidates:
        match = each.match(operation)
        if match is not None and context.allow(each.name, operation):
            _apply(each, match)
            return True
    return False


def _apply(each: Pattern, match: Match) -> None:
    root = match.root
    with root.location, ir.InsertionPoint(root):
        values = list(each.rewrite(match, Builder(root)))
    if len(values) != len(root.results):
        raise PatternError(
            f"the pattern {each.name} gives {len(values)} values for the {len(root.results)} of "
            f"{root.name}",
            fix="return one value per result of the matched op",
        )
    for result, value in zip(root.results, values, strict=True):
        if value.type != result.type:
            raise PatternError(
                f"the pattern {each.name} gives a {value.type} for a {result.type} of {root.name}",
                fix="return values of the types of the matched op's results",
            )
        result.replace_all_uses_with(value)
    root.erase()
