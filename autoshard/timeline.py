"""A plan's step as a schedule: what runs when on one device, and which communication is hidden.

Arithmetic and memory traffic are one stream, the links along each mesh axis another. A collective
that the compiler makes asynchronous occupies its links alone; one that it does not, and every one
whose cost model does not tell, keeps the device waiting. The body of a loop is scheduled once and
taken as often as it runs, one round after another; nothing of a round overlaps the next, but what
is outside the loop may overlap it. A ``shard_map`` is one task, its collectives exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoshard.cost_models.protocol import CostModel, MeshAxis, is_asynchronous, links
from autoshard.graph import Graph
from autoshard.local import LocalBlock, LocalOp, LocalProgram
from autoshard.moves import MovedSlice
from autoshard.plan_parts import OpPlan, PlannedCollective, TimelineEvent
from autoshard.shardings import MeshShape
from autoshard.streams import COMPUTE, Task, end_s, schedule


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what runs.

    Attributes:
        seconds: Length of the schedule [s].
        events: What takes time; of a loop the first round, at the time of the loop.
    """

    seconds: float
    events: tuple[TimelineEvent, ...]


def timeline_of(
    graph: Graph,
    program: LocalProgram,
    mesh: MeshShape,
    model: CostModel,
    *,
    ops: Iterable[OpPlan],
    collectives: Iterable[PlannedCollective],
    slices: Iterable[MovedSlice],
) -> Timeline:
    """Schedule a plan.

    Args:
        graph: The program.
        program: What one device runs of it.
        mesh: The mesh it runs on.
        model: Says which collectives are asynchronous, and what they occupy.
        ops: The ops that count, priced.
        collectives: The collectives of the plan.
        slices: The slices that reshards are made of, where they count.
    """
    return _Scheduler(graph, program, mesh, model, ops, collectives, slices).run()


@dataclass(frozen=True, slots=True)
class _Named:
    """A task, what it is called, and what goes on in it."""

    task: Task
    name: str
    kind: str
    op: int
    executions: int
    inside: tuple[TimelineEvent, ...] = ()


