"""Which pass, and which single rewrite in it, breaks a program; shown on a small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from jax.extend.mlir import ir

from autoshard.errors import AutoshardError
from autoshard.passes.context import PassContext, Rewrite, Rewrites
from autoshard.passes.manager import run_pipeline
from autoshard.passes.module_state import copy_of, op_counts
from autoshard.passes.pipeline import Pipeline, pass_text
from autoshard.passes.properties import Broken
from autoshard.passes.registry import Pass
from autoshard.passes.reproducer import Reproducer
from autoshard.passes.shrink import shrink

_FAILURES = (AutoshardError, ir.MLIRError, ValueError, TypeError, LookupError, AssertionError)
"""What a pass may raise on a program that was cut down; such a program shows something else."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """What was found.

    Attributes:
        position: Position of the pass in the pipeline.
        made: The pass, as a pipeline names it.
        rewrite: The first rewrite that breaks the property; None if the pass breaks it before any
            rewrite that it counts.
        rewrites: Rewrites that the pass makes if it is let.
        failure: What breaks, in words.
        reproducer: Text of a file that shows it: a small module, on which the pass alone is run.
        ops: Ops of that module.
    """

    position: int
    made: str
    rewrite: Rewrite | None
    rewrites: int
    failure: str
    reproducer: str
    ops: int

    def __str__(self) -> str:
        where = "before any rewrite that it counts"
        if self.rewrite is not None:
            where = f"with {self.rewrite}, one of {self.rewrites}"
        return (
            f"pass {self.position + 1}, {self.made}, breaks it {where}:\n  {self.failure}\n"
            f"  shown by a module of {self.ops} ops"
        )

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "position": self.position,
            "pass": self.made,
            "rewrite": None if self.rewrite is None else asdict(self.rewrite),
            "rewrites": self.rewrites,
            "failure": self.failure,
            "ops": self.ops,
        }


def bisect(
    pipeline: Pipeline,
    module: ir.Module,
    broken: Broken,
    context: PassContext,
    *,
    shrink_s: float = 60.0,
    say: Callable[[str], None] | None = None,
) -> Bisection | None:
    """Find what in a pipeline breaks a property of a program.

    The passes are run one after another until what they have made differs from the module given;
    then the one pass with ever other limits to its rewrites.

    Args:
        pipeline: The passes.
        module: The program; it is left as it is.
        broken: The property (see :mod:`autoshard.passes.properties`).
        context: What the passes are told.
        shrink_s: Time to spend on a small program that shows it [s].
        say: Told how it goes.

    Returns:
        What was found; None if no pass breaks the property.
    """
    tell = say or (lambda text: None)
    current = copy_of(module)
    for position, made in enumerate(pipeline.passes):
        tell(f"pass {position + 1} of {len(pipeline.passes)}, {made.pass_info.name}")
        before = copy_of(current)
        spent = _run(made, current, context, None)
        failure = broken(module, current)
        if failure:
            return _inside(position, made, before, spent.total, (module, broken), context,
                           shrink_s, tell)  # fmt: skip
    return None


def _run(made: Pass, module: ir.Module, context: PassContext, limit: int | None) -> Rewrites:
    """Run one pass, with its rewrites limited; what the passes before it published stays."""
    own = replace(context, rewrites=Rewrites(limit), results=dict(context.results))
    run_pipeline(Pipeline((made,)), module, own)
    if limit is None:
        context.results.update(own.results)
    return own.rewrites


def _inside(
    position: int,
    made: Pass,
    before: ir.Module,
    total: int,
    against: tuple[ir.Module, Broken],
    context: PassContext,
    shrink_s: float,
    tell: Callable[[str], None],
) -> Bisection:
    module, broken = against
    name = made.pass_info.name
    own = replace(context, results={k: v for k, v in context.results.items() if k != name})

    def outcome(limit: int) -> tuple[str, Rewrites]:
        tell(f"{name} with {limit} of {total} rewrites")
        candidate = copy_of(before)
        spent = _run(made, candidate, own, limit)
        return broken(module, candidate), spent

    low, high = 0, total  # with `high` rewrites it breaks; with fewer than `low` it does not
    while low < high:
        middle = (low + high) // 2
        if outcome(middle)[0]:
            high = middle
        else:
            low = middle + 1
    failure, spent = outcome(high)
    small = _shrunk(made, before, broken, own, shrink_s, tell)
    told = Reproducer(pass_text(made), context.seed, context.mesh, failure)
    return Bisection(
        position,
        pass_text(made),
        spent.last if high else None,
        total,
        failure,
        told.text(str(small)),
        op_counts(small).total(),
    )


def _shrunk(
    made: Pass,
    before: ir.Module,
    broken: Broken,
    context: PassContext,
    budget_s: float,
    tell: Callable[[str], None],
) -> ir.Module:
    """A small module that the pass breaks; the whole one if it breaks it on the way only."""

    def holds(candidate: ir.Module) -> bool:
        tell(f"shrinking, {op_counts(candidate).total()} ops")
        after = copy_of(candidate)
        try:
            own = replace(context, boundaries=None, results=dict(context.results))
            _run(made, after, own, None)
            return bool(broken(candidate, after))
        except _FAILURES:
            return False

    return shrink(before, holds, budget_s=budget_s) if holds(before) else before
