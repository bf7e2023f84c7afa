"""What a pipeline did, pass by pass, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.passes.context import PassContext
from autoshard.passes.instruments import OpCounts, Timing
from autoshard.passes.manager import Instrument
from autoshard.passes.numerics import Difference, Numerics
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.prediction import Prediction
from autoshard.plan import Plan
from autoshard.plan_parts import Predicted
from autoshard.plan_text import nbytes, seconds

MOST_NAMES = 4
"""Kinds of ops that a line names; JSON has all."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The instruments whose findings make a report.

    Attributes:
        timing: Wall time.
        counts: Ops and rewrites.
        numerics: Values, if they are checked.
        prediction: Predicted figures, if they are wanted.
    """

    timing: Timing = field(default_factory=Timing)
    counts: OpCounts = field(default_factory=OpCounts)
    numerics: Numerics | None = None
    prediction: Prediction | None = None

    @property
    def instruments(self) -> tuple[Instrument, ...]:
        """All of them, the clock innermost."""
        optional = [i for i in (self.numerics, self.prediction) if i is not None]
        return (*optional, self.counts, self.timing)

    def text(self, pipeline: Pipeline, context: PassContext) -> str:
        """The report for people; times are measured, costs predicted."""
        lines = [*self.timing.tree().lines(), ""]
        lines.append(f"{self.counts.before_first.total()} ops{self._predicted_text(-1)}")
        for index, made in enumerate(pipeline.passes):
            lines.append(
                f"{made.pass_info.name}: {self._counted(index)}{self._predicted_text(index)}"
            )
            rewrites = self.counts.rewrites[index]
            if rewrites:
                told = ", ".join(
                    f"{pattern} {count}" for pattern, count in sorted(rewrites.items())
                )
                lines.append(f"  rewrites: {told}")
            if self.numerics is not None:
                lines.append(f"  values: {_values_text(self.numerics.passes[index])}")
        for name, result in context.results.items():
            told = _planned(result) if isinstance(result, Plan) else str(result)
            lines.append(f"{name}: {told}")
        return "\n".join(lines)

    def to_json(self, pipeline: Pipeline, context: PassContext) -> dict[str, Any]:
        """The report as plain values: times in seconds, measured; costs predicted."""
        before = None if self.prediction is None else self.prediction.before_first
        return {
            "pipeline": str(pipeline),
            "ops": self.counts.before_first.total(),
            "predicted": _figures(before),
            "seconds": self.timing.tree().seconds,
            "passes": [self._row(index, pipeline) for index in range(len(pipeline.passes))],
            "results": {
                name: result.to_json() if hasattr(result, "to_json") else str(result)
                for name, result in context.results.items()
            },
        }

    def _row(self, index: int, pipeline: Pipeline) -> dict[str, Any]:
        timed = self.timing.passes[index]
        found = None if self.numerics is None else self.numerics.passes[index]
        predicted = None if self.prediction is None else self.prediction.passes[index]
        return {
            "name": pipeline.passes[index].pass_info.name,
            "pass": timed.name,
            "seconds": timed.seconds,
            "parts": {part.name: part.seconds for part in timed.parts},
            "ops": self.counts.passes[index].total(),
            "delta": self.counts.delta(index),
            "rewrites": dict(self.counts.rewrites[index]),
            "difference": None
            if found is None
            else {"error": found.error, "tolerance": found.tolerance, "result": found.result},
            "predicted": _figures(predicted),
        }

    def _counted(self, index: int) -> str:
        delta = self.counts.delta(index)
        if not delta:
            return f"{self.counts.passes[index].total()} ops, none other"
        largest = sorted(delta.items(), key=lambda item: (-abs(item[1]), item[0]))
        named = [f"{n.rpartition('.')[2]} {d:+}" for n, d in largest[:MOST_NAMES]]
        named += ["..."] * (len(largest) > MOST_NAMES)
        return f"{self.counts.passes[index].total()} ops ({', '.join(named)})"

    def _predicted_text(self, index: int) -> str:
        """Predicted time and memory, with what the pass changed of them."""
        if self.prediction is None:
            return ""
        found = [self.prediction.before_first, *self.prediction.passes]
        now, before = found[index + 1], found[max(0, index)]
        assert now is not None
        assert before is not None
        told = f"; predicted {seconds(now.step_s)}, {nbytes(now.peak_bytes)}"
        if index < 0 or now == before:
            return told
        time = (now.step_s / before.step_s - 1) if before.step_s else 0.0
        memory = (now.peak_bytes / before.peak_bytes - 1) if before.peak_bytes else 0.0
        return f"{told} ({time:+.1%} time, {memory:+.1%} memory)"


def _values_text(found: Difference | None) -> str:
    if found is None:
        return "nothing changed"
    if not found.error:
        return "the same"
    return f"within {found.error:.2g} of the largest ({found.tolerance:.2g} is rounding)"


def _figures(found: Predicted | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "step_s": found.step_s,
        "peak_bytes": found.peak_bytes,
        "flops": found.flops,
        "hbm_bytes": found.hbm_bytes,
        "collective_bytes": found.collective_bytes,
    }


def _planned(plan: Plan) -> str:
    figures = plan.predicted
    return (
        f"a plan for {plan.mesh}, predicted {seconds(figures.step_s)}, "
        f"{nbytes(figures.peak_bytes)} per device; {plan.solver.status}"
    )
