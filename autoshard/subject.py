"""What a name means in a plan: a tensor, an op by number, a source line, a collective."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoshard.cost_models.compiled import Collective, CompiledProgram
from autoshard.errors import UnknownNameError
from autoshard.graph import Graph
from autoshard.moves import value_name
from autoshard.plan import Plan
from autoshard.plan_parts import OpPlan, PlannedCollective
from autoshard.plan_text import collective_text, nbytes
from autoshard.validate import pair_collectives

_OP = re.compile(r"(?:[\w.]+ )?#(\d+)")
_VALUE = re.compile(r"%(\d+)")
_LINE = re.compile(r".+:\d+")


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor that a plan decides about.

    Attributes:
        kind: ``argument``, ``result`` (of the program) or ``op`` (what one makes).
        position: Which argument or result; the index of the op.
        value: Id of the value in the graph.
        name: What it is called in a report.
        others: What else the name could have meant: further ops of a source line.
    """

    kind: Literal["argument", "result", "op"]
    position: int
    value: int
    name: str
    others: tuple[str, ...] = ()


def locate(plan: Plan, graph: Graph, name: str) -> Subject:
    """Find what a name means.

    Args:
        plan: The plan.
        graph: Its program.
        name: An argument or result as the plan prints it, or the end of such a name if no other
            ends so; ``dot_general #12`` or ``#12`` for what an op makes; ``%57`` for a value;
            ``model.py:31`` for the op of that line that takes most time.

    Raises:
        UnknownNameError: Nothing, or more than one thing, is called so.
    """
    if not isinstance(name, str):
        raise UnknownNameError(
            f"a tensor is asked for by a {type(name).__name__}",
            fix="give its name as the plan prints it, e.g. \"params['w1']\"",
        )
    arguments, results = [a.name for a in plan.arguments], [r.name for r in plan.results]
    for test in (str.__eq__, _ends):
        hits: list[Subject] = [
            Subject("argument", i, graph.arguments[i], a)
            for i, a in enumerate(arguments)
            if test(a, name)
        ]
        hits += [
            Subject("result", i, graph.results[i], r)
            for i, r in enumerate(results)
            if test(r, name)
        ]
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise UnknownNameError(
                f"{name} could be {len(hits)} things",
                fix=f"say which: {' or '.join(h.name for h in hits[:6])}",
            )
    if match := _OP.fullmatch(name):
        return _made_by(plan, graph, int(match[1]), name)
    if match := _VALUE.fullmatch(name):
        return _value(plan, graph, int(match[1]), name)
    if _LINE.fullmatch(name):
        found = sorted((op for op in plan.ops if op.source == name), key=_weight(plan))
        if found:
            first, *rest = [_made_by(plan, graph, op.index, name) for op in found if op.results]
            return Subject(
                first.kind, first.position, first.value, first.name, tuple(s.name for s in rest)
            )
    raise _unknown(plan, name)


def line_near(graph: Graph, value: int) -> str:
    """The source line of the op that makes a value, or of the nearest op that has one.

    Ops that libraries make under a cached trace have no line of the user's; their neighbours have.
    """
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for operand in op.operands:
            readers.setdefault(operand, []).append(op.index)
    seen, waiting = {value}, [value]
    for here in waiting:  # grows as it goes: nearest first
        maker = graph.values[here].op
        around = [maker] if maker >= 0 else []
        for index in (*around, *readers.get(here, [])):
            near = graph.ops[index]
            if near.source:
                return near.source
            fresh = [v for v in (*near.operands, *near.results) if v not in seen]
            seen.update(fresh)
            waiting += fresh
    return ""


def _ends(whole: str, name: str) -> bool:
    """Whether ``name`` is the end of ``whole``, cut at a step of the path."""
    if not name or not whole.endswith(name):
        return False
    return name[0] in "[." or whole[-len(name) - 1 : -len(name)] in (".", "")


def _made_by(plan: Plan, graph: Graph, index: int, name: str) -> Subject:
    decided = next((op for op in plan.ops if op.index == index and op.results), None)
    if decided is None:
        raise _unknown(plan, name)
    op = graph.ops[index]
    return Subject("op", index, op.results[0], f"{op.kind} #{index}")


def _value(plan: Plan, graph: Graph, value: int, name: str) -> Subject:
    if value >= len(graph.values):
        raise _unknown(plan, name)
    tensor = graph.values[value]
    if tensor.op < 0:
        return Subject("argument", tensor.position, value, value_name(graph, value))
    return Subject("op", tensor.op, value, value_name(graph, value))


