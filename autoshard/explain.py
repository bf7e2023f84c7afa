"""Why a tensor is sharded as it is: what it costs, what ties it, and what anything else would cost.

Prices of other shardings are those of whole plans, solved anew with that sharding pinned and all
else free; nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from autoshard.errors import InputError
from autoshard.given import whole_number
from autoshard.graph import Graph, Op
from autoshard.plan import Plan, spec
from autoshard.plan_text import nbytes, seconds
from autoshard.program import REGION_OPS
from autoshard.question import Alternative, Question
from autoshard.remedy import REDUCTIONS
from autoshard.replan import Replanner
from autoshard.shardings import Sharding, divides, local_bytes, splitting
from autoshard.subject import Subject, locate

_VIEWS = frozenset(
    {"dynamic_slice", "slice", "reshape", "transpose", "convert", "sharding_constraint"}
)

ALTERNATIVES = 6
"""Shardings that are priced unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class CostItem:
    """One part of what a tensor costs in one call, under the plan.

    Attributes:
        kind: ``compute`` (an op that makes or reads it), ``reduction`` (combining its partial
            results), ``reshard`` (moving it to a reader) or ``memory``.
        what: Which op or collective.
        source: ``file.py:line``.
        seconds: Time in one call, all trips of loops [s].
        nbytes: Bytes on one device: moved in one call for a collective, held for memory.
    """

    kind: Literal["compute", "reduction", "reshard", "memory"]
    what: str
    source: str
    seconds: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Tie:
    """Something that fixes a sharding, or makes it depend on another.

    Attributes:
        kind: ``pin``, ``donation``, ``alias``, ``loop``, ``prescribed`` or ``uneven``.
        what: Says it as a sentence.
    """

    kind: Literal["pin", "donation", "alias", "loop", "prescribed", "uneven"]
    what: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one tensor is sharded as it is.

    Attributes:
        name: The tensor.
        kind: ``argument``, ``result`` or ``op``.
        source: ``file.py:line`` that made it; empty for arguments.
        shape: Global shape.
        dtype: Element type.
        sharding: What the plan gives it.
        nbytes: Bytes on one device.
        costs: What it costs in one call, dearest first.
        ties: What fixes it or makes it depend on others.
        step_s: Predicted time of a call under the plan [s].
        peak_bytes: Predicted peak of memory under the plan [bytes].
        alternatives: Other shardings with their prices, cheapest first. The one that the solver
            chooses if the present one is forbidden is always among them (unless the caller said
            which ones to price).
        left_out: Further shardings that are possible and were not priced.
        others: What else the name could have meant.
        asked: Whether the caller said which shardings to price: a cheaper one may be missing.
    """

    name: str
    kind: Literal["argument", "result", "op"]
    source: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    nbytes: int
    costs: tuple[CostItem, ...]
    ties: tuple[Tie, ...]
    step_s: float
    peak_bytes: int
    alternatives: tuple[Alternative, ...]
    left_out: int
    others: tuple[str, ...]
    asked: bool = False

    @property
    def next_best(self) -> Alternative | None:
        """The cheapest of the other shardings, or of those asked for; None if there is none."""
        best = next(iter(self.alternatives), None)
        return None if best is None or best.step_s is None else best

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return explanation_text(self)


def explain(
    replanner: Replanner,
    name: str,
    *,
    pins: Sequence[PartitionSpec] | None = None,
    alternatives: int = ALTERNATIVES,
    say: Callable[[str], None] = lambda what: None,
) -> Explanation:
    """Explain one tensor of a plan.

    Args:
        replanner: The plan, opened.
        name: See :func:`autoshard.subject.locate`.
        pins: Shardings to price; None: those that look cheapest, the replicated one among them.
        alternatives: How many to price at most, if ``pins`` are not given.
        say: Told what is being done.

    Raises:
        UnknownNameError: Nothing is called so.
        InputError: A pin that does not fit.
    """
    plan, graph = replanner.plan, replanner.graph
    fix = "give a whole number, 0 or more"
    alternatives = whole_number(alternatives, "the number of alternatives", least=0, fix=fix)
    subject = locate(plan, graph, name)
    tensor = graph.values[subject.value]
    question = Question.of(replanner, subject)
    present = question.present
    best, rest = None, 0
    if pins is not None:
        several = [pins] if isinstance(pins, PartitionSpec | str) else list(pins)
        wanted = [_sharding(plan, tensor.shape, subject, pin) for pin in several]
        priced = list(question.price(wanted, say))
    else:
        say("the next best sharding")
        best = question.next_best()
        known = [] if best is None else [best]
        wanted = [s for s in question.candidates() if not best or s != best.sharding]
        rest = max(0, len(wanted) - alternatives + len(known))
        priced = [*known, *question.price(wanted[: alternatives - len(known)], say)]
    whole = local_bytes(tensor.shape, tensor.nbytes, present, plan.mesh)
    same = same_values(graph, subject.value)
    order = sorted(priced, key=lambda a: (a.step_s is None, a.step_s or 0.0, a.peak_bytes or 0))
    return Explanation(
        name=subject.name,
        kind=subject.kind,
        source=graph.ops[tensor.op].source if tensor.op >= 0 else "",
        shape=tensor.shape,
        dtype=tensor.dtype,
        sharding=present,
        nbytes=whole,
        costs=tuple(sorted(_costs(plan, graph, subject, same, whole), key=lambda c: -c.seconds)),
        ties=tuple(_ties(plan, graph, subject, same, present)),
        step_s=plan.predicted.step_s,
        peak_bytes=plan.predicted.peak_bytes,
        alternatives=tuple(order),
        left_out=rest,
        others=subject.others,
        asked=pins is not None,
    )


def same_values(graph: Graph, value: int) -> frozenset[int]:
    """The values that are this one: aliases of it, and what loops carry of it unchanged."""
    same = {value}
    for tensor in graph.values:
        if tensor.alias in same:
            same.add(tensor.id)
    for op in graph.ops:
        if op.name != "stablehlo.while":
            continue
        for operand, carried, returned in zip(op.operands, op.results, op.returned[0], strict=True):
            if operand in same and returned == carried:
                same.add(carried)
    return frozenset(same)


def _sharding(plan: Plan, shape: tuple[int, ...], subject: Subject, pin: PartitionSpec) -> Sharding:
    """A pin as a sharding of the tensor."""
    at = f"{subject.name}, of shape {list(shape)}"
    if not isinstance(pin, PartitionSpec):
        raise InputError(
            f"{pin!r} is no sharding", at=at, fix="give a PartitionSpec, e.g. P('data', None)"
        )
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in pin]
    named = [axis for axes in entries for axis in axes]
    axes = ", ".join(plan.mesh.names)
    if len(entries) > len(shape) or len(set(named)) < len(named):
        raise InputError(
            f"{pin} does not fit {subject.name}",
            at=at,
            fix="give at most one entry per dimension, and name each mesh axis once",
        )
    if not set(named) <= set(plan.mesh.names):
        raise InputError(f"{pin} names an axis that the mesh lacks", at=at, fix=f"axes: {axes}")
    sharding = splitting((*entries, *((),) * (len(shape) - len(entries))), plan.mesh)
    if not divides(shape, sharding, plan.mesh):
        raise InputError(
            f"{pin} does not split {subject.name} evenly", at=at, fix="pad it, or use fewer axes"
        )
    return sharding


def views(graph: Graph, same: frozenset[int]) -> frozenset[int]:
    """Those values, and what is one of them in another form: pieces, transposes, casts."""
    found = set(same)
    for op in graph.ops:
        if op.kind in _VIEWS and op.operands[0] in found:
            found.update(same_values(graph, op.results[0]))
    return frozenset(found)


def _costs(
    plan: Plan, graph: Graph, subject: Subject, same: frozenset[int], held: int
) -> Iterator[CostItem]:
    maker = graph.values[subject.value].op
    seen = views(graph, same)
    readers = {
        op.index
        for op in graph.ops
        if seen & set(op.operands) and op.name not in REGION_OPS and not op.is_alias
    }
    for op in plan.ops:
        if op.index in readers | {maker} and op.seconds:
            verb = "makes" if op.index == maker else "reads"
            what = f"{graph.ops[op.index].kind} #{op.index} {verb} it" + _times(op.trips)
            yield CostItem("compute", what, op.source, op.seconds * op.trips, 0.0)
        if op.index == maker:
            held = op.nbytes
    for c in plan.collectives:
        reduction = c.kind in REDUCTIONS
        if c.op in readers | {maker} if reduction else c.value in seen | _given(graph, subject):
            what = f"{c.kind} over {'*'.join(c.axes)}{_times(c.trips)}: {c.why}"
            kind: Literal["reduction", "reshard"] = "reduction" if reduction else "reshard"
            yield CostItem(kind, what, c.source, c.seconds * c.trips, c.nbytes * c.trips)
    what = "held on each device" if held else "never held: computed by what reads it"
    yield CostItem("memory", what, "", 0.0, held)


def _given(graph: Graph, subject: Subject) -> set[int]:
    """What replaces an argument at the end of the program."""
    if subject.kind != "argument":
        return set()
    return {graph.results[r] for a, r in graph.ties if a == subject.position}


def _times(trips: int) -> str:
    return f", {trips} times" if trips != 1 else ""


def _ties(
    plan: Plan, graph: Graph, subject: Subject, same: frozenset[int], present: Sharding
) -> Iterator[Tie]:
    rows = {"argument": plan.arguments, "result": plan.results}.get(subject.kind)
    if rows is not None and rows[subject.position].pinned:
        yield Tie("pin", f"the caller pinned it to {spec(present)}")
    for a, r in graph.ties:
        mine = {"argument": a, "result": r}.get(subject.kind)
        if mine == subject.position:
            given, replaced = plan.results[r], plan.arguments[a]
            yield Tie(
                "donation",
                f"{given.name} replaces the donated {replaced.name}: both have one sharding"
                + (", which the caller pinned" if given.pinned or replaced.pinned else ""),
            )
    for op in graph.ops:
        here = f"{op.kind} #{op.index}" + (f" at {op.source}" if op.source else "")
        if op.is_alias and same & set(op.operands):
            yield Tie("alias", f"{here} hands it on as it is")
        elif op.name == "stablehlo.while":
            yield from _loop(op, here, same)
        elif op.fixed is not None and same & set(op.operands):
            wanted = op.fixed[0][[o in same for o in op.operands].index(True)]
            yield Tie("prescribed", f"{here} of the program wants it as {spec(wanted)}")
        elif op.fixed is not None and same & set(op.results):
            made = op.fixed[1][[v in same for v in op.results].index(True)]
            yield Tie("prescribed", f"{here} of the program makes it as {spec(made)}")
    shape = graph.values[subject.value].shape
    for name, size in zip(plan.mesh.names, plan.mesh.sizes, strict=True):
        odd = [str(d) for d, n in enumerate(shape) if n > 1 and n % size]
        if odd and size > 1:
            listed = " and ".join(odd)
            yield Tie(
                "uneven", f"{name}={size} does not divide dimension {listed} of {list(shape)}"
            )


def _loop(op: Op, here: str, same: frozenset[int]) -> Iterator[Tie]:
    """How a loop ties a value that it carries."""
    for operand, carried, returned in zip(op.operands, op.results, op.returned[0], strict=True):
        if carried in same and operand in same and carried == returned:
            yield Tie("loop", f"{here} carries it unchanged: it is moved before the loop, once")
        elif carried in same:
            yield Tie("loop", f"{here} carries it: it has one sharding in every round")
        elif operand in same:
            yield Tie("loop", f"{here} starts from it")
        elif returned in same:
            yield Tie("loop", f"{here} carries it into the next round")


def explanation_text(e: Explanation) -> str:
    """An explanation as a person reads it."""
    what = {"argument": "argument", "result": "result", "op": f"made at {e.source}"}[e.kind]
    kind = f"{e.dtype}[{','.join(map(str, e.shape))}]"
    lines = [f"{e.name}  {kind}  {spec(e.sharding)}  {nbytes(e.nbytes)} per device  ({what})"]
    lines += ["", "What it costs in one call"]
    for c in e.costs:
        amount = nbytes(c.nbytes) if c.kind == "memory" else seconds(c.seconds)
        lines.append(f"  {amount:>9}  {c.what}" + (f" ({c.source})" if c.source else ""))
    if e.ties:
        lines += ["", "What ties it", *(f"  {t.kind}: {t.what}" for t in e.ties)]
    lines += ["", "Sharded otherwise, all else free (solved anew)"]
    if not e.alternatives:
        lines.append("  it can have no other sharding")
    width = max(len(spec(s)) for s in (e.sharding, *(a.sharding for a in e.alternatives)))
    now = f"step {seconds(e.step_s)}, peak {nbytes(e.peak_bytes)}"
    lines.append(f"  {spec(e.sharding):<{width}}  {now}  (the plan)")
    for a in e.alternatives:
        mark = f"  ({'cheapest of these' if e.asked else 'next best'})" if a == e.next_best else ""
        lines.append(f"  {spec(a.sharding):<{width}}  {priced_text(a, e.step_s)}{mark}")
    if e.left_out:
        lines.append(f"  … and {e.left_out} more that were not priced")
    if e.others:
        lines += ["", f"Also there: {', '.join(e.others[:8])}"]
    return "\n".join(lines)


def priced_text(a: Alternative, step_s: float) -> str:
    """What an alternative costs, against a plan's step."""
    if a.step_s is None or a.step_delta_s is None or a.peak_delta_bytes is None:
        return a.status
    share = f"{a.step_delta_s / step_s:+.2%}" if step_s else ""
    change = f"{'+' if a.peak_delta_bytes >= 0 else '-'}{nbytes(abs(a.peak_delta_bytes))}"
    return f"step {seconds(a.step_s)} ({share}), peak {change}; {a.status}"
