"""Why there is a collective: which operands clashed, what it costs, how to be rid of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.cost_models.compiled import Collective, CompiledProgram, read_compiled, read_hlo
from autoshard.cost_models.protocol import wire_bytes
from autoshard.errors import InputError
from autoshard.execute import Executable
from autoshard.graph import Graph
from autoshard.moves import value_name
from autoshard.plan import Plan, spec
from autoshard.plan_parts import OpPlan, PlannedCollective
from autoshard.plan_text import collective_text, nbytes, seconds
from autoshard.remedy import REDUCTIONS, Remedy, is_written, move_of, without
from autoshard.replan import Replanner
from autoshard.shardings import Sharding
from autoshard.subject import find_collective, line_near

_SHOWN = 8
"""Changes that a text lists."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Two shardings that do not go together.

    Attributes:
        value: The value that is moved, or the operand that is split where it is summed over.
        maker: What gives it its sharding.
        maker_source: ``file.py:line`` of that; empty for an argument.
        has: Its sharding.
        reader: What reads it.
        reader_source: ``file.py:line`` of that.
        wants: The sharding the reader wants; for a reduction, the one without partial results.
        because: Why the reader wants it, or why the results are partial.
    """

    value: str
    maker: str
    maker_source: str
    has: Sharding
    reader: str
    reader_source: str
    wants: Sharding
    because: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is a collective.

    Attributes:
        name: The collective as a line of text, or the name of its instruction.
        planned: The planned collectives that it is; several if the compiler combined them, none
            if the plan does not ask for it.
        source: ``file.py:line`` it belongs to; the nearest one of the program if the op itself has
            none.
        clashes: What did not go together; nothing if the program asks for it itself.
        seconds: Predicted time in one call [s].
        share: That as a fraction of the step.
        sent_bytes: Bytes that one device sends for it in one call.
        remedy: The cheapest plan without it; None if there is none, or none was asked for.
        unavoidable: Why there is none; empty if there is one or none was asked for.
    """

    name: str
    planned: tuple[PlannedCollective, ...]
    source: str
    clashes: tuple[Clash, ...]
    seconds: float
    share: float
    sent_bytes: float
    remedy: Remedy | None
    unavoidable: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return reason_text(self)


def why(
    replanner: Replanner,
    collective: int | str | PlannedCollective | Collective,
    *,
    program: Executable | CompiledProgram | str | None = None,
    remedy: bool = True,
    say: Callable[[str], None] = lambda what: None,
) -> Reason:
    """Explain a collective of a plan or of its compiled program.

    Args:
        replanner: The plan, opened.
        collective: A planned collective, its number in ``plan.collectives``, or its text as a plan
            prints it, or a part of that; a collective of the compiled program, or the name of its
            instruction.
        program: The compiled program (an executable, what was read from one, or its text), for
            collectives that are given by the name of an instruction, and to tell apart those that
            are alike.
        remedy: Whether to solve for the cheapest plan without it.
        say: Told what is being done.

    Raises:
        UnknownNameError: There is no such collective.
        InputError: ``program`` is none.
    """
    plan = replanner.plan
    if isinstance(program, Executable):
        program = read_compiled(program.compiled)
    elif isinstance(program, str):
        program = read_hlo(program)
    elif not isinstance(program, CompiledProgram | None):
        raise InputError(
            f"the compiled program is given as a {type(program).__name__}",
            fix="pass what step.compile(...) returned, or its .as_text()",
        )
    name, planned, source = find_collective(plan, collective, program)
    if not source and planned:
        source = line_near(replanner.graph, planned[0].value)
    total = sum(c.seconds * c.trips for c in planned)
    clashes = tuple(clash for c in planned for clash in clashes_of(replanner.graph, plan, c))
    way, unavoidable = None, ""
    if not planned:
        unavoidable = "the plan does not ask for it: the compiler made it by itself"
    elif remedy:
        say("the cheapest plan without it")
        way, unavoidable = without(replanner, planned)
    return Reason(
        name=name,
        planned=planned,
        source=source,
        clashes=clashes,
        seconds=total,
        share=total / plan.predicted.step_s if plan.predicted.step_s else 0.0,
        sent_bytes=sum(wire_bytes(c.kind, c.nbytes, c.devices) * c.trips for c in planned),
        remedy=way,
        unavoidable=unavoidable,
    )


