"""The program that one device runs under a plan, op by op, as plain records.

It is the graph with local shapes and everything that sharding adds: collectives that complete
partial results, the steps of reshards, and values that cost nothing made anew wherever they are
read. What it holds when, see :mod:`autoshard.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autoshard.graph import Graph, Op, Tensor
from autoshard.program import REGION_OPS
from autoshard.reshard import StepKind
from autoshard.shardings import MeshShape, Sharding, local_shape, replicated

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
    """What a plan says of one op; see :class:`autoshard.plan.OpPlan`."""

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
    """

    ops: Mapping[int, Decided]
    arguments: Sequence[Sharding]
    results: Sequence[Sharding]
    chains: Mapping[tuple[int, Sharding], Sequence[Sharding]]


def localize(graph: Graph, mesh: MeshShape, decisions: Decisions | None) -> LocalProgram:
    """The program of one device.

    Args:
        graph: The whole program.
        mesh: The mesh it runs on.
        decisions: How it is sharded; None for a single device that holds everything.
    """
    return _Expander(graph, mesh, decisions).program()


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


@dataclass(frozen=True, slots=True)
class _Frame:
    """A block under construction.

    Attributes:
        loop: The loop whose body it is; None for other blocks.
        inits: What that loop starts from.
        ops: Its ops so far.
        made: (local value, sharding) -> that value resharded.
        free: (free value of the graph, sharding) -> the local one.
    """

    loop: Op | None
    inits: tuple[int, ...]
    ops: list[LocalOp]
    made: dict[tuple[int, Sharding], int]
    free: dict[tuple[int, Sharding], int]


