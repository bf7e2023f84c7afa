"""The program as a frozen graph: ops, values, loops, ties; each op with its sharding rule.

The graph holds no compiler object, so it can be saved, printed, compared and priced anywhere. Its
ops are numbered as :func:`autoshard.program.walk` yields them, which is how a plan finds its way
back to a module.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from autoshard.program import Boundary
from autoshard.shardings import Sharding
from autoshard.windows import Window

FactorKind = Literal["pass", "reduction", "replicated", "permutation"]

WrittenKind = Literal["all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"]

ALIASES = frozenset({"stablehlo.optimization_barrier"})
"""Ops whose results are their operands, one to one (as is a constraint that says nothing)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value in the program.

    Attributes:
        id: Position in ``Graph.values``.
        shape: Global (unsharded) sizes, major to minor.
        dtype: A StableHLO element type, e.g. ``bf16``.
        nbytes: Size of the whole tensor [bytes].
        op: Index of the op that makes it; -1 for an argument of the program.
        position: Which result of that op (or which argument of the program) it is.
        alias: Id of the value whose buffer and sharding it shares; its own id if it is no alias.
        free: Whether it costs nothing in any sharding: constants, and what is computed from them
            element by element.
        same: Id of the earliest value that is equal if optimization barriers are passed through;
            its own id if there is none, or no barrier in the program.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    op: int
    position: int
    alias: int
    free: bool = False
    same: int = -1

    def __str__(self) -> str:
        return f"%{self.id}: {self.dtype}[{','.join(map(str, self.shape))}]"


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

    def operand_for(self, result: Sharding, position: int, shape: tuple[int, ...]) -> Sharding:
        """The sharding of an operand from which the first result comes out as ``result``.

        Dimensions that are not one whole factor of the result's stay whole.

        Args:
            result: The sharding wanted of the first result.
            position: Which operand.
            shape: The operand's global shape.
        """
        axes = {
            factors[0]: dim
            for factors, dim in zip(self.results[0], result, strict=True)
            if len(factors) == 1
        }
        return tuple(
            axes.get(factors[0], ()) if len(factors) == 1 and self.sizes[factors[0]] == size else ()
            for factors, size in zip(self.operands[position], shape, strict=True)
        )

    def __str__(self) -> str:
        sides = [
            " ".join("[" + ",".join("*".join(map(str, dim)) for dim in t) + "]" for t in tensors)
            for tensors in (self.operands, self.results)
        ]
        kinds = [f"{f} {kind}" for f, kind in enumerate(self.kinds) if kind != "pass"]
        return "; ".join((" to ".join(sides), *kinds))


@dataclass(frozen=True, slots=True)
class WrittenCollective:
    """A collective that the program itself contains, inside a ``shard_map``.

    Attributes:
        kind: Which one.
        axes: The mesh axes along which its groups extend.
        devices: How many devices are in a group.
        dim: The dimension that is gathered, scattered or split.
    """

    kind: WrittenKind
    axes: tuple[str, ...]
    devices: int
    dim: int

    def __str__(self) -> str:
        return f"{self.kind} over {'*'.join(self.axes)} of {self.devices} along {self.dim}"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        index: Position in ``Graph.ops``: the walk order of the module.
        name: E.g. ``stablehlo.dot_general``.
        operands: Ids of the values read.
        results: Ids of the values made. A loop's results are its carried values, which its body
            reads under the same ids.
        returned: Per region that gives values back (a loop's body, each branch of a case), the ids
            of what it gives back, one per result.
        rule: Its sharding rule; None if it has none.
        parent: Index of the op whose region holds it; -1 at the top level.
        region: Which of that op's regions it is in.
        trips: How often it runs in one call of the program (product of the trip counts around it).
        body_trips: For a loop, how often its body runs in one call of the program.
        flops: Floating-point operations of one unsharded execution [FLOP].
        combiner: For a reduction or scatter, the op in its body, e.g. ``stablehlo.add``.
        fixed: Shardings of operands and results that the program itself prescribes.
        source: ``file.py:line`` of the user's code that made it.
        target: Of a custom call, what it calls.
        piecewise: Whether each device runs it on its own pieces, inside a manual computation,
            instead of leaving it to XLA how to split it.
        on_one_device: Whether one device alone runs it and sends its results to the others (a
            callback into Python).
        collective: What it sends, if it is a collective (in a ``shard_map``).
        body: Of a ``shard_map``, the program of one device, with local shapes.
        window: Of a convolution or a pooling's gradient, order and padding of its dimensions.
        is_precise: Whether a product asks for more than the default precision.
    """

    index: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    returned: tuple[tuple[int, ...], ...]
    rule: Rule | None
    parent: int
    region: int
    trips: int
    body_trips: int
    flops: float
    combiner: str
    fixed: tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | None
    source: str
    target: str = ""
    piecewise: bool = False
    on_one_device: bool = False
    collective: WrittenCollective | None = None
    body: Graph | None = None
    window: Window | None = None
    is_precise: bool = False

    @property
    def is_alias(self) -> bool:
        """Whether its results are its operands, one to one."""
        return self.name in ALIASES or (self.name == "sdy.sharding_constraint" and not self.fixed)

    @property
    def kind(self) -> str:
        """The name without its dialect."""
        return self.name.partition(".")[2]

    @property
    def details(self) -> str:
        """What else a plan depends on: rule, combiner, a loop's rounds in a call and the like."""
        parts = {
            "by": self.rule,
            "with": self.combiner,
            "rounds": self.body_trips if self.name == "stablehlo.while" else None,
            "fixed": self.fixed,
            "calls": self.target,
            "piecewise": self.piecewise,
            "sends": self.collective,
            "runs": None if self.body is None else self.body.fingerprint(),
        }
        return "".join(f" {word} {part}" for word, part in parts.items() if part)


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole program.

    Attributes:
        ops: All ops in walk order.
        values: All values; ``values[i].id == i``.
        arguments: Ids of the program's arguments.
        results: Ids of the program's results.
        ties: Pairs (argument position, result position) that must share a sharding because the
            result replaces the donated argument.
        argument_info: The caller's view of the arguments.
        result_info: The caller's view of the results.
        unknown_trips: Indices of loops whose trip count the program does not state; counted once.
        loosened: Shardings that the program prescribes and that dimensions do not allow, each with
            what is carried out instead.
    """

    ops: tuple[Op, ...]
    values: tuple[Tensor, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    argument_info: tuple[Boundary, ...]
    result_info: tuple[Boundary, ...]
    unknown_trips: tuple[int, ...] = ()
    loosened: tuple[str, ...] = ()

    def signature(self) -> tuple[str, ...]:
        """One line per argument and op: what a plan is checked against."""
        head = [f"argument {self.values[v]}" for v in self.arguments]
        body = [
            f"{op.name}({', '.join(f'%{v}' for v in op.operands)}) -> "
            f"{', '.join(str(self.values[v]) for v in op.results)}{op.details}"
            for op in self.ops
        ]
        tail = [f"result {self.values[v]}" for v in self.results]
        return (*head, *body, *tail)

    def fingerprint(self) -> str:
        """SHA-256 of :meth:`signature`, in hex."""
        return hashlib.sha256("\n".join(self.signature()).encode()).hexdigest()

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            depth, parent = 0, op.parent
            while parent >= 0:
                depth, parent = depth + 1, self.ops[parent].parent
            results = ", ".join(str(self.values[v]) for v in op.results)
            operands = ", ".join(f"%{v}" for v in op.operands)
            lines.append(f"{op.index:5d} {'  ' * depth}{results} = {op.name}({operands})")
        return "\n".join(lines)
