"""The program that one device runs under a plan, op by op, as plain records.

It is the graph with local shapes and everything that sharding adds: collectives that complete
partial results, the steps of reshards, and values that cost nothing made anew wherever they are
read. What it holds when, see :mod:`autoshard.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autoshard.reshard import StepKind
from autoshard.shardings import Sharding
from autoshard.windows import Window

LOCAL_VIEWS = frozenset({"reshape", "optimization_barrier", "sharding_constraint"})
"""Kinds of op whose result is the buffer of their operand."""


@dataclass(frozen=True, slots=True)
class LocalValue:
    """A value on one device.

    Attributes:
        shape: Sizes of the piece that the device holds.
        dtype: Element type.
        nbytes: Size of that piece [bytes].
        source: Id of the graph's value that it is (a piece or a copy of).
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: int


@dataclass(frozen=True, slots=True)
class DotSide:
    """What one operand of a dot is multiplied over.

    Attributes:
        batch: Its batch dimensions, in the order of the result.
        contracting: Its contracting dimensions.
    """

    batch: tuple[int, ...]
    contracting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One op on one device.

    Attributes:
        kind: As in StableHLO without the dialect (``add``), or a collective or ``slice`` of a
            reshard.
        inputs: Positions of the values read; after the operands, what its blocks read from outside.
        outputs: Positions of the values made.
        op: Index of the graph's op that it is, or that it serves.
        axes: Of a collective, the mesh axes it runs over.
        dims: Of a gather or scatter, its dimension; of a reduction, those reduced away.
        sides: Of a dot, what each operand is multiplied over.
        window: Of a convolution or a pooling's gradient, order and padding of its dimensions.
        blocks: A loop's body, or the branches of a case. A loop carries only what it changes: its
            first inputs are what each output starts from.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    op: int
    axes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    sides: tuple[DotSide, DotSide] | None = None
    blocks: tuple[LocalBlock, ...] = ()
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """Ops that run one after another.

    Attributes:
        params: Values given to it: the program's arguments, or what a loop carries.
        ops: Its ops in program order.
        returned: Values it gives back.
    """

    params: tuple[int, ...]
    ops: tuple[LocalOp, ...]
    returned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """A whole program on one device.

    Attributes:
        values: All values.
        main: The outermost block.
        ties: Pairs (argument position, result position) that share a buffer.
    """

    values: tuple[LocalValue, ...]
    main: LocalBlock
    ties: tuple[tuple[int, int], ...]


class Decided(Protocol):
    """What a plan says of one op; see :class:`autoshard.plan_parts.OpPlan`."""

    @property
    def operands(self) -> tuple[Sharding, ...]:
        """Sharding each operand must have."""
        ...

    @property
    def results(self) -> tuple[Sharding, ...]:
        """Sharding each result has."""
        ...

    @property
    def partial(self) -> Sharding | None:
        """Sharding of the result before a reduce-scatter."""
        ...

    @property
    def reduced(self) -> tuple[tuple[str, ...], ...]:
        """Groups of axes over which partial results are combined."""
        ...


@dataclass(frozen=True, slots=True)
class Decisions:
    """The part of a plan that says what each device computes.

    Attributes:
        ops: What is decided of each op, by index.
        arguments: Sharding of each argument.
        results: Sharding of each result.
        chains: By id of a value and the sharding that a reader wants: the shardings it takes on the
            way there, the wanted one last.
        twins: Ops that are not run because another has their results already, and which.
    """

    ops: Mapping[int, Decided]
    arguments: Sequence[Sharding]
    results: Sequence[Sharding]
    chains: Mapping[tuple[int, Sharding], Sequence[Sharding]]
    twins: Mapping[int, int] = field(default_factory=dict)


def step_of(source: Sharding, target: Sharding) -> tuple[StepKind, tuple[str, ...], int]:
    """Kind, axes and dimension of the single step between two shardings of one tensor.

    Examples:
        >>> step_of((("x",), ()), ((), ()))
        ('all_gather', ('x',), 0)
        >>> step_of((("x",), ()), ((), ("x",)))
        ('all_to_all', ('x',), 1)
    """
    changed = [d for d, (s, t) in enumerate(zip(source, target, strict=True)) if s != t]
    grown = [d for d in changed if target[d][: len(source[d])] == source[d]]
    shrunk = [d for d in changed if source[d][: len(target[d])] == target[d]]
    if len(changed) == 1 and shrunk:
        (d,) = shrunk
        return "all_gather", source[d][len(target[d]) :], d
    if len(changed) == 1 and grown:
        (d,) = grown
        return "slice", target[d][len(source[d]) :], d
    if len(changed) == 2 and len(grown) == len(shrunk) == 1 and grown != shrunk:
        moved = source[shrunk[0]][len(target[shrunk[0]]) :]
        if target[grown[0]] == (*source[grown[0]], *moved):
            return "all_to_all", moved, grown[0]
    axes = {a for d in changed for a in (*source[d], *target[d])}
    return "permute", tuple(sorted(axes)), changed[0] if changed else 0
