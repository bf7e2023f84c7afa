"""Rules of the linter: each looks at a plan for one kind of mistake or loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from autoshard.cost_models.protocol import MeshAxis
from autoshard.errors import InfeasibleError
from autoshard.finding import SOLVES, WORTH, Finding
from autoshard.plan import Plan, spec
from autoshard.plan_parts import PlannedCollective
from autoshard.plan_text import nbytes, seconds
from autoshard.question import Question
from autoshard.remedy import without
from autoshard.replan import Replanner
from autoshard.subject import Subject, line_near


def idle_axes(plan: Plan) -> Iterator[Finding]:
    """Mesh axes that split nothing."""
    used = {axis for op in plan.ops for _, axes in op.factors for axis in axes}
    used |= {a for b in (*plan.arguments, *plan.results) for dim in b.sharding for a in dim}
    idle = [
        f"{name}={size}"
        for name, size in zip(plan.mesh.names, plan.mesh.sizes, strict=True)
        if size > 1 and name not in used
    ]
    if idle:
        yield Finding(
            "idle-axis",
            "warning",
            f"mesh {plan.mesh}",
            f"{' and '.join(idle)} of the mesh split nothing: devices along it repeat each other's "
            "work",
            "use fewer devices, a larger batch, or sizes that the axis divides; "
            "plan.explain(name) prices the use of it for any tensor",
        )


def not_reused(replanner: Replanner) -> Iterator[Finding]:
    """Donated arguments whose buffers no result can take."""
    tied = {a for a, _ in replanner.graph.ties}
    for position, argument in enumerate(replanner.plan.arguments):
        if argument.donated and position not in tied:
            yield Finding(
                "donated-in-vain",
                "warning",
                argument.name,
                f"{argument.name} is donated, but no result of its shape and type is left to take "
                "its buffer",
                "do not donate it, or return what replaces it in the same shape and type",
                nbytes=argument.nbytes,
            )


def not_donated(replanner: Replanner, large_bytes: int) -> Iterator[Finding]:
    """Arguments that come back as results leaf by leaf, and are not donated."""
    plan = replanner.plan
    pairs: list[tuple[int, int]] = []
    tops = dict.fromkeys(_top(a.name) for a in plan.arguments)
    for top in tops:
        mine = [i for i, a in enumerate(plan.arguments) if _top(a.name) == top]
        if any(plan.arguments[i].donated or plan.arguments[i].name == top for i in mine):
            continue
        pairs += _partners(plan, top, mine)
    held = sum(plan.arguments[a].nbytes for a, _ in pairs)
    if not pairs or held < large_bytes:
        return
    names = " and ".join(dict.fromkeys(_top(plan.arguments[a].name) for a, _ in pairs))
    try:
        other = replanner.giving(tuple(pairs)).again()
    except InfeasibleError:
        return
    saved = plan.predicted.peak_bytes - other.predicted.peak_bytes
    if saved > 0:
        yield Finding(
            "not-donated",
            "warning",
            names,
            f"{names} comes back as a result but is not donated: its old and its new values are "
            f"held together; donating it would make the peak {nbytes(saved)} smaller",
            "donate it (donate_argnums or donate_argnames) if it is not used after the call",
            seconds=other.predicted.step_s - plan.predicted.step_s,
            nbytes=saved,
        )


def _top(name: str) -> str:
    """The argument that a leaf belongs to."""
    return min((name[:i] for c in "[." if (i := name.find(c)) > 0), key=len, default=name)


def _partners(plan: Plan, top: str, mine: list[int]) -> list[tuple[int, int]]:
    """For each leaf of an argument the result that is its new value; none if one has none."""
    prefixes: dict[str, dict[int, int]] = {}
    for r, result in enumerate(plan.results):
        for a in mine:
            inner = plan.arguments[a].name[len(top) :]
            argument = plan.arguments[a]
            fits = (argument.shape, argument.dtype) == (result.shape, result.dtype)
            if fits and result.name.endswith(inner):
                prefix = result.name[: len(result.name) - len(inner)]
                prefixes.setdefault(prefix, {}).setdefault(a, r)
    whole = [found for found in prefixes.values() if len(found) == len(mine)]
    return sorted(whole[0].items()) if whole else []


def replicated(
    replanner: Replanner, large_bytes: int, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Large tensors that every device holds whole without anybody having asked for it."""
    plan = replanner.plan
    if plan.mesh.devices == 1:
        return
    held = [
        (size, subject)
        for size, subject in _whole(replanner)
        if size >= large_bytes and replanner.graph.values[subject.value].shape
    ]
    held.sort(key=lambda row: -row[0])
    for number, (size, subject) in enumerate(held):
        tensor = replanner.graph.values[subject.value]
        kind = f"{subject.name} {tensor.dtype}{list(tensor.shape)}"
        place = subject.name
        if tensor.op >= 0:
            place += f" ({line_near(replanner.graph, subject.value)})"
        problem = f"{kind} is held whole by every device, {nbytes(size)}"
        if number >= SOLVES:
            yield Finding("replicated", "note", place, problem, _ASK, nbytes=size)
            continue
        say(f"what splitting {subject.name} would cost")
        question = Question.of(replanner, subject)
        best = question.next_best()
        if best is None or best.step_delta_s is None or best.peak_delta_bytes is None:
            yield Finding(
                "replicated",
                "warning",
                place,
                f"{problem}: no axis of the mesh ({plan.mesh}) can split it",
                "pad one of its dimensions to a multiple of a mesh axis"
                if not question.candidates()
                else "give the op that makes it a sharding rule, or compute it otherwise",
                nbytes=size,
            )
            continue
        share = best.step_delta_s / plan.predicted.step_s
        cheap = share < WORTH and best.peak_delta_bytes < 0
        sign = "+" if best.peak_delta_bytes >= 0 else "-"
        yield Finding(
            "replicated",
            "warning" if cheap else "note",
            place,
            f"{problem}; as {spec(best.sharding)} the step would change by {share:+.2%}, the peak "
            f"by {sign}{nbytes(abs(best.peak_delta_bytes))}",
            f"pin it to {spec(best.sharding)}" if cheap else "none needed if memory suffices",
            seconds=best.step_delta_s,
            nbytes=size,
        )