class _Scheduler:
    def __init__(
        self,
        graph: Graph,
        program: LocalProgram,
        mesh: MeshShape,
        model: CostModel,
        ops: Iterable[OpPlan],
        collectives: Iterable[PlannedCollective],
        slices: Iterable[MovedSlice],
    ) -> None:
        self.graph, self.program, self.mesh, self.model = graph, program, mesh, model
        self.computed = {op.index: op.seconds * op.trips for op in ops}
        self.sliced: dict[tuple[int, int], list[float]] = {}
        for moved in slices:
            self.sliced.setdefault((moved.op, moved.value), []).append(moved.seconds)
        self.sent: dict[int, list[PlannedCollective]] = {}
        for c in collectives:
            self.sent.setdefault(c.op, []).append(c)

    def run(self) -> Timeline:
        rows = self._rows(self.program.main, 1)
        # What has no place in the program of a device: conditions of loops.
        for op, seconds in self.computed.items():
            rows.append(self._computed(op, seconds, 1, ()))
        for sent in self.sent.values():
            rows += [self._sent(c, 1, ()) for c in sent]
        for (op, _), times in self.sliced.items():
            rows += [self._computed(op, seconds, 1, ()) for seconds in times]
        starts = schedule([row.task for row in rows])
        return Timeline(end_s([row.task for row in rows], starts), _events(rows, starts))

    def _rows(self, block: LocalBlock, executions: int) -> list[_Named]:
        """A block's tasks; each takes the time of one of so many executions of the block."""
        rows: list[_Named] = []
        maker: dict[int, int] = {}
        for ops in _together(block.ops, self.graph, self.program):
            after = tuple({maker[v] for op in ops for v in op.inputs if v in maker})
            row = self._row(ops, executions, after)
            for op in ops:
                maker.update((v, len(rows)) for v in op.outputs)
            rows.append(row)
        return rows

    def _row(self, ops: Sequence[LocalOp], executions: int, after: tuple[int, ...]) -> _Named:
        op = ops[-1]
        mine = self.graph.ops[op.op] if op.op < len(self.graph.ops) else None
        mapped = _mapped_results(op, self.graph)
        if mapped and _is_own(op, mapped, self.program):
            return self._mapped(op.op, executions, after)
        if op.blocks:
            return self._nested(op, executions, after)
        if op.axes:
            found = self._matching(op)
            return self._sent(found, executions, after) if found else _nothing(op, after)
        if mine is not None and _is_own(op, mine.results, self.program) and op.kind == mine.kind:
            return self._computed(op.op, self.computed.pop(op.op, 0.0), executions, after)
        if op.kind == "slice":  # any other op may have no result, as a callback has none
            times = self.sliced.get((op.op, self._source(op)), [])
            if times:
                return self._computed(op.op, times.pop(0), executions, after)
        return _nothing(op, after)

    def _source(self, op: LocalOp) -> int:
        return self.program.values[op.outputs[0]].source

    def _nested(self, op: LocalOp, executions: int, after: tuple[int, ...]) -> _Named:
        rounds = self.graph.ops[op.op].body_trips if op.kind == "while" else executions
        seconds, streams = 0.0, {COMPUTE}
        inside: tuple[TimelineEvent, ...] = ()
        for block in op.blocks:
            rows = self._rows(block, rounds) if rounds else []
            starts = schedule([row.task for row in rows])
            took = end_s([row.task for row in rows], starts)
            streams.update(s for row in rows for s in row.task.streams)
            if took >= seconds:
                seconds, inside = took, _events(rows, starts)
        times = rounds / executions if executions else 0.0
        name = f"{op.kind} #{op.op}" + (f" x{times:g}, its first round" if times != 1 else "")
        task = Task(seconds * times, tuple(sorted(streams)), after)
        return _Named(task, name, "loop", op.op, executions, inside)

    def _mapped(self, op: int, executions: int, after: tuple[int, ...]) -> _Named:
        sent = self.sent.pop(op, [])
        # Operands of the shard_map are resharded for it; those are tasks of their own.
        written = [c for c in sent if c.why.startswith("written in")]
        if len(written) < len(sent):
            self.sent[op] = [c for c in sent if c not in written]
        seconds = self.computed.pop(op, 0.0) + sum(c.seconds * c.trips for c in written)
        streams = {COMPUTE, *(s for c in written for s in self._links(c))}
        task = Task(seconds / max(1, executions), tuple(sorted(streams)), after)
        return _Named(task, f"shard_map #{op}", "compute", op, executions)

    def _computed(self, op: int, seconds: float, executions: int, after: tuple[int, ...]) -> _Named:
        found = self.graph.ops[op] if op < len(self.graph.ops) else None
        name = "slice of a result" if found is None else f"{found.kind} #{op}"
        if found is not None and found.source:
            name += f" ({found.source})"
        task = Task(seconds / max(1, executions), (COMPUTE,) if seconds else (), after)
        return _Named(task, name, "compute", op, executions)

    def _sent(self, c: PlannedCollective, executions: int, after: tuple[int, ...]) -> _Named:
        waits = () if is_asynchronous(self.model, c.kind) else (COMPUTE,)
        task = Task(c.seconds * c.trips / max(1, executions), (*waits, *self._links(c)), after)
        name = f"{c.kind} over {'*'.join(c.axes)}: {c.why}"
        return _Named(task, name, c.kind, c.op, executions)

    def _links(self, c: PlannedCollective) -> tuple[str, ...]:
        return links(self.model, tuple(MeshAxis(a, self.mesh.size((a,))) for a in c.axes))

    def _matching(self, op: LocalOp) -> PlannedCollective | None:
        """The planned collective that one of the device's program is."""
        value = self._source(op)
        mine = [c for c in self.sent.get(op.op, []) if c.value == value]
        same = [c for c in mine if c.axes == op.axes]
        chosen = [c for c in same if c.kind == op.kind] or same or mine
        if not chosen:
            return None
        self.sent[op.op].remove(chosen[0])
        return chosen[0]


def _together(
    ops: Sequence[LocalOp], graph: Graph, program: LocalProgram
) -> Iterable[tuple[LocalOp, ...]]:
    """Ops one by one, those of one ``shard_map`` together."""
    group: list[LocalOp] = []
    for op in ops:
        mapped = _mapped_results(op, graph)
        inside = bool(mapped) and _is_own(op, mapped, program)
        if group and (not inside or group[0].op != op.op):
            yield tuple(group)
            group = []
        if inside:
            group.append(op)
        else:
            yield (op,)
    if group:
        yield tuple(group)


def _mapped_results(op: LocalOp, graph: Graph) -> tuple[int, ...]:
    """The results of the ``shard_map`` that an op serves; none if it serves another op."""
    if op.op >= len(graph.ops) or graph.ops[op.op].body is None:
        return ()
    return graph.ops[op.op].results


def _is_own(op: LocalOp, results: Sequence[int], program: LocalProgram) -> bool:
    """Whether an op makes a result of the graph's op, rather than serving it."""
    return any(program.values[v].source in results for v in op.outputs)


def _nothing(op: LocalOp, after: tuple[int, ...]) -> _Named:
    return _Named(Task(0.0, (), after), op.kind, "compute", op.op, 1)


def _events(rows: Sequence[_Named], starts: Sequence[float]) -> tuple[TimelineEvent, ...]:
    found = []
    for row, start in zip(rows, starts, strict=True):
        task = row.task
        if task.seconds > 0:
            found.append(
                TimelineEvent(
                    name=row.name,
                    kind=row.kind,
                    streams=task.streams,
                    op=row.op,
                    start_s=start,
                    seconds=task.seconds,
                    executions=row.executions,
                )
            )
            found += [replace(e, start_s=e.start_s + start) for e in row.inside]
    return tuple(found)
