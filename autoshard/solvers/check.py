"""The independent count: what a choice costs and uses, found without any part of a solver.

:func:`autoshard.problem.evaluate`, which solvers use, adds differences up over sorted time points
with numpy, in 64 bits. Here nodes come and go one by one, a heap says who leaves next, and every
sum is one of Python's integers, which have no largest one. A file is counted from its bare JSON
lists. The two share the reader of JSON text and the meaning of the format, nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import InputError
from autoshard.json_file import read_json
from autoshard.problem import FORBIDDEN, Problem, load_problem


@dataclass(frozen=True, slots=True)
class Check:
    """What was counted.

    Attributes:
        cost: Sum of all chosen entries; ``FORBIDDEN`` if one of them is.
        usage: Time points at which the usage changes, with the usage from each on [bytes].
        peak_usage: The largest usage [bytes]; 0 if nothing ever lives.
        peak_time: The first time point of it.
        over: Time points at which the usage is above the limit, with what is too much [bytes].
        forbidden: The first chosen entry that is forbidden, e.g. ``edge 3 (0, 7)``; empty if none.
    """

    cost: int
    usage: tuple[tuple[int, int], ...]
    peak_usage: int
    peak_time: int
    over: tuple[tuple[int, int], ...]
    forbidden: str

    @property
    def feasible(self) -> bool:
        """Nothing forbidden was chosen, and the usage never passes the limit."""
        return not self.forbidden and not self.over

    def __str__(self) -> str:
        """What was counted, in a sentence."""
        if self.forbidden:
            return f"not feasible: {self.forbidden} is forbidden"
        found = f"cost {self.cost:,}, peak usage {self.peak_usage:,} bytes at {self.peak_time}"
        if self.over:
            time, most = max(self.over, key=lambda row: row[1])
            points = f"{len(self.over)} time points" if len(self.over) > 1 else "one time point"
            found += f"; not feasible: over the limit at {points}, by {most:,} bytes at {time}"
        return found


def check(problem: Problem, choices: Sequence[int]) -> Check:
    """Count a choice on a problem.

    Raises:
        InputError: There is not one choice per node, or a choice does not exist.
    """
    return _count(
        [cost.tolist() for cost in problem.costs],
        [usage.tolist() for usage in problem.usages],
        problem.intervals.tolist(),
        problem.edges.tolist(),
        [matrix.ravel().tolist() for matrix in problem.edge_costs],
        problem.usage_limit,
        choices,
    )


def check_file(path: str | Path, choices: Sequence[int], *, limit: int | None = None) -> Check:
    """Count a choice on a problem in the contest's form, from the numbers in its file.

    Args:
        path: The file.
        choices: Per node, the index of its strategy.
        limit: Instead of the file's own usage limit [bytes].

    Raises:
        InputError: The file is no problem, or the choices are not for it.
    """
    load_problem(path)  # refuses what is no problem, with the place
    data: Any = read_json(path, fix="write it with save_problem")["problem"]
    return _count(
        data["nodes"]["costs"],
        data["nodes"]["usages"],
        data["nodes"]["intervals"],
        data["edges"]["nodes"],
        data["edges"]["costs"],
        data.get("usage_limit") if limit is None else limit,
        choices,
    )


def _count(
    costs: Sequence[Sequence[int]],
    usages: Sequence[Sequence[int]],
    intervals: Sequence[Sequence[int]],
    edges: Sequence[Sequence[int]],
    edge_costs: Sequence[Sequence[int]],
    limit: int | None,
    choices: Sequence[int],
) -> Check:
    if len(choices) != len(costs):
        raise InputError(
            f"{len(choices)} choices were given for {len(costs)} nodes",
            fix="give one strategy index per node, of this very problem",
        )
    for node, (choice, row) in enumerate(zip(choices, costs, strict=True)):
        if not 0 <= choice < len(row):
            raise InputError(
                f"strategy {choice} does not exist",
                at=f"node {node}",
                fix=f"choose from 0 to {len(row) - 1}; is it a choice for another problem?",
            )
    total, forbidden = 0, ""
    for node, choice in enumerate(choices):
        total += costs[node][choice]
        if costs[node][choice] >= FORBIDDEN and not forbidden:
            forbidden = f"strategy {choice} of node {node}"
    for number, (i, j) in enumerate(edges):
        entry = edge_costs[number][choices[i] * len(costs[j]) + choices[j]]
        total += entry
        if entry >= FORBIDDEN and not forbidden:
            forbidden = f"edge {number} ({i}, {j}) between {choices[i]} and {choices[j]}"
    held = [usage[choice] for usage, choice in zip(usages, choices, strict=True)]
    usage = _over_time(intervals, held)
    peak_time, peak = max(usage, key=lambda point: point[1], default=(0, 0))
    return Check(
        cost=FORBIDDEN if forbidden else total,
        usage=tuple(usage),
        peak_usage=peak,
        peak_time=peak_time,
        over=tuple((t, u - limit) for t, u in usage if u > limit) if limit is not None else (),
        forbidden=forbidden,
    )


def _over_time(intervals: Sequence[Sequence[int]], held: Sequence[int]) -> list[tuple[int, int]]:
    """Time points and the usage from each on, as nodes come and go in order."""
    waiting = sorted((start, end, node) for node, (start, end) in enumerate(intervals))
    leaving: list[tuple[int, int]] = []
    found: list[tuple[int, int]] = []
    live = position = 0
    while position < len(waiting) or leaving:
        times = [waiting[position][0]] if position < len(waiting) else []
        now = min([*times, leaving[0][0]] if leaving else times)
        while leaving and leaving[0][0] == now:
            live -= held[heapq.heappop(leaving)[1]]
        while position < len(waiting) and waiting[position][0] == now:
            _, end, node = waiting[position]
            position += 1
            if now < end:  # others never live
                live += held[node]
                heapq.heappush(leaving, (end, node))
        found.append((now, live))
    return found
