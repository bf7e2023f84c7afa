"""A plan's times by source line beside XLA:TPU's own estimates of the compiled program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost_models.hlo_cycles import XlaEstimate
from autoshard.plan import Plan


@dataclass(frozen=True, slots=True)
class LineEstimate:
    """A source line's time by the plan and by XLA:TPU; both are estimates.

    Attributes:
        source: ``file.py:line``; empty for what XLA adds.
        predicted_s: Computation of its ops in one call by the plan [s].
        xla_s: What XLA reckons for the fusions that end with one of its ops [s]. An op inside
            another line's fusion counts there.
        cycles: The same in cycles.
        fusions: How many instructions with an estimate it has.
    """

    source: str
    predicted_s: float
    xla_s: float
    cycles: int
    fusions: int


def line_estimates(
    plan: Plan, found: Sequence[XlaEstimate], cycles_per_s: float
) -> tuple[LineEstimate, ...]:
    """Time by source line, by the plan and by XLA's estimates, the farthest apart first.

    Args:
        plan: The plan.
        found: XLA's estimates of the compiled program.
        cycles_per_s: The clock that they are meant for.
    """
    predicted: dict[str, float] = defaultdict(float)
    for op in plan.ops:
        predicted[op.source] += op.seconds * op.trips
    cycles: dict[str, int] = defaultdict(int)
    fusions: dict[str, int] = defaultdict(int)
    for estimate in found:
        cycles[estimate.source] += estimate.cycles * estimate.trips
        fusions[estimate.source] += 1
    lines = (
        LineEstimate(
            line, predicted[line], cycles[line] / cycles_per_s, cycles[line], fusions[line]
        )
        for line in {**predicted, **cycles}
        if predicted[line] or cycles[line]
    )
    return tuple(sorted(lines, key=lambda line: -abs(line.predicted_s - line.xla_s)))
