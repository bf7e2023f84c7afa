"""Applies patterns that replace the one result of an op, until none applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax.extend.mlir import ir

from autoshard.passes.context import PassContext
from autoshard.program import Value, main_block, operations, remove_unread

Make = Callable[[], Value]
"""Writes what replaces the one result of an op."""

Pattern = Callable[[ir.Operation], Make | None]
"""Says what would replace the result of an op; None where it does not apply."""

MAX_ROUNDS = 64
"""Walks over the program at most; each pattern leaves less to do, so this is never reached."""


def replace_all(module: ir.Module, patterns: Mapping[str, Pattern], context: PassContext) -> None:
    """Apply patterns everywhere, loops and conditionals included.

    Args:
        module: The program.
        patterns: By name, the first that applies to an op first.
        context: Asked before each replacement.
    """
    for _ in range(MAX_ROUNDS):
        changed = False
        for operation in list(operations(main_block(module))):
            if len(operation.results) != 1 or not any(True for _ in operation.results[0].uses):
                continue
            for name, pattern in patterns.items():
                make = pattern(operation)
                if make is None or not context.allow(name, operation):
                    continue
                operation.results[0].replace_all_uses_with(make())
                changed = True
                break
        if not changed:
            return
        remove_unread(main_block(module))
