"""What `autoshard solve` reads, writes and draws: solutions as JSON, charts of runs and fronts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoshard.errors import InputError
from autoshard.json_file import read_json, shown
from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.report.curves import COLOURS, Curve, Scale, chart
from autoshard.solvers.pareto import GIB, Point
from autoshard.solvers.solution import Solution, Status
from autoshard.solvers.watch import Watched

_FIX = "give a file that `autoshard solve --save` wrote, or a list of strategy indices"


def read_choices(path: Path) -> tuple[tuple[int, ...], tuple[str, ...], Mapping[str, Any]]:
    """The choices in a file, the names of their nodes, and what else the file says of them.

    Args:
        path: Written by ``autoshard solve --save`` or ``--json``; or a bare list of indices.

    Raises:
        InputError: It holds no choices.
    """
    data = read_json(path, fix=_FIX)
    told = data if isinstance(data, dict) else {"choices": data}
    choices, names = told.get("choices"), told.get("names", [])
    if not isinstance(choices, list) or not all(type(choice) is int for choice in choices):
        raise InputError(f"choices are {shown(choices)}, not whole numbers", at=str(path), fix=_FIX)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"names are {shown(names)}, not a list of names", at=str(path), fix=_FIX)
    return tuple(choices), tuple(names), told


def solution_json(problem: Problem, watched: Watched, /, **about: object) -> dict[str, Any]:
    """A solver's run as JSON values.

    Args:
        problem: What was solved.
        watched: The run.
        about: What to say of it first, e.g. the file and the solver.
    """
    solution = watched.solution
    solved = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    found = evaluate(problem, solution.choices) if solved else None
    bound = None if abs(solution.lower_bound) >= FORBIDDEN else solution.lower_bound
    gap = solution.gap if solved and math.isfinite(solution.gap) and bound is not None else None
    return {
        **about,
        "status": solution.status.name,
        "meaning": solution.status.value,
        "interrupted": watched.interrupted or None,
        "cost": solution.cost if solved else None,
        "lower_bound": bound,
        "gap": gap,
        "peak_usage": None if found is None else found.peak_usage,
        "peak_time": None if found is None else found.peak_time,
        "usage_limit": problem.usage_limit,
        "least_usage_limit": solution.least_usage_limit,
        "shortage": shortage_json(problem, solution),
        "seconds": solution.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "timeline": [
            {"seconds": m.seconds, "cost": m.cost, "lower_bound": _known(m.lower_bound)}
            for m in watched.timeline
        ],
        "choices": list(solution.choices),
    }


def shortage_json(problem: Problem, solution: Solution) -> dict[str, Any] | None:
    """Where memory runs out, with the names of what holds it."""
    short = solution.shortage
    if short is None:
        return None
    held = zip(short.nodes, short.usages, strict=True)
    return {
        "time": short.time,
        "missing_bytes": short.missing,
        "held_by": [
            {"node": node, "name": problem.name(node), "bytes": nbytes} for node, nbytes in held
        ],
    }


def peak_rss_bytes() -> int | None:
    """The most memory that this process has held [bytes]; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # there in bytes, elsewhere in KiB


def write_solution(path: Path, problem: Problem, data: Mapping[str, Any]) -> None:
    """Keep a solution, with the names of the nodes if they have any."""
    named = {"names": list(problem.names)} if problem.names else {}
    path.write_text(json.dumps({**data, **named}, allow_nan=False) + "\n", encoding="utf-8")


def front_json(points: Sequence[Point], *, choices: bool = True) -> list[dict[str, Any]]:
    """A front as JSON values, cheapest first."""
    return [
        {
            "limit": point.limit,
            "peak_usage": point.peak_usage,
            "cost": point.cost,
            "lower_bound": _known(point.lower_bound),
            "status": point.status.name,
            "cost_per_gib": point.cost_per_gib,
            "seconds": point.seconds,
            **({"choices": list(point.choices)} if choices else {}),
        }
        for point in points
    ]


def front_chart(points: Sequence[Point], title: str) -> str:
    """Cost against peak memory, with the proved bounds, as SVG."""
    rising = list(reversed(points))  # leanest first: what fits less memory fits more
    gib = [point.peak_usage / GIB for point in rising]
    costs = [float(point.cost) for point in rising]
    line = tuple(zip(gib, costs, strict=True))
    curves = [Curve("cost", line, COLOURS[0], stepped=True, dots=True)]
    known = [float(p.lower_bound) for p in rising if p.lower_bound > -FORBIDDEN]
    if len(known) == len(rising):
        # A bound for some memory holds for less as well.
        steps = [(x, b) for x, pair in zip(gib, pairwise(known), strict=False) for b in pair]
        steps.append((gib[-1], known[-1]))
        curves.append(Curve("proved bound", tuple(steps), COLOURS[1], dashed=True))
    return chart(
        title,
        curves,
        Scale.linear("peak usage [GiB]", gib),
        Scale.linear("cost", [*costs, *known]),
    )


def runs_chart(runs: Sequence[Mapping[str, Any]], title: str) -> str | None:
    """Cost and bound of each run over time, as parts of the best cost, as SVG.

    Args:
        runs: As of :func:`solution_json`, with ``solver``.
        title: Above the chart.

    Returns:
        The text; None if no run found a choice.
    """
    known = [run["cost"] for run in runs if run.get("cost") is not None]
    if not known:
        return None
    best = min(known)
    unit = abs(best) or 1
    curves, shares, times = [], [0.0], [0.1]
    for number, run in enumerate(run for run in runs if run.get("timeline")):
        colour = COLOURS[number % len(COLOURS)]
        for key, dashed in (("cost", False), ("lower_bound", True)):
            line = [
                (moment["seconds"], 100.0 * (moment[key] - best) / unit)
                for moment in run["timeline"]
                if moment[key] is not None
            ]
            if not line:
                continue
            line.append((max(run["seconds"], line[-1][0]), line[-1][1]))
            times += [seconds for seconds, _ in line]
            shares += [share for _, share in line]
            name = f"{run['solver']}: {'bound' if dashed else 'cost'}"
            curves.append(Curve(name, tuple(line), colour, dashed=dashed, stepped=True))
    return chart(
        title,
        curves,
        Scale.signed_log("time [s]", times, 0.01, "{:g}"),
        Scale.signed_log(f"above the best cost, {best:,}", shares, 0.001, "{:+g} %"),
    )


def _known(bound: int | None) -> int | None:
    return None if bound is None or abs(bound) >= FORBIDDEN else bound