class _Expander:
    def __init__(self, graph: Graph, mesh: MeshShape, decisions: Decisions | None) -> None:
        self.graph, self.mesh, self.decisions = graph, mesh, decisions
        self.chains = decisions.chains if decisions is not None else {}
        self.values: list[LocalValue] = []
        self.at: dict[int, int] = {}  # graph value -> the local value it is here
        self.shardings: dict[int, Sharding] = {}
        self.children: dict[tuple[int, int], list[Op]] = {}
        for op in graph.ops:
            self.children.setdefault((op.parent, op.region), []).append(op)
        self.frames: list[_Frame] = []
        self.roots: dict[int, int] = {}  # of a resharded value, what it was made from
        self.homes: dict[int, int] = {}  # of a resharded value, the depth of the frame it is in
        self.layouts: list[Sharding] = []  # per local value

    def program(self) -> LocalProgram:
        graph = self.graph
        arguments: Sequence[Sharding | None] = (
            self.decisions.arguments if self.decisions else [None] * len(graph.arguments)
        )
        params = tuple(self._name(v, s) for v, s in zip(graph.arguments, arguments, strict=True))
        results = (
            self.decisions.results if self.decisions else [self._whole(v) for v in graph.results]
        )
        main = self._block((-1, 0), params, graph.results, results)
        return LocalProgram(tuple(self.values), main, graph.ties)

    def _block(
        self,
        place: tuple[int, int],
        params: tuple[int, ...],
        returned: Sequence[int],
        wanted: Sequence[Sharding],
        loop: tuple[Op, tuple[int, ...]] | None = None,
    ) -> LocalBlock:
        around, inits = loop if loop is not None else (None, ())
        frame = _Frame(around, inits, [], {}, {})
        self.frames.append(frame)
        for op in self.children.get(place, ()):
            self._op(op)
        end = len(self.graph.ops) if place[0] < 0 else place[0]
        back = tuple(self._read(v, s, end) for v, s in zip(returned, wanted, strict=True))
        self.frames.pop()
        return LocalBlock(params, tuple(frame.ops), back)

    def _add(self, op: LocalOp) -> None:
        self.frames[-1].ops.append(op)

    def _op(self, op: Op) -> None:
        if op.results and all(self.graph.values[v].free for v in op.results):
            return
        operands, results, partial, reduced = self._plan(op)
        inputs = tuple(
            self._read(v, s, op.index) for v, s in zip(op.operands, operands, strict=True)
        )
        if op.is_alias:
            for value, sharding, local in zip(op.results, results, inputs, strict=True):
                self.at[value], self.shardings[value] = local, sharding
            return
        if op.name in REGION_OPS:
            self._regions(op, inputs, results)
            return
        natural = partial or results
        outputs = tuple(self._name(v, s) for v, s in zip(op.results, natural, strict=True))
        sides, dims = self._sides(op), _reduced(op)
        self._add(LocalOp(op.kind, inputs, outputs, op.index, dims=dims, sides=sides))
        for group in reduced:
            kind, dims = "all_reduce", ()
            if partial is not None:
                kind, dims = "reduce_scatter", (_scattered(partial[0], results[0]),)
            before = self.at[op.results[0]]
            after = self._name(op.results[0], results[0])
            self._add(LocalOp(kind, (before,), (after,), op.index, axes=group, dims=dims))

    def _plan(
        self, op: Op
    ) -> tuple[
        Sequence[Sharding], Sequence[Sharding], tuple[Sharding] | None, Sequence[tuple[str, ...]]
    ]:
        """Shardings of operands and results, of a result yet to be scattered, reduction groups."""
        if self.decisions is None:
            return (
                [self._whole(v) for v in op.operands],
                [self._whole(v) for v in op.results],
                None,
                (),
            )
        plan = self.decisions.ops[op.index]
        partial = None if plan.partial is None else (plan.partial,)
        return plan.operands, plan.results, partial, plan.reduced

    def _regions(self, op: Op, inputs: tuple[int, ...], results: Sequence[Sharding]) -> None:
        is_loop = op.name == "stablehlo.while"
        # What a loop carries unchanged needs no carrying: its body reads it from outside.
        kept = [k for k, v in enumerate(op.results) if not (is_loop and v == op.returned[0][k])]
        carried = [(op.results[k], results[k]) for k in kept]
        for k in set(range(len(op.results))) - set(kept):
            self.at[op.results[k]], self.shardings[op.results[k]] = inputs[k], results[k]
        blocks = []
        for number, returned in enumerate(op.returned):
            params = tuple(self._name(v, s) for v, s in carried) if is_loop else ()
            place = (op.index, number + is_loop)
            loop = (op, inputs) if is_loop else None
            back = [returned[k] for k in kept]
            blocks.append(self._block(place, params, back, [results[k] for k in kept], loop))
        outputs = tuple(self._name(v, s) for v, s in carried)
        operands = tuple(inputs[k] for k in kept) if is_loop else inputs
        read = dict.fromkeys(v for block in blocks for v in _captured(block))
        operands += tuple(v for v in read if v not in operands)
        if outputs:
            self._add(LocalOp(op.kind, operands, outputs, op.index, blocks=tuple(blocks)))

    def _whole(self, value: int) -> Sharding:
        return replicated(len(self.graph.values[value].shape))

    def _new(self, tensor: Tensor, sharding: Sharding | None) -> int:
        shape, nbytes = tensor.shape, tensor.nbytes
        if sharding is not None and any(sharding):
            shape = local_shape(shape, sharding, self.mesh)
            nbytes = -(-nbytes // self.mesh.size(a for dim in sharding for a in dim))
        self.values.append(LocalValue(shape, tensor.dtype, nbytes, tensor.id))
        self.layouts.append(replicated(len(shape)) if sharding is None else sharding)
        return len(self.values) - 1

    def _name(self, value: int, sharding: Sharding | None) -> int:
        """A new local value that ``value`` is from here on."""
        tensor = self.graph.values[value]
        self.at[value] = self._new(tensor, sharding)
        self.shardings[value] = self._whole(value) if sharding is None else sharding
        return self.at[value]

    def _read(self, value: int, wanted: Sharding, reader: int) -> int:
        tensor = self.graph.values[value]
        if tensor.free:
            return self._materialize(tensor, wanted, reader)
        if self.shardings[value] == wanted:
            return self.at[value]
        current, depth = self._place(value)
        root = self.roots.get(current, current)
        frame = self.frames[depth]
        for target in self.chains[(value, wanted)]:
            key = (root, target)
            if self.layouts[root] == target:
                frame.made[key] = root
            if key not in frame.made:
                kind, axes, dim = step_of(self.layouts[current], target)
                after = frame.made[key] = self._new(tensor, target)
                self.roots[after], self.homes[after] = root, depth
                frame.ops.append(
                    LocalOp(kind, (current,), (after,), reader, axes=axes, dims=(dim,))
                )
            current = frame.made[key]
        return current

    def _place(self, value: int) -> tuple[int, int]:
        """What to reshard for a reader of ``value`` here, and the depth of the frame to do it in.

        What a loop carries unchanged is resharded before the loop (see :mod:`autoshard.reads`).
        """
        local, depth = self.at[value], len(self.frames) - 1
        while True:
            frame = self.frames[depth]
            position = _unchanged(frame.loop, value)
            if frame.loop is not None and position is not None:
                value, local = frame.loop.operands[position], frame.inits[position]
                depth -= 1
            elif self.homes.get(local, depth) < depth:
                depth -= 1
            else:
                return local, depth

    def _materialize(self, tensor: Tensor, wanted: Sharding, reader: int) -> int:
        """A free value made where it is read, in the sharding wanted there."""
        made_here = self.frames[-1].free
        key = (tensor.id, wanted)
        if key not in made_here:
            maker = self.graph.ops[tensor.op]
            inputs = []
            for position, value in enumerate(maker.operands):
                operand = self.graph.values[value]
                sharding = _projected(maker, position, operand, wanted)
                inputs.append(self._materialize(operand, sharding, reader))
            made = self._new(tensor, wanted)
            self._add(LocalOp(maker.kind, tuple(inputs), (made,), maker.index))
            made_here[key] = made
        return made_here[key]

    def _sides(self, op: Op) -> tuple[DotSide, DotSide] | None:
        rule = op.rule
        if op.kind != "dot_general" or rule is None:
            return None
        lhs, rhs = ([f for dim in rule.operands[k] for f in dim] for k in (0, 1))
        out = [f for dim in rule.results[0] for f in dim]
        batch = [f for f in out if f in lhs and f in rhs]
        summed = [f for f in lhs if f in rhs and f not in out]

        def side(k: int) -> DotSide:
            dims = {f: d for d, factors in enumerate(rule.operands[k]) for f in factors}
            return DotSide(
                tuple(dims[f] for f in batch),
                tuple(dims[f] for f in summed),
            )

        return side(0), side(1)


def _unchanged(loop: Op | None, value: int) -> int | None:
    """Where a loop carries ``value`` if it gives it back as it is."""
    if loop is None or value not in loop.results:
        return None
    position = loop.results.index(value)
    return position if loop.returned[0][position] == value else None


def _captured(block: LocalBlock) -> tuple[int, ...]:
    """Values made outside a block that it reads, in order of reading."""
    inside = {*block.params, *(v for op in block.ops for v in op.outputs)}
    read = dict.fromkeys((*(v for op in block.ops for v in op.inputs), *block.returned))
    return tuple(v for v in read if v not in inside)


def _reduced(op: Op) -> tuple[int, ...]:
    """The dimensions that a reduction sums away."""
    if op.kind != "reduce" or op.rule is None:
        return ()
    kept = {f for dim in op.rule.results[0] for f in dim}
    return tuple(d for d, factors in enumerate(op.rule.operands[0]) if not kept & set(factors))


def _scattered(partial: Sharding, result: Sharding) -> int:
    """The dimension over which a reduce-scatter spreads its result."""
    return next(d for d, (p, r) in enumerate(zip(partial, result, strict=True)) if p != r)


def _projected(op: Op, position: int, operand: Tensor, wanted: Sharding) -> Sharding:
    """What an operand of a free op must look like for its result to come out as wanted."""
    rule = op.rule
    assert rule is not None  # free ops have one
    axes = {
        factors[0]: dim
        for factors, dim in zip(rule.results[0], wanted, strict=True)
        if len(factors) == 1
    }
    return tuple(
        axes.get(factors[0], ()) if len(factors) == 1 and rule.sizes[factors[0]] == size else ()
        for factors, size in zip(rule.operands[position], operand.shape, strict=True)
    )