def clashes_of(graph: Graph, plan: Plan, c: PlannedCollective) -> tuple[Clash, ...]:
    """What did not go together, so that there must be a planned collective."""
    ops = {op.index: op for op in plan.ops}
    if is_written(graph, plan, c):
        return ()
    if c.kind in REDUCTIONS:
        return tuple(_partial(graph, ops, c))
    move = move_of(plan, c)
    assert move is not None
    maker, maker_source = _maker(graph, c.value)
    if c.op == len(graph.ops):
        position = next(i for i, v in enumerate(graph.results) if v == c.value)
        reader, because = plan.results[position].name, _end(graph, plan, position)
    else:
        reader, because = f"{graph.ops[c.op].kind} #{c.op}", _factors(ops.get(c.op))
    return (
        Clash(
            value_name(graph, c.value),
            maker,
            maker_source,
            move.source,
            reader,
            c.source,
            move.chain[-1],
            because,
        ),
    )


def _maker(graph: Graph, value: int) -> tuple[str, str]:
    tensor = graph.values[graph.values[value].alias]
    if tensor.op < 0:
        return "the argument itself", ""
    op = graph.ops[tensor.op]
    return f"{op.kind} #{op.index}", op.source


def _end(graph: Graph, plan: Plan, position: int) -> str:
    tied = next((a for a, r in graph.ties if r == position), None)
    if tied is not None:
        return f"it replaces the donated {plan.arguments[tied].name}"
    return "the caller pinned it" if plan.results[position].pinned else "the program returns it so"


def _factors(op: OpPlan | None) -> str:
    if op is None or not op.factors:
        return "it is run whole on every device" if op is not None and op.flops else "it carries it"
    split = ", ".join(f"{factor} by {'*'.join(axes)}" for factor, axes in op.factors)
    return f"its work is split: {split}"


def _partial(graph: Graph, ops: dict[int, OpPlan], c: PlannedCollective) -> Iterator[Clash]:
    """The operands that are split along what a reduction sums over."""
    op, plan = graph.ops[c.op], ops[c.op]
    rule = op.rule
    if rule is None:
        made, name = plan.results[0], f"{op.kind} #{op.index}"
        because = "it runs on one device, and its results go to all others"
        yield Clash(name, name, op.source, made, name, op.source, made, because)
        return
    axes = set(c.axes)
    for value, has, dims in zip(op.operands, plan.operands, rule.operands, strict=True):
        summed = [
            d
            for d, factors in enumerate(dims)
            if axes & set(has[d]) and any(rule.kinds[f] == "reduction" for f in factors)
        ]
        if not summed:
            continue
        wants = tuple(
            tuple(a for a in dim if d not in summed or a not in axes) for d, dim in enumerate(has)
        )
        maker, maker_source = _maker(graph, value)
        listed = " and ".join(map(str, summed))
        because = f"it sums over dimension {listed}, of which each device holds a part"
        reader = f"{op.kind} #{op.index}"
        yield Clash(
            value_name(graph, value), maker, maker_source, has, reader, op.source, wants, because
        )


def reason_text(r: Reason) -> str:
    """A reason as a person reads it."""
    lines = [r.name, f"  at {r.source or 'no source line'}"]
    if r.planned:
        lines.append(
            f"  costs {seconds(r.seconds)} in one call, {r.share:.2%} of the step; "
            f"{nbytes(r.sent_bytes)} sent by each device"
        )
    if len(r.planned) > 1:
        lines.append(f"  the compiler combined {len(r.planned)} that the plan asks for:")
        lines += [f"    {collective_text(c).strip()}" for c in r.planned]
    for c in r.clashes:
        made = f", from {c.maker}" + (f" ({c.maker_source})" if c.maker_source else "")
        read = c.reader + (f" ({c.reader_source})" if c.reader_source else "")
        lines.append(f"  {c.value} is {spec(c.has)}{made};")
        lines.append(f"    {read} would have it {spec(c.wants)}: {c.because}")
    if r.remedy is not None:
        w, step = r.remedy, r.remedy.step_s - r.remedy.step_delta_s
        sign = "+" if w.peak_delta_bytes >= 0 else "-"
        lines.append(
            f"  without it: step {seconds(w.step_s)} ({w.step_delta_s / step:+.2%}), peak "
            f"{sign}{nbytes(abs(w.peak_delta_bytes))}; {w.status}"
        )
        lines += [f"    instead {collective_text(c).strip()}" for c in w.instead[:_SHOWN]]
        for change in w.changes[:_SHOWN]:
            sides = ["(none)" if s is None else spec(s) for s in (change.before, change.after)]
            where = f" ({change.source})" if change.source else ""
            lines.append(f"    {change.name}: {sides[0]} -> {sides[1]}{where}")
        if len(w.changes) > _SHOWN:
            lines.append(f"    … and {len(w.changes) - _SHOWN} more changes")
    elif r.unavoidable:
        lines.append(f"  {r.unavoidable}")
    return "\n".join(lines)
