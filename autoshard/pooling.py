"""A pooling's gradient as XLA:CPU runs it: a search for the winners and a scatter.

Found in programs that jaxlib 0.10.2 compiles: a ``select_and_scatter`` numbers the elements of its
padded operand along every dimension, reduces values and numbers together over each window, and
scatters into an array of zeros of the padded shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autoshard.local import LocalOp, LocalValue

_NUMBER_BYTES = 4  # s32


def with_winners(op: LocalOp, values: list[LocalValue]) -> Iterator[LocalOp]:
    """The ops that a ``select_and_scatter`` becomes; ``values`` grows by what they make."""
    pooled, source = op.inputs[:2]
    assert op.window is not None
    here, few = values[pooled], values[source]
    size = here.nbytes // max(1, math.prod(here.shape))
    shape = tuple(n + p for n, p in zip(here.shape, op.window.padding, strict=True))

    def new(like: LocalValue, shape: tuple[int, ...], each: int) -> int:
        values.append(replace(like, shape=shape, nbytes=each * math.prod(shape)))
        return len(values) - 1

    numbers = [new(here, shape, _NUMBER_BYTES) for _ in shape]
    for value in numbers:
        yield LocalOp("number", (), (value,), op.op)
    zeros = new(here, shape, size)
    yield LocalOp("fill", (), (zeros,), op.op)
    padded = pooled
    if any(op.window.padding):
        padded = new(here, shape, size)
        yield LocalOp("pad", (pooled,), (padded,), op.op)
    best = new(few, few.shape, size)
    winners = [new(few, few.shape, _NUMBER_BYTES) for _ in shape]
    yield LocalOp("reduce_window", (padded, *numbers), (best, *winners), op.op)
    where = new(few, (*few.shape, len(shape)), _NUMBER_BYTES)
    yield LocalOp("concatenate", tuple(winners), (where,), op.op)
    if not any(op.window.padding):
        yield LocalOp("scatter", (zeros, where, source), op.outputs, op.op)
        return
    spread = new(here, shape, size)
    yield LocalOp("scatter", (zeros, where, source), (spread,), op.op)
    yield LocalOp("slice", (spread,), op.outputs, op.op)
