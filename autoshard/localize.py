"""From a graph and what is decided about it to the program of one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.graph import Graph, Op, Tensor
from autoshard.local import (
    Decisions,
    DotSide,
    LocalBlock,
    LocalOp,
    LocalProgram,
    LocalValue,
    step_of,
)
from autoshard.padding import masked_dims
from autoshard.program import REGION_OPS
from autoshard.shardings import MeshShape, Sharding, local_bytes, local_shape, replicated


def localize(graph: Graph, mesh: MeshShape, decisions: Decisions | None) -> LocalProgram:
    """The program of one device.

    Args:
        graph: The whole program.
        mesh: The mesh it runs on.
        decisions: How it is sharded; None for a single device that holds everything.
    """
    return _Expander(graph, mesh, decisions).program()


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
        for tensor in graph.values:
            if tensor.op < 0 and tensor.id not in graph.arguments:
                self._name(tensor.id, None)  # a token, which holds nothing
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
        if self.decisions is not None and op.index in self.decisions.twins:
            twin = self.graph.ops[self.decisions.twins[op.index]]
            for value, made in zip(op.results, twin.results, strict=True):
                self.at[value], self.shardings[value] = self.at[made], self.shardings[made]
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
        if op.body is not None and self.decisions is not None:
            self._body(op, op.body, inputs, results)
            return
        inputs = tuple(
            self._masked(op, position, sharding, local)
            for position, (sharding, local) in enumerate(zip(operands, inputs, strict=True))
        )
        natural = partial or results
        outputs = tuple(self._name(v, s) for v, s in zip(op.results, natural, strict=True))
        sides, dims = self._sides(op), _reduced(op)
        if op.collective is None:
            self._add(
                LocalOp(
                    op.kind,
                    inputs,
                    outputs,
                    op.index,
                    dims=dims,
                    sides=sides,
                    window=op.window,
                )
            )
        else:
            kind, axes, dims = op.collective.kind, op.collective.axes, (op.collective.dim,)
            self._add(LocalOp(kind, inputs, outputs, op.index, axes=axes, dims=dims))
        for position, group in itertools.product(range(len(op.results)), reduced):
            kind, dims = "all_reduce", ()
            if partial is not None:
                kind, dims = "reduce_scatter", (_scattered(partial[0], results[0]),)
            before = self.at[op.results[position]]
            after = self._name(op.results[position], results[position])
            self._add(LocalOp(kind, (before,), (after,), op.index, axes=group, dims=dims))

    def _masked(self, op: Op, position: int, sharding: Sharding, local: int) -> int:
        """The operand, or a copy whose padding is zero if the op sums over it."""
        tensor = self.graph.values[op.operands[position]]
        if all(
            tensor.shape[d] % self.mesh.size(sharding[d]) == 0 for d in masked_dims(op, position)
        ):
            return local
        copy = self._new(tensor, sharding)
        self._add(LocalOp("select", (local,), (copy,), op.index))
        return copy

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

    def _body(
        self, op: Op, body: Graph, inputs: tuple[int, ...], results: Sequence[Sharding]
    ) -> None:
        """Put the program of a ``shard_map`` in the place of the op; all of it counts as the op."""
        inner = localize(body, MeshShape((), ()), None)
        source = (*op.results, *op.operands)[0]
        here: dict[int, int] = dict(zip(inner.main.params, inputs, strict=True))

        def value_of(value: int) -> int:
            if value not in here:
                here[value] = len(self.values)
                self.values.append(replace(inner.values[value], source=source))
                self.layouts.append(replicated(len(inner.values[value].shape)))
            return here[value]

        def block_of(block: LocalBlock) -> LocalBlock:
            return LocalBlock(
                tuple(map(value_of, block.params)),
                tuple(map(op_of, block.ops)),
                tuple(map(value_of, block.returned)),
            )

        def op_of(inside: LocalOp) -> LocalOp:
            return replace(
                inside,
                inputs=tuple(map(value_of, inside.inputs)),
                outputs=tuple(map(value_of, inside.outputs)),
                op=op.index,
                blocks=tuple(map(block_of, inside.blocks)),
            )

        placed = block_of(inner.main)
        for inside in placed.ops:
            self._add(inside)
        for value, sharding, local in zip(op.results, results, placed.returned, strict=True):
            made = self._name(value, sharding)
            self._add(LocalOp("optimization_barrier", (local,), (made,), op.index))

    def _whole(self, value: int) -> Sharding:
        return replicated(len(self.graph.values[value].shape))

    def _new(self, tensor: Tensor, sharding: Sharding | None) -> int:
        shape, nbytes = tensor.shape, tensor.nbytes
        if sharding is not None and any(sharding):
            shape = local_shape(shape, sharding, self.mesh)
            nbytes = local_bytes(tensor.shape, nbytes, sharding, self.mesh)
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
                moved = self._with_padding(current, after) if kind == "all_gather" else after
                if kind == "slice":
                    padded = self._with_padding(after, current)
                    if padded != current:
                        frame.ops.append(LocalOp("pad", (current,), (padded,), reader))
                        current = padded
                frame.ops.append(
                    LocalOp(kind, (current,), (moved,), reader, axes=axes, dims=(dim,))
                )
                if moved != after:
                    frame.ops.append(LocalOp("slice", (moved,), (after,), reader))
            current = frame.made[key]
        return current

    def _with_padding(self, pieces: int, gathered: int) -> int:
        """What padded pieces are gathered to, before the padding is cut off, or sliced from."""
        before, after = self.layouts[pieces], self.layouts[gathered]
        piece, wanted = self.values[pieces], self.values[gathered]
        shape = tuple(
            part * self.mesh.size(old) // self.mesh.size(new)
            for part, old, new in zip(piece.shape, before, after, strict=True)
        )
        if shape == wanted.shape:
            return gathered
        nbytes = wanted.nbytes * math.prod(shape) // max(1, math.prod(wanted.shape))
        self.values.append(replace(wanted, shape=shape, nbytes=nbytes))
        self.layouts.append(after)
        return len(self.values) - 1

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
                assert maker.rule is not None  # free ops have one
                sharding = maker.rule.operand_for(wanted, position, operand.shape)
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
