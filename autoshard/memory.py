"""Live bytes of one device over its program: what is held, when, and by whom.

The order in which ops run and what is written over what follow the compiler. XLA:CPU (jaxlib
0.10.2; found by comparing its memory analysis and schedules with programs) runs whatever is ready,
first come, first served; combines independent all-reduces of equal groups into one that waits for
all; writes a result over a dying operand of equal size where both are read and written element by
element; lets a loop take over its initial values' buffers where it is their last reader. For other
compilers ops run in program order and all-reduces stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autoshard.buffers import Kernel, Kernels, kernels
from autoshard.cost_models.protocol import Compiler
from autoshard.cost_models.tiling import stored_elements
from autoshard.graph import Graph
from autoshard.local import LocalBlock, LocalOp, LocalProgram, LocalValue
from autoshard.narrowing import narrowed, with_hoisted
from autoshard.onehot import with_selects
from autoshard.schedule import combined, fifo_order

_HALVES = frozenset({"bf16", "f16"})

_CONVERTS = jax.__version_info__ < (0, 11)
"""Whether XLA:CPU multiplies widened copies of half-precision arguments.

With jax 0.12 it multiplies many of them as they are."""

SHOWN = 20
"""Holders at the fullest moment that are named."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one call on one device.

    Attributes:
        peak_bytes: Arguments + results + temporaries - aliased [bytes].
        timeline: (index of an op, live bytes while it runs) in the order in which ops run; an op in
            a loop runs once.
        holders: What is live at the fullest moment, (name, bytes), the largest first.
        buffers: Every buffer besides the arguments.
    """

    peak_bytes: int
    timeline: tuple[tuple[int, int], ...]
    holders: tuple[tuple[str, int], ...]
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer and when it is held.

    Attributes:
        value: Id of the graph's value that it is, or is a copy of.
        resharded: Whether it is that value in another sharding than it was made in.
        start: Position in the timeline from which it is held.
        stop: Position from which it is not.
    """

    value: int
    resharded: bool
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """When buffers are held, by the order in which a program runs.

    Attributes:
        steps: How many steps the program has, each loop's body run through once.
        buffers: By id of the graph's value: from which step to which (exclusive) each buffer that
            is this value, or a copy of it, is held.
        written: Values that an op writes to memory.
    """

    steps: int
    buffers: Mapping[int, Sequence[tuple[int, int]]]
    written: frozenset[int]


def footprint(graph: Graph, program: LocalProgram, compiler: Compiler) -> Footprint:
    """Follow a program through its run.

    Args:
        graph: The program it was made of, for names.
        program: What one device runs.
        compiler: Which of XLA's compilers orders and fuses it.
    """
    values, main = list(program.values), program.main
    if compiler == "cpu":
        values, main = _widened(program)
    elif compiler == "tpu":
        program = with_selects(graph, program)
        values, main = with_hoisted(narrowed(graph, program), program.main)
        values = [_tiled(value) for value in values]
    arguments = [values[v].nbytes for v in main.params]
    tied_results = {r for _, r in program.ties}
    run = _Run(values, compiler)
    given = {main.params[a]: main.returned[r] for a, r in program.ties}
    peak = run.block(main, given, donated=True)
    base = sum(arguments)
    results = sum(values[v].nbytes for r, v in enumerate(main.returned) if r not in tied_results)
    names = _Names(graph, main, values, run.copies)
    held = [(graph.argument_info[k].name, b) for k, b in enumerate(arguments)]
    held += [(names.of(v), b) for v, b in peak.held]
    merged: dict[str, int] = {}
    for name, nbytes in held:
        merged[name] = merged.get(name, 0) + nbytes
    shown = sorted((h for h in merged.items() if h[1]), key=lambda h: -h[1])[:SHOWN]
    timeline = tuple((op, base + b) for op, b in peak.timeline)
    buffers = []
    for value, start, stop in peak.spans:
        kernel, source = run.copies[value], values[value].source
        own = kernel.op is None or kernel.source == graph.values[source].op
        buffers.append(Buffer(source, not own, start, stop))
    return Footprint(base + max(results, peak.nbytes), timeline, tuple(shown), tuple(buffers))


