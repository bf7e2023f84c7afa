"""From a graph and a cost model to a problem in numbers: nodes, edges, live intervals.

A node is a decision: the sharding of an argument or of a loop's carried value, or the strategy of
an op. An edge is a value that one node makes and another reads; its matrix prices the reshard
between what comes out and what is wanted. Donated arguments are tied to the results that replace
them by an edge back to the argument.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.protocol import CostModel, MeshAxis, emitted
from autoshard.errors import InputError
from autoshard.fusion import Fusion, fuse
from autoshard.graph import Graph, Op, Tensor
from autoshard.kinds import PRODUCTS
from autoshard.manual import BodyCost, body_cost
from autoshard.narrowing import reads_halves
from autoshard.problem import FORBIDDEN, Problem
from autoshard.program import REGION_OPS
from autoshard.reads import place
from autoshard.reshard import Resharder, layouts, sent_bytes
from autoshard.shardings import MeshShape, Sharding, divides, loosened, splitting
from autoshard.strategies import Enumerator, Strategies
from autoshard.work import partial_bytes, work_facts, work_of

PICOSECONDS = 1e12
"""Costs are whole picoseconds, so that sums and optima are exact."""


@dataclass(frozen=True, slots=True)
class Node:
    """One decision.

    Attributes:
        kind: ``argument`` and ``carried`` choose the sharding of a value, ``op`` a strategy;
            ``hub`` chooses the sharding in which one block's readers of a value share it.
        op: Index of the op; -1 for an argument.
        values: The values whose sharding it decides.
        layouts: Per value, the layout id under each choice, ``[S]``.
        strategies: For an op, its strategies.
        seconds: Compute and memory time of one execution under each choice [s], ``[S]``.
        reduce_s: Time of the all-reduce or reduce-scatter of its partial results [s], ``[S]``.
    """

    kind: Literal["argument", "carried", "op", "hub"]
    op: int
    values: tuple[int, ...]
    layouts: tuple[NDArray[np.int64], ...]
    strategies: Strategies | None
    seconds: NDArray[np.float64]
    reduce_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class Priced:
    """A problem, and what its nodes mean in the graph.

    Attributes:
        problem: What a solver sees; costs in picoseconds, usages in bytes.
        nodes: One per node of the problem.
        moved: Per edge of the problem, the value that is read and the layout ids that its reader
            wants of it, one per choice.
        maker: Per value, (node, position among that node's values); (-1, 0) for free values.
        fusion: The fusion model's outcome the bytes were counted with.
        resharder: Prices and paths of reshards.
        bodies: By the index of a ``shard_map``, what its body costs.
    """

    problem: Problem
    nodes: tuple[Node, ...]
    moved: tuple[tuple[int, NDArray[np.int64]], ...]
    maker: tuple[tuple[int, int], ...]
    fusion: Fusion
    resharder: Resharder
    bodies: Mapping[int, BodyCost]


def price(
    graph: Graph, mesh: MeshShape, model: CostModel, memory_limit: int | None = None
) -> Priced:
    """Build the problem of choosing every sharding in ``graph``.

    Args:
        graph: The program.
        mesh: The mesh to run on.
        model: Prices.
        memory_limit: Upper bound of the live bytes on one device [bytes].

    Raises:
        InputError: A pin cannot be met (uneven split, unknown layout, two pins on one buffer).
    """
    return _Builder(graph, mesh, model).build(memory_limit)


class _Builder:
    def __init__(self, graph: Graph, mesh: MeshShape, model: CostModel) -> None:
        self.graph, self.mesh, self.model = graph, mesh, model
        self.fusion = fuse(graph, model.compiler)
        usual = _asks_for_usual(graph, mesh)
        self.resharder = Resharder(mesh, model, usual)
        self.enumerator = Enumerator(graph, mesh, model.compiler != "cpu", usual)
        self.nodes: list[Node] = []
        self.maker: list[tuple[int, int]] = [(-1, 0)] * len(graph.values)
        self.extra: dict[int, NDArray[np.float64]] = {}  # node -> cost of fixed readers [s]
        self.edges: list[tuple[int, int]] = []
        self.matrices: list[NDArray[np.int64]] = []
        self.moved: list[tuple[int, NDArray[np.int64]]] = []
        self.bodies: dict[int, BodyCost] = {}
        # Arrays that are equal by construction are one, so that what is alike is priced, and later
        # solved, once.
        self.known: dict[object, NDArray[np.int64]] = {}
        self.nothing: dict[int, NDArray[np.float64]] = {}
        self.left: dict[object, NDArray[np.float64]] = {}
        self.times: dict[object, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self.hubs: dict[tuple[int, tuple[int, int]], int] = {}
        self.free_layouts: dict[tuple[tuple[int, ...], bool], NDArray[np.int64]] = {}

    def build(self, memory_limit: int | None) -> Priced:
        pins = self._argument_pins()
        for position, value in enumerate(self.graph.arguments):
            self._tensor_node("argument", -1, value, pins[position])
        for op in self.graph.ops:
            if op.name in REGION_OPS:
                for value in op.results:
                    self._tensor_node("carried", op.index, value, None)
            elif op.is_alias:
                for value in op.results:
                    if self.graph.values[value].alias == value:  # of a free value
                        self._tensor_node("carried", op.index, value, None)
            elif not self._is_free(op):
                self._op_node(op)
        for tensor in self.graph.values:
            self.maker[tensor.id] = self.maker[tensor.alias]
        self._connect()
        return Priced(
            problem=self._problem(memory_limit),
            nodes=tuple(self.nodes),
            moved=tuple(self.moved),
            maker=tuple(self.maker),
            fusion=self.fusion,
            resharder=self.resharder,
            bodies=self.bodies,
        )

    def _is_free(self, op: Op) -> bool:
        return bool(op.results) and all(self.graph.values[v].free for v in op.results)

    def _argument_pins(self) -> list[Sharding | None]:
        """Pins of arguments, with those of the results that are tied to them."""
        pins = [self._splitting(info.pin) for info in self.graph.argument_info]
        for a, r in self.graph.ties:
            theirs = self._splitting(self.graph.result_info[r].pin)
            if theirs is not None and pins[a] is not None and pins[a] != theirs:
                raise InputError(
                    f"{self.graph.argument_info[a].name} is donated and pinned to {pins[a]}, but "
                    f"the result that replaces it is pinned to {theirs}",
                    at=self.graph.result_info[r].name,
                    fix="pin both to the same sharding, or do not donate the argument",
                )
            pins[a] = pins[a] or theirs
        return pins

    def _splitting(self, pin: Sharding | None) -> Sharding | None:
        return None if pin is None else splitting(pin, self.mesh)

    def _tensor_node(
        self, kind: Literal["argument", "carried"], op: int, value: int, pin: Sharding | None
    ) -> None:
        shape = self.graph.values[value].shape
        if pin is not None:
            ids = np.array([self._pinned(pin, value)], np.int64)
        else:
            ids = self._free_layouts(shape)
        nothing = self._nothing(len(ids))
        self._add(Node(kind, op, (value,), (ids,), None, nothing, nothing))

    def _nothing(self, count: int) -> NDArray[np.float64]:
        """So many choices that take no time."""
        return self.nothing.setdefault(count, np.zeros(count))

    def _free_layouts(self, shape: tuple[int, ...], padded: bool = False) -> NDArray[np.int64]:
        """Layouts a value may be given, with the axes in mesh order within a dimension.

        Those that divide it and, on the way between ops, those that pad it little.
        """
        key = shape, padded
        if key not in self.free_layouts:
            table = layouts(len(shape), self.mesh)
            in_order = np.array([self._in_order(s) for s in table.shardings])
            fit = table.fitting(shape) if padded else table.dividing(shape)
            if self.resharder.usual:
                fit &= table.usual
            self.free_layouts[key] = np.flatnonzero(fit & in_order).astype(np.int64)
        return self.free_layouts[key]

    def _dividing(self, shape: tuple[int, ...], made: NDArray[np.int64]) -> NDArray[np.int64]:
        """The layouts that results made in padded ones are brought to, ``[S]``."""
        table = layouts(len(shape), self.mesh)
        if table.dividing(shape)[made].all():
            return made
        loose = [table.index[loosened(shape, table.shardings[i], self.mesh)] for i in made.tolist()]
        return np.array(loose, np.int64)

    def _sent(self, tensor: Tensor, reader: Op | None = None) -> int:
        compiler = self.model.compiler
        halved = reader is not None and reads_halves(self.graph, reader, tensor.dtype, compiler)
        return sent_bytes(tensor.nbytes, tensor.dtype, compiler, halved=halved)

    def _in_order(self, sharding: Sharding) -> bool:
        return all(tuple(sorted(d, key=self.mesh.names.index)) == d for d in sharding)

    def _pinned(self, pin: Sharding, value: int) -> int:
        tensor = self.graph.values[value]
        table = layouts(len(tensor.shape), self.mesh)
        pin = splitting(pin, self.mesh)
        if pin not in table.index or not divides(tensor.shape, pin, self.mesh):
            raise InputError(
                f"a {tensor.dtype}{list(tensor.shape)} cannot be pinned to {pin} on {self.mesh}",
                fix="pin dimensions that the axes divide, with axes in mesh order",
            )
        return table.index[pin]

    def _op_node(self, op: Op) -> None:
        strategies = self.enumerator.of(op)
        key = id(strategies), work_facts(self.graph, op, self.fusion)
        if key not in self.times:
            self.times[key] = self._times(op, strategies)
        seconds, reduce_s = self.times[key]
        if op.body is not None:
            cost = self.bodies[op.index] = body_cost(op.body, self.mesh, self.model)
            seconds, reduce_s = np.array([cost.seconds]), np.array([cost.communication_s])
        self._add(
            Node(
                "op",
                op.index,
                op.results,
                strategies.results,
                strategies,
                seconds,
                reduce_s,
            )
        )

    def _times(
        self, op: Op, strategies: Strategies
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Time of one execution under each strategy, and of combining partial results [s]."""
        work = work_of(self.graph, op, strategies, self.fusion, self.mesh)
        if self._runs(op):
            seconds = self.model.op_s(work)
        else:  # fused into what reads it: its work counts, starting a kernel does not
            seconds = np.maximum(self.model.compute_s(work), self.model.hbm_s(work))
        return seconds, self._reduce_s(op, strategies)

    def _runs(self, op: Op) -> bool:
        """Whether the op is the root of a kernel (and pays for starting it)."""
        return (
            any(self.fusion.materialized[v] for v in op.results)
            and op.name != "sdy.sharding_constraint"
        )

    def _reduce_s(self, op: Op, strategies: Strategies) -> NDArray[np.float64]:
        seconds = np.zeros(len(strategies))
        if not any(strategies.reduced):
            return seconds
        sizes = [
            partial_bytes(self.graph, op, strategies, self.mesh, self.model.compiler, result)
            for result in range(len(op.results))
        ]
        for size, groups in itertools.product(sizes, set(strategies.reduced) - {()}):
            rows = np.array([r == groups for r in strategies.reduced])
            for group in groups:
                axes = tuple(MeshAxis(a, self.mesh.size((a,))) for a in group)
                whole, part = rows & ~strategies.scattered, rows & strategies.scattered
                if whole.any():
                    seconds[whole] += self.model.collective_s("all_reduce", size[whole], axes)
                if part.any():
                    kind = emitted(self.model, "reduce_scatter", axes)
                    seconds[part] += self.model.collective_s(kind, size[part], axes)
        return seconds

    def _add(self, node: Node) -> None:
        for position, value in enumerate(node.values):
            self.maker[value] = (len(self.nodes), position)
        self.nodes.append(node)

    def _connect(self) -> None:
        graph = self.graph
        self._add_hubs()
        for number, node in enumerate(list(self.nodes)):
            if node.kind == "op" and node.strategies is not None:
                op = graph.ops[node.op]
                seen = set()
                for value, wanted in zip(op.operands, node.strategies.operands, strict=True):
                    # An op that reads a value twice in one sharding has it moved once.
                    if (value, wanted.tobytes()) not in seen:
                        seen.add((value, wanted.tobytes()))
                        block, trips, _ = place(graph, value, (op.parent, op.region), op.trips)
                        product = op.kind in PRODUCTS
                        hub = self.hubs.get((value, block)) if product else None
                        self._edge(value, number, wanted, trips, hub)
            elif node.kind == "carried" and graph.ops[node.op].name in REGION_OPS:
                op = graph.ops[node.op]
                position = op.results.index(node.values[0])
                wanted = node.layouts[0]
                if op.name == "stablehlo.while":
                    self._edge(op.operands[position], number, wanted, op.trips)
                first = 1 if op.name == "stablehlo.while" else 0
                for region, returned in enumerate(op.returned):
                    value, inside = returned[position], (op.index, region + first)
                    _, trips, _ = place(graph, value, inside, op.body_trips)
                    self._edge(value, number, wanted, trips)
        for a, r in graph.ties:
            number, _ = self.maker[graph.arguments[a]]
            self._edge(graph.results[r], number, self.nodes[number].layouts[0], 1)
        tied = {r for _, r in graph.ties}
        for r, value in enumerate(graph.results):
            pin = graph.result_info[r].pin
            number, position = self.maker[value]
            if r in tied or number < 0:
                continue
            tensor, made = graph.values[value], self.nodes[number].layouts[position]
            if pin is not None:
                wanted = np.full(len(made), self._pinned(pin, value))
            else:  # a result is never padded
                wanted = self._dividing(tensor.shape, made)
            if (wanted == made).all():
                continue
            cost = self._leaving(tensor, made, wanted)
            self.extra[number] = self.extra[number] + cost if number in self.extra else cost

    def _leaving(
        self, tensor: Tensor, made: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Price of bringing a result from each layout to the one it leaves in [s], ``[S]``."""
        key = id(made), wanted.tobytes(), tensor.shape, self._sent(tensor)
        if key not in self.left:
            kinds, which = np.unique(wanted, return_inverse=True)
            prices = self.resharder.between(tensor.shape, self._sent(tensor), made, kinds)
            self.left[key] = prices[np.arange(len(made)), which]
        return self.left[key]

    def _add_hubs(self) -> None:
        """Give a value that several products of a block read one more node between it and them.

        A reshard that two readers want is made once. The hub chooses the sharding they share and
        pays for reaching it once; a reader that wants the value as it was made takes its part of
        the shared one, which costs no communication. The plan, which lets such a reader take the
        original, is never dearer than this.
        """
        graph = self.graph
        readers: dict[tuple[int, tuple[int, int], int], set[int]] = {}
        for op in graph.ops:
            if op.kind in PRODUCTS:
                for value in op.operands:
                    if graph.values[value].shape and self.maker[value][0] >= 0:
                        block, trips, _ = place(graph, value, (op.parent, op.region), op.trips)
                        readers.setdefault((value, block, trips), set()).add(op.index)
        for (value, block, trips), ops in readers.items():
            ids = self._free_layouts(graph.values[value].shape, padded=True)
            if len(ops) < 2 or len(ids) == 1:
                continue
            nothing, hub = self._nothing(len(ids)), len(self.nodes)
            self.nodes.append(Node("hub", min(ops), (), (ids,), None, nothing, nothing))
            self._edge(value, hub, ids, trips)
            self.hubs[(value, block)] = hub

    def _edge(
        self,
        value: int,
        reader: int,
        wanted: NDArray[np.int64],
        trips: int,
        hub: int | None = None,
    ) -> None:
        number, position = (hub, 0) if hub is not None else self.maker[value]
        tensor = self.graph.values[value]
        if number < 0 or number == reader or not tensor.shape:
            return
        made = self.nodes[number].layouts[position]
        node = self.nodes[reader]
        reads = self.graph.ops[node.op] if node.kind in ("op", "hub") else None
        sent = self._sent(tensor, reads)
        key = (id(made), id(wanted), tensor.shape, sent, trips)
        if key not in self.known:
            prices = self.resharder.between(tensor.shape, sent, made, wanted)
            self.known[key] = _whole(prices * trips)
        self.edges.append((number, reader))
        self.moved.append((value, wanted))
        self.matrices.append(self.known[key])

    def _problem(self, memory_limit: int | None) -> Problem:
        costs, usages, intervals, names = [], [], [], []
        end = self.fusion.steps + 1
        for number, node in enumerate(self.nodes):
            trips = self.graph.ops[node.op].trips if node.kind == "op" else 1
            extra = self.extra.get(number)
            key = "cost", id(node.seconds), id(node.reduce_s), trips, id(extra)
            if key not in self.known:
                total = (node.seconds + node.reduce_s) * trips
                self.known[key] = _whole(total if extra is None else total + extra)
            costs.append(self.known[key])
            spans = [s for v in node.values if (s := self.fusion.spans[v]) != (0, 0)]
            first = min((a for a, _ in spans), default=0)
            last = max((b for _, b in spans), default=first + 1)
            intervals.append((0, end) if node.kind == "argument" else (first, last))
            usages.append(self._usage(node))
            names.append(self._name(node))
        return Problem(
            costs=tuple(costs),
            usages=tuple(usages),
            intervals=np.array(intervals, np.int64).reshape(-1, 2),
            edges=np.array(self.edges, np.int64).reshape(-1, 2),
            edge_costs=tuple(self.matrices),
            usage_limit=memory_limit,
            names=tuple(names),
        )

    def _usage(self, node: Node) -> NDArray[np.int64]:
        """Bytes on one device that the values of a node hold under each choice, ``[S]``."""
        held = [
            (tensor.shape, tensor.nbytes, self.fusion.copies[value], id(ids))
            for value, ids in zip(node.values, node.layouts, strict=node.kind != "hub")
            if self.fusion.copies[value] and (tensor := self.graph.values[value]).nbytes
        ]
        key = "usage", len(node), id(node.strategies), *held
        if key not in self.known:
            self.known[key] = np.ceil(self._held(node)).astype(np.int64)
        return self.known[key]

    def _held(self, node: Node) -> NDArray[np.float64]:
        usage = np.zeros(len(node))
        for value, ids in zip(node.values, node.layouts, strict=node.kind != "hub"):
            tensor = self.graph.values[value]
            pieces = layouts(len(tensor.shape), self.mesh).local_bytes(tensor.shape, tensor.nbytes)
            usage += self.fusion.copies[value] * pieces[ids]
        strategies = node.strategies
        if strategies is None or not any(strategies.reduced):
            return usage
        op = self.graph.ops[node.op]
        held = self.fusion.copies[op.results[0]] > 0
        if held and self.model.compiler == "cpu":
            # An all-reduce's operand waits beside its result for others to be combined with.
            reduced = np.array([bool(groups) for groups in strategies.reduced])
            usage = np.where(reduced, 2 * usage, usage)
        return usage

    def _name(self, node: Node) -> str:
        if node.kind == "argument":
            position = self.graph.arguments.index(node.values[0])
            return self.graph.argument_info[position].name
        op = self.graph.ops[node.op]
        if node.kind == "hub":
            return f"a value shared by readers from {op.kind} #{op.index} on"
        return f"{op.kind} #{op.index}" + (f" at {op.source}" if op.source else "")


def _asks_for_usual(graph: Graph, mesh: MeshShape) -> bool:
    """Whether nobody asks for a layout that is not a usual one (see :class:`Layouts`)."""
    asked = [info.pin for info in (*graph.argument_info, *graph.result_info)]
    asked += [s for op in graph.ops if op.fixed is not None for side in op.fixed for s in side]
    for sharding in asked:
        if sharding is not None:
            table = layouts(len(sharding), mesh)
            number = table.index.get(splitting(sharding, mesh))
            if number is None or not table.usual[number]:
                return False
    return True


def _whole(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Seconds as whole picoseconds; what is impossible as the solver's mark for it."""
    finite = np.isfinite(seconds)
    scaled = np.where(finite, np.minimum(seconds, 1e5) * PICOSECONDS, 0.0)
    return np.where(finite, np.rint(scaled), float(FORBIDDEN)).astype(np.int64)


def total_seconds(picoseconds: int) -> float:
    """A solver's cost as time [s]."""
    return picoseconds / PICOSECONDS if math.isfinite(picoseconds) else math.inf