def _weight(plan: Plan) -> Callable[[OpPlan], tuple[float, int]]:
    moved: dict[int, float] = {}
    for c in plan.collectives:
        moved[c.op] = moved.get(c.op, 0.0) + c.seconds * c.trips
    return lambda op: (-op.seconds * op.trips - moved.get(op.index, 0.0), op.index)


def _unknown(plan: Plan, name: str) -> UnknownNameError:
    known = [
        *(b.name for b in (*plan.arguments, *plan.results)),
        *dict.fromkeys(op.source for op in plan.ops if op.source),
    ]
    made = [f"{op.name.rpartition('.')[2]} #{op.index}" for op in plan.ops if op.results]
    kinds = [op for op in made if op.partition(" ")[0] == name.partition(" ")[0]]
    near = kinds[:3] or difflib.get_close_matches(name, known, 3, 0.4) or known[:3]
    return UnknownNameError(
        f"nothing that the plan decides about is called {name!r}",
        fix=f"did you mean {' or '.join(near)}? An op is named as in 'dot_general #12', "
        "a source line as in 'model.py:31'",
    )


def find_collective(
    plan: Plan,
    collective: int | str | PlannedCollective | Collective,
    program: CompiledProgram | None,
) -> tuple[str, tuple[PlannedCollective, ...], str]:
    """Name, planned collectives and source line of what the caller means."""
    if isinstance(collective, str) and collective.strip().isdecimal():
        collective = int(collective)
    if isinstance(collective, int) and not isinstance(collective, bool):
        if not 0 <= collective < len(plan.collectives):
            raise UnknownNameError(
                f"the plan has no collective {collective}",
                fix=f"it has {len(plan.collectives)}, numbered from 0 as print(plan) shows them",
            )
        collective = plan.collectives[collective]
    if isinstance(collective, PlannedCollective):
        if collective not in plan.collectives:
            raise UnknownNameError(
                f"the plan does not ask for this {collective.kind}",
                at=collective.source,
                fix="take one of plan.collectives",
            )
        return collective_text(collective).strip(), (collective,), collective.source
    if isinstance(collective, str):
        hits = [c for c in plan.collectives if _called(c, collective)]
        if len(hits) == 1:
            return collective_text(hits[0]).strip(), (hits[0],), hits[0].source
        if hits:
            raise UnknownNameError(
                f"{len(hits)} collectives of the plan are called {collective!r}",
                fix="give its number, one of "
                + ", ".join(str(i) for i, c in enumerate(plan.collectives) if c in hits),
            )
        collective = _instruction(plan, collective, program)
    if not isinstance(collective, Collective):
        raise UnknownNameError(
            f"a collective is asked for by a {type(collective).__name__}",
            fix="give its number as print(plan) shows it, its line, or one of plan.collectives",
        )
    return _compiled(plan, collective, program)


def _called(c: PlannedCollective, name: str) -> bool:
    text = " ".join(collective_text(c).split())
    wanted = " ".join(name.split())
    # A validation prints "of" before the bytes, and neither the time nor the line.
    return wanted in text or wanted.replace(" of ", ", ", 1) in text


def _instruction(plan: Plan, name: str, program: CompiledProgram | None) -> Collective:
    if program is None:
        raise UnknownNameError(
            f"no collective of the plan is called {name!r}",
            fix=f"give a number from 0 to {len(plan.collectives) - 1}, a line as print(plan) shows "
            "it, or, for an instruction of the compiled program, that program as program=...",
        )
    bare = name.removeprefix("%").partition(":")[0]  # a validation tells more after the name
    for collective in program.collectives:
        if collective.name == bare:
            return collective
    raise UnknownNameError(
        f"the compiled program has no collective called {bare!r}",
        fix=f"one of {', '.join(c.name for c in program.collectives[:8]) or 'none: it has none'}",
    )


def _compiled(
    plan: Plan, collective: Collective, program: CompiledProgram | None
) -> tuple[str, tuple[PlannedCollective, ...], str]:
    every = (collective,) if program is None else program.collectives
    pairs, _ = pair_collectives(plan.collectives, every)
    planned = next((members for found, members in pairs if found == collective), ())
    sources = [c.source for c in planned if c.source]
    what = f"{collective.kind} of {nbytes(collective.nbytes)} among {collective.devices} devices"
    name = f"{collective.name or 'an instruction'}: {what}"
    return name, planned, next(iter(sources), collective.source or collective.op_name)