def occupancy(program: LocalProgram, compiler: Compiler) -> Occupancy:
    """When the buffers of a program are held; arguments are not listed."""
    values = list(program.values)
    run = _Run(values, compiler)
    given = {program.main.params[a]: program.main.returned[r] for a, r in program.ties}
    peak = run.block(program.main, given, donated=True)
    buffers: dict[int, list[tuple[int, int]]] = {}
    for value, start, stop in peak.spans:
        buffers.setdefault(values[value].source, []).append((start, stop))
    written = {values[v].source for v, kernel in run.copies.items() if kernel.op is not None}
    return Occupancy(len(peak.timeline), buffers, frozenset(written))


def _tiled(value: LocalValue) -> LocalValue:
    """A value as a TPU stores it, with the padding of its tiles."""
    count = math.prod(value.shape)
    if not count or not value.nbytes:
        return value
    return replace(value, nbytes=value.nbytes * stored_elements(value.shape) // count)


def _widened(program: LocalProgram) -> tuple[list[LocalValue], LocalBlock]:
    """The program as XLA:CPU runs it, which computes half-precision floats in f32.

    Arguments, results and what loops carry stay as they are: an argument is converted before it is
    read, a result after it is made.
    """
    main, values = program.main, list(program.values)
    if not _CONVERTS:
        ends = {*main.params, *main.returned}
        for v, value in enumerate(values):
            if value.dtype in _HALVES and v not in ends:
                values[v] = replace(value, dtype="f32", nbytes=2 * value.nbytes)
        return values, main
    maker = {v: op for op in main.ops for v in op.outputs}
    halves = {v for v, value in enumerate(values) if value.dtype in _HALVES}
    carried = set(_carried(main))
    given_back = {v for v in main.returned if v in halves and v in maker and v not in carried}
    kept = {*main.params, *carried}

    def converted(value: int, dtype: str, nbytes: int, op: int) -> LocalOp:
        values.append(replace(program.values[value], dtype=dtype, nbytes=nbytes))
        return LocalOp("convert", (value,), (len(values) - 1,), op)

    wide: dict[int, int] = {}
    ops: list[LocalOp] = []
    for op in main.ops:
        for v in _read(op):
            if v in halves and v in main.params and v not in wide:
                ops.append(converted(v, "f32", 2 * values[v].nbytes, op.op))
                wide[v] = ops[-1].outputs[0]
        ops.append(_reading(op, wide))
    narrow: dict[int, int] = {}
    for v in dict.fromkeys(main.returned):
        if v in given_back:
            ops.append(converted(v, values[v].dtype, values[v].nbytes, maker[v].op))
            narrow[v] = ops[-1].outputs[0]
    for v in halves - kept:
        values[v] = replace(values[v], dtype="f32", nbytes=2 * values[v].nbytes)
    returned = tuple(narrow.get(v, v) for v in main.returned)
    return values, LocalBlock(main.params, tuple(ops), returned)


def _carried(block: LocalBlock) -> Iterator[int]:
    """Values that loops carry, before, in and after the loops."""
    for op in block.ops:
        for inside in op.blocks:
            if op.kind == "while":
                yield from (*op.inputs[: len(op.outputs)], *op.outputs)
                yield from (*inside.params, *inside.returned)
            yield from _carried(inside)


def _read(op: LocalOp) -> tuple[int, ...]:
    """What an op reads; a loop does not read what it carries."""
    return op.inputs[len(op.outputs) :] if op.kind == "while" else op.inputs


def _reading(op: LocalOp, wide: Mapping[int, int]) -> LocalOp:
    """The op with values replaced that it, or a block in it, reads."""
    blocks = tuple(
        LocalBlock(
            block.params,
            tuple(_reading(inner, wide) for inner in block.ops),
            tuple(wide.get(v, v) for v in block.returned),
        )
        for block in op.blocks
    )
    read = _read(op)
    start = op.inputs[: len(op.inputs) - len(read)]
    return replace(op, inputs=(*start, *(wide.get(v, v) for v in read)), blocks=blocks)


@dataclass(frozen=True, slots=True)
class _Peak:
    """The fullest moment of a block, without what was given to it.

    Attributes:
        nbytes: Live bytes.
        held: Values that make them up, with their bytes.
        timeline: (index of op, live bytes) in order.
        spans: (value, position in the timeline from which it is held, position from which it is
            not) of every buffer.
    """

    nbytes: int
    held: tuple[tuple[int, int], ...]
    timeline: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int, int], ...]


