"""What a report shows of a plan."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

import pandas as pd

from autoshard.cost_models.protocol import wire_bytes
from autoshard.plan import Plan
from autoshard.plan_parts import PlannedCollective, ReshardPlan
from autoshard.report.data import COLUMNS, ReportData
from autoshard.shardings import Sharding

ARGUMENT = -1
"""Producer of a value that is an argument of the program."""

_VALUE = re.compile(r"%(\d+)")


def report_data(
    plan: Plan,
    *,
    title: str,
    machine: str,
    date: str,
    versions: tuple[tuple[str, str], ...],
    comparison: pd.DataFrame | None = None,
) -> ReportData:
    """The tables of a report about ``plan``.

    Args:
        plan: What to report.
        title: What was planned, e.g. ``llama (small)``.
        machine: Where it ran.
        date: When, as text.
        versions: Name and version of what took part.
        comparison: As in :class:`ReportData`, the plan itself first; None shows its predictions.
    """
    table = plan.table().rename(columns={"op": "index", "communication_s": "comm_s"})
    predicted = plan.predicted
    own = (
        "autoshard", "predicted", predicted.step_s, predicted.flops,
        predicted.collective_bytes, predicted.peak_bytes,
    )  # fmt: skip
    return ReportData(
        title=title,
        mesh=plan.mesh,
        machine=machine,
        date=date,
        versions=versions,
        solver_status=plan.solver.status,
        solver_gap=plan.solver.gap,
        planning_s=plan.planning_s,
        memory_limit_bytes=plan.memory_limit,
        arguments=_frame(
            "arguments", [(a.name, a.dtype, a.shape, a.sharding, a.nbytes) for a in plan.arguments]
        ),
        ops=table.assign(sharding=[" ".join(map(brackets, op.results)) for op in plan.ops])
        if len(table)
        else _frame("ops", []),
        collectives=_frame("collectives", [_collective(c) for c in plan.collectives]),
        memory=_frame("memory", _memory(plan)),
        timeline=_frame(
            "timeline",
            [
                (e.name, e.kind, e.streams, e.start_s, e.seconds, e.executions)
                for e in plan.timeline
            ],
        ),
        schedule=_frame(
            "schedule",
            [
                ("schedule of a step", predicted.step_s),
                ("compute and memory, sum", predicted.compute_s),
                ("communication, sum", predicted.communication_s),
                ("communication hidden", predicted.hidden_s),
                ("communication exposed", predicted.exposed_s),
                ("starting the call", predicted.dispatch_s),
            ],
        ),
        edges=_frame("edges", list(_edges(plan))),
        comparison=_frame("comparison", [own]) if comparison is None else comparison,
    )


def brackets(sharding: Sharding) -> str:
    """A sharding as short text.

    Examples:
        >>> brackets((("data",), (), ("x", "y")))
        '[data, -, x·y]'
    """
    return f"[{', '.join('·'.join(axes) or '-' for axes in sharding)}]"


def steps_text(source: Sharding, chain: tuple[Sharding, ...]) -> str:
    """What a chain of single-step reshards does.

    Examples:
        >>> steps_text((("x",), ("y",)), (((), ("y",)), ((), ("y", "x"))))
        'all-gather x, slice x'
        >>> steps_text((("x",), ()), (((), ("x",)),))
        'all-to-all x'
    """
    words = []
    for before, after in zip((source, *chain), chain, strict=False):
        old = {axis: dim for dim, axes in enumerate(before) for axis in axes}
        new = {axis: dim for dim, axes in enumerate(after) for axis in axes}
        gone = [a for a in old if a not in new]
        come = [a for a in new if a not in old]
        moved = [a for a in new if a in old and new[a] != old[a]]
        if gone and not come:
            words.append(f"all-gather {'·'.join(gone)}")
        elif come and not gone:
            words.append(f"slice {'·'.join(come)}")
        elif moved and not gone:
            words.append(f"all-to-all {'·'.join(moved)}")
        else:
            words.append(f"permute {'·'.join(sorted({*gone, *come, *moved}) or old)}")
    return ", ".join(words)


def _frame(name: str, rows: list[tuple[object, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS[name]))


def _collective(c: PlannedCollective) -> tuple[object, ...]:
    sent = wire_bytes(c.kind, c.nbytes, c.devices) * c.trips
    return (c.kind, ", ".join(c.axes), sent, c.trips, c.seconds * c.trips, c.source or c.why)


def _memory(plan: Plan) -> list[tuple[object, ...]]:
    labels = {op.index: f"{op.name.partition('.')[2]} {op.source}" for op in plan.ops}
    lines = [line for line in plan.signature if "->" in line]
    for index, line in enumerate(lines):
        labels.setdefault(index, line.partition("(")[0])
    return [(point.op, point.nbytes, labels.get(point.op, "")) for point in plan.memory]


def _edges(plan: Plan) -> Iterator[tuple[int, int, str, float]]:
    """Producer and consumer of every value read, from the lines of the plan's signature."""
    maker: dict[int, int] = {}
    moves = _moves(plan)
    lines = [line for line in plan.signature if "->" in line]
    for index, line in enumerate(lines):
        reads, _, makes = line.partition(" -> ")
        for value in map(int, _VALUE.findall(reads)):
            for text, seconds in moves.get((value, index), [("", 0.0)]):
                yield maker.get(value, ARGUMENT), index, text, seconds
        maker.update((int(v), index) for v in _VALUE.findall(makes))


def _moves(plan: Plan) -> Mapping[tuple[int, int], list[tuple[str, float]]]:
    """Per value and reader, the reshard between them and its time over all trips [s].

    A reader's collectives come in the order of its reshards; one that another reader of the value
    has already paid for is not among them.
    """
    queues: dict[int, deque[PlannedCollective]] = defaultdict(deque)
    for c in plan.collectives:
        if not c.why.startswith("partial results"):
            queues[c.op].append(c)
    moves: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    for reshard in plan.reshards:
        text = steps_text(reshard.source, reshard.chain)
        moves[reshard.value, reshard.reader].append((text, _paid(reshard, queues[reshard.reader])))
    return moves


def _paid(reshard: ReshardPlan, queue: deque[PlannedCollective]) -> float:
    seconds, moved_for = 0.0, queue[0].why if queue else ""
    steps = steps_text(reshard.source, reshard.chain).split(", ")
    for step in steps:
        kind = step.partition(" ")[0].replace("-", "_")
        if queue and queue[0].why == moved_for and queue[0].kind == kind:
            done = queue.popleft()
            seconds += done.seconds * done.trips
    return seconds