_ASK = "ask plan.explain(name) what splitting it would cost"


def _whole(replanner: Replanner) -> Iterator[tuple[int, Subject]]:
    """Arguments, untied results and what ops make, where nothing splits them."""
    plan, graph = replanner.plan, replanner.graph
    found: set[int] = set()
    for i, argument in enumerate(plan.arguments):
        if not any(argument.sharding) and argument.shape:
            found.add(graph.arguments[i])
            origin = plan.origin
            asked = argument.pinned or (origin is not None and origin.arguments[i].required)
            if not asked:
                yield argument.nbytes, Subject("argument", i, graph.arguments[i], argument.name)
    for op in plan.ops:
        row = graph.ops[op.index]
        if op.nbytes and not any(any(s) for s in op.results) and len(op.results) == 1:
            # What follows from another whole tensor is told with that one.
            first = not found & set(row.operands)
            found.update(row.results)
            if first and row.fixed is None:
                name = f"{row.kind} #{op.index}"
                yield op.nbytes, Subject("op", op.index, row.results[0], name)


def whole_ops(replanner: Replanner) -> Iterator[Finding]:
    """Ops without a sharding rule that take a good part of the step."""
    plan = replanner.plan
    for op in plan.ops:
        row = replanner.graph.ops[op.index]
        took = (op.seconds + op.reduce_s) * op.trips
        alone = row.rule is None and row.fixed is None and not op.factors and op.operands
        if plan.mesh.devices > 1 and alone and took >= WORTH * plan.predicted.step_s:
            how = "one device does it for all" if op.reduced else "every device does it"
            yield Finding(
                "no-rule",
                "warning",
                f"{row.kind} #{op.index}" + (f" ({op.source})" if op.source else ""),
                f"{row.target or row.kind} has no sharding rule, so {how}: {seconds(took)} in one "
                "call",
                "register a rule (autoshard.register_rule), or call it inside jax.shard_map",
                seconds=took,
            )


def tiny_collectives(replanner: Replanner, say: Callable[[str], None]) -> Iterator[Finding]:
    """Collectives in loops that mostly wait for their start."""
    plan, solved = replanner.plan, 0
    rows = sorted(enumerate(plan.collectives), key=lambda row: -row[1].seconds * row[1].trips)
    for number, c in rows:
        took = c.seconds * c.trips
        if c.trips < 2 or took < WORTH * plan.predicted.step_s:
            continue
        start = _start_s(replanner, c)
        if start < c.seconds / 2:
            continue
        way = ""
        if solved < SOLVES:
            solved += 1
            say(f"the cheapest plan without collective {number}")
            remedy, never = without(replanner, (c,))
            way = f"; {never}"
            if remedy is not None:
                share = remedy.step_delta_s / plan.predicted.step_s
                way = f"; without it the step would change by {share:+.2%}"
        yield Finding(
            "tiny-collective",
            "note",
            f"collective {number}, {c.source or line_near(replanner.graph, c.value)}",
            f"{c.kind} of {nbytes(c.nbytes)} runs {c.trips} times in a loop and spends "
            f"{start / c.seconds:.0%} of its time on starting: {seconds(took)} in one call{way}",
            f"do more per round, or move it out of the loop; see plan.why({number})",
            seconds=took,
        )


def _start_s(replanner: Replanner, c: PlannedCollective) -> float:
    """Time of such a collective of one byte [s]."""
    axes = tuple(MeshAxis(a, replanner.plan.mesh.size((a,))) for a in c.axes)
    return float(replanner.means.cost_model.collective_s(c.kind, np.ones(1), axes)[0])


def unproved(plan: Plan) -> Iterator[Finding]:
    """What the figures of the plan do not cover."""
    gap = plan.solver.gap
    if gap is None or gap > WORTH:
        open_ = "nothing is proved" if gap is None else f"it may be {gap:.1%} above the best"
        yield Finding(
            "gap",
            "note",
            f"solver {plan.solver.solver}",
            f"the plan was not proved optimal: {open_}",
            "give a longer time_limit_s",
        )
    for line in plan.uncounted_loops:
        yield Finding(
            "uncounted-loop",
            "note",
            line,
            "how often this loop runs depends on data; every figure counts its body once",
            "use jax.lax.scan or fori_loop with fixed bounds if the count is known",
        )
