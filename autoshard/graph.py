"""The program as a frozen graph: ops, values, loops, ties; each op with its sharding rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FactorKind = Literal["pass", "reduction", "replicated", "permutation"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value in the program.

    Attributes:
        id: Position in ``Graph.values``.
        shape: Global (unsharded) sizes, major to minor.
        dtype: A StableHLO element type, e.g. ``bf16``.
        nbytes: Bytes of the whole tensor.
        op: Index of the op that makes it; -1 for an argument of the program.
        free: Whether it costs nothing in any sharding (constants and what is broadcast from them).
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    op: int
    free: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """How the dimensions of an op's operands and results are made of factors.

    Attributes:
        sizes: Size of each factor.
        kinds: Kind of each factor: passed through, reduced away, to be kept whole
            (``replicated``), or needing communication between neighbours (``permutation``).
        operands: Per operand, per dimension, its factors, major to minor.
        results: Per result, per dimension, its factors, major to minor.
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        index: Position in ``Graph.ops``: the walk order of the module.
        name: E.g. ``stablehlo.dot_general``.
        operands: Ids of the values read (aliases resolved).
        results: Ids of the values made.
        rule: Its sharding rule; None if it has none.
        loop: Index of the op whose region holds it; -1 at the top level.
        trips: How often it runs in one call of the program (product of trip counts around it).
        flops: Floating-point operations of one unsharded execution [FLOP].
        source: ``file.py:line`` of the user's code that made it.
    """

    index: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    loop: int
    trips: int
    flops: float
    source: str
