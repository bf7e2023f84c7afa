"""Hints of the user that do nothing or hurt, measured by planning without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from autoshard.diff import diff
from autoshard.errors import InfeasibleError
from autoshard.finding import SOLVES, Finding
from autoshard.plan import Plan, spec
from autoshard.plan_text import nbytes
from autoshard.replan import Replanner

HURTS = 1e-3
"""Share of a step, or of the peak, that must be gained without a hint for it to hurt."""


@dataclass(frozen=True, eq=False, slots=True)
class Hint:
    """A wish of the user that can be left out.

    Attributes:
        rule: ``pin`` or ``constraint``.
        place: Where it is.
        what: What it says.
        nbytes: Bytes on one device of the tensor it is about.
        without: Opens the plan without it.
    """

    rule: str
    place: str
    what: str
    nbytes: int
    without: Callable[[], Replanner]


def hints(replanner: Replanner, say: Callable[[str], None]) -> Iterator[Finding]:
    """Pins and sharding constraints that are better left out."""
    every = [*_pins(replanner), *_constraints(replanner)]
    every.sort(key=lambda hint: -hint.nbytes)
    for number, hint in enumerate(every):
        if number == SOLVES:
            yield Finding(
                "hints",
                "note",
                f"{len(every) - SOLVES} further hints",
                "were not looked at: they are about smaller tensors",
                "plan without them and compare: plan.diff(other)",
            )
            return
        say(f"without the {hint.rule} on {hint.place}")
        yield from _judged(replanner.plan, hint)


def _judged(plan: Plan, hint: Hint) -> Iterator[Finding]:
    try:
        other = hint.without().again()
    except InfeasibleError:
        return  # nothing better is found without it under the memory limit
    now, then = plan.predicted, other.predicted
    gained, freed = now.step_s - then.step_s, now.peak_bytes - then.peak_bytes
    # Constraints are gone by the time XLA fuses, so only shardings count.
    if not [c for c in diff(plan, other).changes if not c.name.startswith("sharding_constraint")]:
        yield Finding(
            f"idle-{hint.rule}",
            "note",
            hint.place,
            f"{hint.what} does nothing: all is sharded the same without it",
            "leave it out, so that the plan can follow when the program changes",
            seconds=0.0,
        )
    elif gained > HURTS * now.step_s:
        memory = f", with a peak {nbytes(abs(freed))} {'smaller' if freed > 0 else 'larger'}"
        yield Finding(
            f"harmful-{hint.rule}",
            "warning",
            hint.place,
            f"{hint.what} hurts: without it the step would change by {-gained / now.step_s:+.2%}"
            + (memory if freed else ""),
            "leave it out" + (", unless the memory it saves is needed" if freed < 0 else ""),
            seconds=gained,
            nbytes=abs(freed),
        )


def _pins(replanner: Replanner) -> Iterator[Hint]:
    """One hint per pinned argument, with the result that replaces it, or result."""
    plan, ties = replanner.plan, replanner.graph.ties
    seen: set[int] = set()
    for position, argument in enumerate(plan.arguments):
        tied = [r for a, r in ties if a == position]
        rows = [argument, *(plan.results[r] for r in tied)]
        seen.update(tied)
        if any(row.pinned for row in rows):
            yield Hint(
                "pin",
                argument.name,
                f"pinning {argument.name} to {spec(argument.sharding)}",
                argument.nbytes,
                partial(replanner.wishing, {position: None}, dict.fromkeys(tied)),
            )
    for position, result in enumerate(plan.results):
        if result.pinned and position not in seen:
            yield Hint(
                "pin",
                result.name,
                f"pinning {result.name} to {spec(result.sharding)}",
                result.nbytes,
                partial(replanner.wishing, {}, {position: None}),
            )


def _constraints(replanner: Replanner) -> Iterator[Hint]:
    """One hint per source line that constrains shardings: gradients repeat a constraint."""
    lines: dict[str, list[int]] = {}
    for op in replanner.graph.ops:
        if op.name == "sdy.sharding_constraint" and op.fixed is not None:
            lines.setdefault(op.source or f"#{op.index}", []).append(op.index)
    decided = {op.index: op for op in replanner.plan.ops}
    for line, indices in lines.items():
        wanted = [replanner.graph.ops[i].fixed for i in indices]
        listed = dict.fromkeys(spec(fixed[0][0]) for fixed in wanted if fixed is not None)
        yield Hint(
            "constraint",
            line,
            f"with_sharding_constraint to {' and '.join(listed)}",
            max(decided[i].nbytes for i in indices),
            partial(replanner.without_constraints, tuple(indices)),
        )
