"""Two plans side by side: what is sharded differently, and what that changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.plan import Plan, spec
from autoshard.plan_parts import BoundaryPlan, OpPlan, PlannedCollective
from autoshard.plan_text import collective_text, nbytes, seconds
from autoshard.shardings import Sharding

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that two plans shard differently, or that one of them does not have.

    Attributes:
        kind: ``argument``, ``result`` or ``op`` (what one makes).
        name: What the plans call it.
        source: ``file.py:line`` for an op.
        before: Its sharding in the first plan; None if it is not there.
        after: Its sharding in the second plan; None if it is not there.
        bytes_before: Bytes on one device in the first plan.
        bytes_after: Bytes on one device in the second plan.
    """

    kind: Literal["argument", "result", "op"]
    name: str
    source: str
    before: Sharding | None
    after: Sharding | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A predicted total in both plans.

    Attributes:
        name: Field of :class:`~autoshard.plan_parts.Predicted`.
        before: In the first plan.
        after: In the second plan.
    """

    name: str
    before: float
    after: float

    @property
    def delta(self) -> float:
        """How much more it is in the second plan."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """How a second plan differs from a first.

    Attributes:
        meshes: The mesh of each, as text.
        cost_models: The cost model of each.
        same_program: Whether both are for the same program; if not, tensors are matched by name
            and ops by line, kind and shape.
        changes: What is sharded differently.
        predicted: Every predicted total.
        gained: Collectives that only the second plan asks for.
        lost: Collectives that only the first plan asks for.
    """

    meshes: tuple[str, str]
    cost_models: tuple[str, str]
    same_program: bool
    changes: tuple[Change, ...]
    predicted: tuple[Figure, ...]
    gained: tuple[PlannedCollective, ...]
    lost: tuple[PlannedCollective, ...]

    def __bool__(self) -> bool:
        """Whether there is any difference in what is sharded, asked for or predicted."""
        return bool(
            self.changes
            or self.gained
            or self.lost
            or any(f.delta for f in self.predicted)
            or self.meshes[0] != self.meshes[1]
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return diff_text(self)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans; they may be for different meshes, cost models or even programs."""
    same = before.signature == after.signature
    changes = [
        *_boundaries("argument", before.arguments, after.arguments),
        *_boundaries("result", before.results, after.results),
        *_ops(before.ops, after.ops, same),
    ]
    first, second = before.predicted, after.predicted
    return PlanDiff(
        meshes=(str(before.mesh), str(after.mesh)),
        cost_models=(before.cost_model, after.cost_model),
        same_program=same,
        changes=tuple(changes),
        predicted=tuple(
            Figure(f.name, getattr(first, f.name), getattr(second, f.name))
            for f in dataclasses.fields(first)
        ),
        gained=_beyond(after.collectives, before.collectives, same),
        lost=_beyond(before.collectives, after.collectives, same),
    )


def _boundaries(
    kind: Literal["argument", "result"],
    before: Sequence[BoundaryPlan],
    after: Sequence[BoundaryPlan],
) -> Iterator[Change]:
    ours, theirs = ({b.name: b for b in rows} for rows in (before, after))
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.sharding != b.sharding:
            yield Change(
                kind,
                name,
                "",
                a.sharding if a else None,
                b.sharding if b else None,
                a.nbytes if a else 0,
                b.nbytes if b else 0,
            )


def _ops(before: Sequence[OpPlan], after: Sequence[OpPlan], same: bool) -> Iterator[Change]:
    first_ops, second_ops = _numbered(before, same), _numbered(after, same)
    for key in dict.fromkeys((*first_ops, *second_ops)):
        a, b = first_ops.get(key), second_ops.get(key)
        results = [None if op is None else op.results for op in (a, b)]
        if results[0] == results[1]:
            continue
        either = a or b
        assert either is not None
        if not either.results:
            continue
        sides = zip(a.results, b.results, strict=False) if a and b else ()
        first = next((k for k, (ours, theirs) in enumerate(sides) if ours != theirs), 0)
        which = f", result {first}" if len(either.results) > 1 else ""
        yield Change(
            "op",
            f"{either.name.partition('.')[2]} #{either.index}{which}",
            either.source,
            a.results[first] if a else None,
            b.results[first] if b else None,
            a.nbytes if a else 0,
            b.nbytes if b else 0,
        )


def _numbered(ops: Sequence[OpPlan], same: bool) -> dict[object, OpPlan]:
    """Ops by what identifies them: their index, or what they are and how many came before."""
    if same:
        return {op.index: op for op in ops}
    seen: Counter[object] = Counter()
    found: dict[object, OpPlan] = {}
    for op in ops:
        key = (op.name, op.source, op.shapes)
        found[(key, seen[key])] = op
        seen[key] += 1
    return found


def _beyond(
    ours: Sequence[PlannedCollective], theirs: Sequence[PlannedCollective], same: bool
) -> tuple[PlannedCollective, ...]:
    """Collectives of the first that the second does not have, counted."""

    def key(c: PlannedCollective) -> object:
        what = (c.kind, c.axes, c.devices, c.nbytes, c.trips, c.dtype, c.source)
        return (*what, c.op, c.value) if same else what

    left = Counter(key(c) for c in theirs)
    found = []
    for c in ours:
        if left[key(c)]:
            left[key(c)] -= 1
        else:
            found.append(c)
    return tuple(found)


def diff_text(d: PlanDiff) -> str:
    """A difference as a person reads it."""
    if not d:
        return "the plans are the same"
    lines = []
    for label, pair in (("mesh", d.meshes), ("cost model", d.cost_models)):
        if pair[0] != pair[1]:
            lines.append(f"{label}: {pair[0]} -> {pair[1]}")
    if not d.same_program:
        lines.append("the plans are for different programs: ops are matched by line")
    lines.append("Predicted")
    shows: dict[str, Callable[[float], str]] = {"_s": seconds, "tes": nbytes}
    for figure in d.predicted:
        show = next((s for end, s in shows.items() if figure.name.endswith(end)), _plain_number)
        share = f" ({figure.delta / figure.before:+.2%})" if figure.before and figure.delta else ""
        change = f"-> {show(figure.after)}{share}" if figure.delta else ""
        lines.append(f"  {figure.name:18} {show(figure.before):>12} {change}".rstrip())
    lines += ["", f"Sharded differently: {len(d.changes)}"]
    moved = sorted(d.changes, key=lambda c: (c.kind == "op", -max(c.bytes_before, c.bytes_after)))
    width = max((len(c.name) for c in moved[:_SHOWN]), default=0)
    for c in moved[:_SHOWN]:
        sides = ["(none)" if s is None else spec(s) for s in (c.before, c.after)]
        size = f"{nbytes(c.bytes_before)} -> {nbytes(c.bytes_after)}"
        where = f" ({c.source})" if c.source else ""
        lines.append(f"  {c.name:<{width}}  {sides[0]} -> {sides[1]}  {size}{where}")
    if len(moved) > _SHOWN:
        lines.append(f"  … and {len(moved) - _SHOWN} more")
    for label, rows in (("gained", d.gained), ("lost", d.lost)):
        lines += ["", f"Collectives {label}: {len(rows)}"]
        dearest = sorted(rows, key=lambda c: -c.seconds * c.trips)
        lines += [f"  {collective_text(c)}" for c in dearest[:_SHOWN]]
        if len(dearest) > _SHOWN:
            lines.append(f"  … and {len(dearest) - _SHOWN} more")
    return "\n".join(lines)


def _plain_number(value: float) -> str:
    return f"{value:.6g}"
