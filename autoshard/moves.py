"""What the reads of a program make necessary: chains of reshards, and the collectives in them.

A sharding that a value was brought to is there for every later reader in the same place. What
nothing reads in the end, the compiler removes, so it is left out here too: a loop may be given a
value in one sharding while all that read it there want others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.branches import Block
from autoshard.cost_models.protocol import CollectiveKind
from autoshard.graph import Graph
from autoshard.narrowing import reads_halves
from autoshard.plan_parts import OpPlan, PlannedCollective, ReshardPlan
from autoshard.reads import Read, reads
from autoshard.reshard import Resharder, Step, sent_bytes
from autoshard.shardings import MeshShape, Sharding


@dataclass(frozen=True, slots=True)
class MovedSlice:
    """A step of a reshard that only takes a part of what a device holds.

    Attributes:
        block: Where it happens.
        op: Index of the op that it is for; the number of ops for the end of the program.
        value: Id of the value.
        seconds: Time of all its executions in one call [s].
    """

    block: Block
    op: int
    value: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Moves:
    """All reshards of a program.

    Attributes:
        reshards: Per read in another sharding than the value has, the chain that leads there.
        collectives: The collectives in them, each once, and the blocks they are in.
        slices: The local slices in them.
    """

    reshards: tuple[ReshardPlan, ...]
    collectives: tuple[tuple[Block, PlannedCollective], ...]
    slices: tuple[MovedSlice, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    """A value in some sharding, in some place.

    Attributes:
        made_from: What it is a reshard of; None for a value as an op makes it.
        step: The step that makes it, and the read it is made for.
        halved: Whether that read takes half of each element.
    """

    made_from: _Copy | None = None
    step: tuple[Step, Read] | None = None
    halved: bool = False


def moves_of(
    graph: Graph,
    resharder: Resharder,
    ops: Sequence[OpPlan],
    sharding: Mapping[int, Sharding],
    final: Sequence[Sharding],
) -> Moves:
    """Find every reshard.

    Args:
        graph: The program.
        resharder: Finds the chains.
        ops: Plans of its ops.
        sharding: Per value, the sharding it has; none for free values.
        final: Sharding of each result of the program.
    """
    return _Finder(graph, resharder, ops, sharding, final).find()


class _Finder:
    def __init__(
        self,
        graph: Graph,
        resharder: Resharder,
        ops: Sequence[OpPlan],
        sharding: Mapping[int, Sharding],
        final: Sequence[Sharding],
    ) -> None:
        self.graph, self.resharder = graph, resharder
        self.sharding, self.final = sharding, final
        self.ops = {op.index: op for op in ops}
        self.raw: dict[int, _Copy] = {}
        self.there: dict[tuple[int, Sharding | None, Block], dict[Sharding, _Copy]] = {}
        self.copies: list[_Copy] = []
        self.read: list[_Copy] = []
        self.read_whole: list[_Copy] = []
        self.entering: dict[int, _Copy] = {}  # by id of a raw value: what it enters a loop as
        self.reshards: list[ReshardPlan] = []

    def find(self) -> Moves:
        for read in reads(self.graph):
            wanted = self._wanted(read)
            if read.value not in self.sharding or wanted is None:
                continue
            copy = self._copy(read, wanted)
            inside = self._unchanged(read)
            if inside is None:
                self.read.append(copy)
                if not self._reads_halves(read):
                    self.read_whole.append(copy)
            elif not read.returned:  # handing it on to the next round is no use of it
                self.entering[id(self._raw(inside))] = copy
        live, whole = self._live(self.read), self._live(self.read_whole)
        collectives, slices = [], []
        for copy in self.copies:
            if id(copy) not in live or copy.step is None:
                continue
            step, read = copy.step
            if copy.halved and id(copy) in whole:
                step = self.resharder.doubled(step)
            if step.kind == "slice":
                seconds = step.seconds * read.trips
                slices.append(MovedSlice(read.block, read.op, read.value, seconds))
            else:
                moved = collective(self.graph, self.resharder.mesh, read, step, step.kind)
                collectives.append((read.block, moved))
        return Moves(tuple(self.reshards), tuple(collectives), tuple(slices))

    def _raw(self, value: int) -> _Copy:
        return self.raw.setdefault(value, _Copy())

    def _copy(self, read: Read, wanted: Sharding) -> _Copy:
        """What a reader gets; reshards for it are noted."""
        source = self.sharding[read.value]
        if wanted == source:
            return self._raw(read.value)
        tensor = self.graph.values[read.value]
        compiler = self.resharder.model.compiler
        halved = self._reads_halves(read)
        size = sent_bytes(tensor.nbytes, tensor.dtype, compiler, halved=halved)
        steps = self.resharder.path(tensor.shape, size, source, wanted)
        chain = tuple(s.target for s in steps)
        self.reshards.append(
            ReshardPlan(read.value, read.block, read.op, source, chain, read.trips)
        )
        # A free value is made anew in each sharding, so copies of one have nothing in common.
        anew = source if self.graph.values[read.origin].free else None
        there = self.there.setdefault((read.origin, anew, read.block), {})
        if anew is None:
            there.setdefault(self.sharding[read.origin], self._raw(read.origin))
        there.setdefault(source, self._raw(read.value))
        reached = max((i + 1 for i, target in enumerate(chain) if target in there), default=0)
        current = there[chain[reached - 1]] if reached else self._raw(read.value)
        for step in steps[reached:]:
            current = there[step.target] = _Copy(current, (step, read), halved)
            self.copies.append(current)
        return current

    def _reads_halves(self, read: Read) -> bool:
        if read.returned or read.op == len(self.graph.ops):
            return False
        op, dtype = self.graph.ops[read.op], self.graph.values[read.value].dtype
        return reads_halves(self.graph, op, dtype, self.resharder.model.compiler)

    def _unchanged(self, read: Read) -> int | None:
        """The value that a loop carries unchanged, if this read only gives it to the loop."""
        if read.op == len(self.graph.ops):
            return None
        loop = self.graph.ops[read.op]
        if loop.name != "stablehlo.while":
            return None
        inside = loop.results[read.position]
        return inside if loop.returned[0][read.position] == inside else None

    def _live(self, read: Sequence[_Copy]) -> set[int]:
        """Ids of the copies that these are, and of all that they are made from."""
        waiting, live = list(read), set()
        while waiting:
            copy: _Copy | None = waiting.pop()
            while copy is not None and id(copy) not in live:
                live.add(id(copy))
                if id(copy) in self.entering:
                    waiting.append(self.entering[id(copy)])
                copy = copy.made_from
        return live

    def _wanted(self, read: Read) -> Sharding | None:
        if read.op == len(self.graph.ops):
            return self.final[read.position]
        plan = self.ops.get(read.op)
        if plan is None:
            return None
        return plan.results[read.position] if read.returned else plan.operands[read.position]


def collective(
    graph: Graph, mesh: MeshShape, read: Read, step: Step, kind: CollectiveKind
) -> PlannedCollective:
    """The collective of one step of a reshard."""
    reader = graph.ops[read.op] if read.op < len(graph.ops) else None
    for_whom = f"{reader.kind} #{reader.index}" if reader else "the result"
    return PlannedCollective(
        kind=kind,
        axes=step.axes,
        devices=mesh.size(step.axes),
        nbytes=step.nbytes,
        trips=read.trips,
        seconds=step.seconds,
        op=read.op,
        value=read.value,
        dtype=graph.values[read.value].dtype,
        why=f"{value_name(graph, read.value)} for {for_whom}",
        source=reader.source if reader else "",
    )


def value_name(graph: Graph, value: int) -> str:
    """What people call a value: the argument, or the op that makes it."""
    tensor = graph.values[graph.values[value].alias]
    if tensor.op < 0:
        return graph.argument_info[tensor.position].name
    op = graph.ops[tensor.op]
    return f"{op.kind} #{op.index}"
