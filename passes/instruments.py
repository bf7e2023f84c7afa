"""What looks on while a pipeline runs: time, counts of ops, snapshots, MLIR's verifier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jax.extend.mlir import ir

from autoshard.errors import PassError
from autoshard.passes.context import PassContext
from autoshard.passes.manager import Instrument, Step
from autoshard.passes.module_state import op_counts
from autoshard.passes.pipeline import Pipeline, pass_text
from autoshard.passes.text_diff import side_by_side
from autoshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall time of a pass, or of a part of one.

    Attributes:
        name: The pass as the pipeline names it.
        seconds: Its time, parts included [s].
        parts: Of the time, what is known to have gone where.
    """

    name: str
    seconds: float
    parts: tuple[Timed, ...] = ()

    def lines(self, depth: int = 0) -> list[str]:
        """The tree as text."""
        own = f"{'  ' * depth}{self.seconds:9.4f} s  {self.name}"
        return [own, *(line for part in self.parts for line in part.lines(depth + 1))]


class Timing(Instrument):
    """Wall time of every pass; as the last instrument it measures the passes alone."""

    def __init__(self) -> None:
        self.passes: list[Timed] = []
        self._start = 0.0

    def before(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Stop it."""
        spent = time.perf_counter() - self._start
        plan = context.result(step.name, Plan)
        parts = () if plan is None else tuple(Timed(n, s) for n, s in plan.stages)
        self.passes.append(Timed(pass_text(step.made), spent, parts))

    def tree(self) -> Timed:
        """The whole pipeline."""
        return Timed("pipeline", sum(each.seconds for each in self.passes), tuple(self.passes))


class OpCounts(Instrument):
    """Ops before and after every pass, by name, and the rewrites that the pass counted."""

    def __init__(self) -> None:
        self.before_first: Counter[str] = Counter()
        self.passes: list[Counter[str]] = []
        self.rewrites: list[Counter[str]] = []

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Count what the pipeline is given."""
        self.before_first = op_counts(module)

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Count what the pass has left."""
        self.passes.append(op_counts(module))
        self.rewrites.append(context.rewrites.counts)

    def delta(self, index: int) -> dict[str, int]:
        """Ops by name that a pass has added (or taken away, below zero)."""
        old = self.passes[index - 1] if index else self.before_first
        new = self.passes[index]
        return {n: new[n] - old[n] for n in sorted({*old, *new}) if new[n] != old[n]}


class Verify(Instrument):
    """MLIR's verifier after every pass."""

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Verify.

        Raises:
            PassError: The module is not valid any more.
        """
        try:
            module.operation.verify()
        except ir.MLIRError as error:
            said = " ".join(str(error).split())[:500]
            raise PassError(
                f"the pass {step.name} left an invalid module: {said}",
                at=f"pass {step.index + 1} of {step.pipeline}",
                fix="mend the pass; --bisect finds the rewrite, if the passes count theirs",
            ) from error


class Snapshots(Instrument):
    """The module's text, before the first pass and after every pass that changed it.

    Args:
        folder: Where to write ``00-input.mlir``, ``01-NAME.mlir``, ...; None to write nothing.
        tell: Told the difference that each pass made, side by side.
        width: Columns of that text.
    """

    def __init__(
        self,
        folder: Path | None = None,
        tell: Callable[[str], None] | None = None,
        width: int = 160,
    ) -> None:
        self.texts: list[tuple[str, str]] = []
        self._folder, self._tell, self._width = folder, tell, width

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Keep what the pipeline is given."""
        self._keep(0, "input", str(module))

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Keep what the pass has made, if it is something else."""
        before, text = self.texts[-1][1], str(module)
        if text != before:
            self._keep(step.index + 1, step.name, text)
            if self._tell is not None:
                self._tell(f"{step.name}:\n{side_by_side(before, text, self._width)}")

    def _keep(self, index: int, name: str, text: str) -> None:
        self.texts.append((name, text))
        if self._folder is not None:
            path = self._folder / f"{index:02d}-{name.replace(':', '-')}.mlir"
            path.write_text(text, encoding="utf-8")
