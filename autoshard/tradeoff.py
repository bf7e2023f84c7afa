"""What memory is worth to a program: plans from the fastest to the leanest that was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from autoshard.given import positive, whole_number
from autoshard.interpret import interpret
from autoshard.pricing import total_seconds
from autoshard.problem import FORBIDDEN
from autoshard.replan import Replanner
from autoshard.solvers.pareto import GIB, Point, front


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A plan on the front.

    Attributes:
        peak_bytes: Predicted peak on one device, counted from the plan [bytes].
        step_s: Predicted time of one call [s].
        objective_s: What the solver minimized [s].
        bound_s: Proved: no plan whose usage, as the solver counts it, is as low has a lower
            objective [s]; None if nothing was proved.
        usage_bytes: Peak as the solver counts it: the live intervals of its problem, without what
            the compiler shares or fuses on top [bytes].
        seconds_per_gib: The shadow price of memory: time that one GiB less costs from here to the
            next leaner plan [s/GiB]; None at the leanest.
    """

    peak_bytes: int
    step_s: float
    objective_s: float
    bound_s: float | None
    usage_bytes: int
    seconds_per_gib: float | None


@dataclass(frozen=True, slots=True)
class PlanFront:
    """Time against memory.

    Attributes:
        points: Plans with falling peak and rising time.
    """

    points: tuple[PlanPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        """A table to read."""
        lines = ["   peak [GiB]    step [ms]   one GiB less costs [ms]"]
        for point in self.points:
            price = point.seconds_per_gib
            text = "-" if price is None else f"{1e3 * price:.4g}"
            lines.append(f"{point.peak_bytes / GIB:13.4f}{1e3 * point.step_s:13.4f}{text:>26}")
        return "\n".join(lines)


def plan_front(
    replanner: Replanner,
    *,
    points: int = 8,
    time_limit_s: float = 60.0,
    say: Callable[[str], None] = lambda what: None,
) -> PlanFront:
    """Plans from the fastest to the leanest, and the price of memory between them.

    The solver is asked for the cheapest choice under one usage limit after the other; time and peak
    of each answer are then counted as for any plan, and those that another beats in both are left
    out.

    Args:
        replanner: A plan, opened; its own memory limit does not bind.
        points: Limits to solve for at most.
        time_limit_s: Time for all of them together [s].
        say: Told what is being done.

    Raises:
        InputError: ``points`` or ``time_limit_s`` is no such number.
        SolverError: The plan's solver contradicted itself.
    """
    points = whole_number(points, "points", least=1, fix="give 1 or more")
    time_limit_s = positive(time_limit_s, "time_limit_s", fix="give seconds, e.g. 60.0")
    found = front(
        replanner.priced.problem,
        points=points,
        time_limit_s=time_limit_s,
        solver=replanner.means.solver,
        progress=lambda what, sign: say(f"{what}: {sign.stage}, {sign.nodes_left} decisions left"),
    )
    rows = sorted((_counted(replanner, point) for point in found), key=_by_peak)
    kept: list[PlanPoint] = []
    for row in rows:  # leanest first
        if not kept or row.step_s < kept[-1].step_s:
            kept.append(row)
    kept.reverse()
    priced = []
    for rich, lean in pairwise(kept):
        saved = (rich.peak_bytes - lean.peak_bytes) / GIB
        price = (lean.step_s - rich.step_s) / saved
        priced.append(replace(rich, seconds_per_gib=price))
    return PlanFront((*priced, *kept[-1:]))


def _counted(replanner: Replanner, point: Point) -> PlanPoint:
    plan, _ = interpret(
        replanner.graph,
        replanner.priced,
        replanner.plan.mesh,
        replanner.means.cost_model,
        point.choices,
    )
    known = point.lower_bound > -FORBIDDEN
    return PlanPoint(
        peak_bytes=plan.predicted.peak_bytes,
        step_s=plan.predicted.step_s,
        objective_s=total_seconds(point.cost),
        bound_s=total_seconds(point.lower_bound) if known else None,
        usage_bytes=point.peak_usage,
        seconds_per_gib=None,
    )


def _by_peak(point: PlanPoint) -> tuple[int, float]:
    return point.peak_bytes, point.step_s
