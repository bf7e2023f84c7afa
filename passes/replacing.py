"""Patterns that are found and written by one function, where finding takes more than a shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.mlir import ir

from autoshard.passes.patterns import Builder, Match, Pattern, Value, op

Make = Callable[[], Value]
"""Writes what replaces the one result of an op."""

Find = Callable[[ir.Operation], Make | None]
"""Says what would replace the result of an op; None where it does not apply."""


def replacing(name: str, *names: str) -> Callable[[Find], Pattern]:
    """Make a function the pattern that looks at ops of some names.

    Args:
        name: What its rewrites are counted under.
        *names: The ops it looks at; any if none is given.
    """

    def make(find: Find) -> Pattern:
        def rewrite(match: Match, builder: Builder) -> Sequence[Value]:
            made = find(match.root)
            assert made is not None  # it was a moment ago
            return [made()]

        return Pattern(name, op(*names), rewrite, lambda match: find(match.root) is not None)

    return make