class _Run:
    """Goes through blocks; ``values`` grows by the copies that the compiler makes."""

    def __init__(self, values: list[LocalValue], compiler: Compiler) -> None:
        self.values, self.compiler = values, compiler
        self.copies: dict[int, Kernel] = {}  # value -> what made it

    def block(self, block: LocalBlock, given: Mapping[int, int], donated: bool) -> _Peak:
        """The peak of a block.

        Args:
            block: The block.
            given: Parameters whose buffer takes a returned value, with that value.
            donated: Whether these parameters are buffers of the caller's, which count elsewhere.
        """
        fused = kernels(block, self.values, self.compiler)
        order: Sequence[Kernel] = fused.kernels
        if self.compiler == "cpu":
            order = fifo_order(combined(order))
        for kernel in order:
            for value in kernel.outputs:
                self.copies[value] = kernel
        nested = {
            k: [self._nested(kernel.op, inside) for inside in kernel.op.blocks]
            for k, kernel in enumerate(order)
            if kernel.op is not None and kernel.op.blocks
        }
        walk = _Walk(self.values, order, fused, given, donated)
        return walk.run(nested)

    def _nested(self, op: LocalOp, block: LocalBlock) -> _Peak:
        if op.kind != "while":
            return self.block(block, {}, donated=False)
        return self.block(
            block, dict(zip(block.params, block.returned, strict=True)), donated=False
        )


class _Walk:
    """One block in its order: buffers come, take each other's place, and go."""

    def __init__(
        self,
        values: Sequence[LocalValue],
        order: Sequence[Kernel],
        fused: Kernels,
        given: Mapping[int, int],
        donated: bool,
    ) -> None:
        self.values, self.order = values, order
        self.root = fused.root
        self.written = {v: t for t, kernel in enumerate(order) for v in kernel.outputs}
        self.given = {p: self._root(v) for p, v in given.items()}
        self.last: dict[int, int] = {}
        for t, kernel in enumerate(order):
            for value in kernel.reads:
                self.last[value] = t
        self.last.update({v: len(order) for v in fused.returned if v is not None})
        self.same: dict[int, int] = {}  # loop result -> the buffer it took over
        for t, kernel in enumerate(order):
            if kernel.op is not None and kernel.op.kind == "while":
                self._carry(t, kernel.op)
        for value, t in list(self.last.items()):
            buffer = self._buffer(value)
            self.last[buffer] = max(self.last.get(buffer, t), t)
        self.outside = {
            value for p, value in self.given.items() if donated and self._may_replace(p, value)
        }

    def _root(self, value: int) -> int:
        return self.root.get(value, value)

    def _buffer(self, value: int) -> int:
        while value in self.same:
            value = self.same[value]
        return value

    def _may_replace(self, param: int, value: int) -> bool:
        """Whether a result can be written into the donated argument: nothing reads that later."""
        buffer = self._buffer(value)
        read = self.last.get(param, -1)
        if buffer not in self.written:
            return True
        t = self.written[buffer]
        return read < t or (read == t and self.order[t].reads.get(param, False))

    def _carry(self, time: int, loop: LocalOp) -> None:
        """Which buffers a loop goes on with, and which it has to copy."""
        taken: set[int] = set()
        for position, out in enumerate(loop.outputs):
            init = self._root(loop.inputs[position])
            ours = init in self.written or self.given.get(init) == out
            if ours and init not in taken and self.last.get(init) == time:
                self.same[out] = init
                taken.add(init)

    def run(self, nested: Mapping[int, Sequence[_Peak]]) -> _Peak:
        alive: dict[int, int] = {}
        since: dict[int, int] = {}
        spans: list[tuple[int, int, int]] = []
        live = peak = 0
        held: tuple[tuple[int, int], ...] = ()
        timeline: list[tuple[int, int]] = []
        dying: dict[int, list[int]] = {}
        for t, kernel in enumerate(self.order):
            now = len(timeline)
            for position, value in enumerate(kernel.outputs):
                nbytes = self.values[value].nbytes
                if self._buffer(value) != value or value in self.outside:
                    continue
                place = self._place(kernel, t, nbytes, alive) if position == 0 else None
                if place is None:
                    live += nbytes
                elif place in alive:
                    del alive[place]
                    spans.append((place, since[place], now))
                else:
                    continue  # over a parameter, which is counted elsewhere
                alive[value], since[value] = nbytes, now
                dying.setdefault(max(t, self.last.get(value, t)), []).append(value)
            timeline.append((kernel.source, live))
            if live > peak:
                peak, held = live, tuple(alive.items())
            inside = nested.get(t, ())
            for inner in inside:
                spans += [(v, now + 1 + a, now + 1 + b) for v, a, b in inner.spans]
                if live + inner.nbytes > peak:
                    peak, held = live + inner.nbytes, (*alive.items(), *inner.held)
            longest = max((inner.timeline for inner in inside), key=len, default=())
            timeline += [(op, live + b) for op, b in longest]
            for dead in [v for v in dying.pop(t, ()) if v in alive]:
                live -= alive.pop(dead)
                spans.append((dead, since[dead], len(timeline)))
        spans += [(v, since[v], len(timeline)) for v in alive]
        return _Peak(peak, held, tuple(timeline), tuple(spans))

    def _place(
        self, kernel: Kernel, time: int, nbytes: int, alive: Mapping[int, int]
    ) -> int | None:
        """The buffer that the result is written over."""
        if kernel.kind == "copy" or (kernel.op is not None and kernel.op.blocks):
            return None
        for value, same in kernel.reads.items():
            buffer = self._buffer(value)
            if same and self.last.get(buffer) == time and alive.get(buffer) == nbytes:
                return buffer
        if kernel.kind == "dynamic_update_slice":
            for value, same in kernel.reads.items():
                if same and self._buffer(value) in self.given:
                    return self._buffer(value)
        return None


class _Names:
    """What values are called in messages and reports."""

    def __init__(
        self,
        graph: Graph,
        main: LocalBlock,
        values: Sequence[LocalValue],
        makers: Mapping[int, Kernel],
    ) -> None:
        self.graph, self.values, self.makers = graph, values, makers
        self.results = {
            v: graph.result_info[r].name for r, v in reversed([*enumerate(main.returned)])
        }

    def of(self, value: int) -> str:
        """E.g. ``all_gather of state['w'] for dot_general #12 at model.py:7``."""
        if value in self.results:
            return self.results[value]
        kernel, here = self.makers[value], self.values[value]
        op = self.graph.ops[kernel.source] if kernel.source < len(self.graph.ops) else None
        at = f" at {op.source}" if op is not None and op.source else ""
        shape = f"{here.dtype}{list(here.shape)}"
        tensor = self.graph.values[here.source]
        if op is not None and kernel.kind == op.kind:
            return f"{op.kind} #{op.index}{at} {shape}"
        whom = f"{op.kind} #{op.index}" if op is not None else "the result"
        if tensor.op < 0:
            what = self.graph.argument_info[tensor.position].name
        else:
            maker = self.graph.ops[tensor.op]
            what = f"{maker.kind} #{maker.index}"
        return f"{kernel.kind} of {what} for {whom}{at} {shape}"
