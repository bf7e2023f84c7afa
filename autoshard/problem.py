"""The sharding problem as numbers: pairwise costs over strategies, memory over live intervals."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.json_file import not_numbers, read_json, shown, whole_numbers, whole_pairs

FORBIDDEN = 10**18
"""Cost that marks a choice or a pair of choices as not allowed (contest convention)."""

_FORM = (
    "write it with save_problem; it needs problem.nodes.{intervals,costs,usages} and "
    "problem.edges.{nodes,costs}, all whole numbers"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one strategy per node; pay node and edge costs; stay under the usage limit.

    Attributes:
        costs: Per node, the cost of each strategy, int64 ``[S_i]``.
        usages: Per node, the memory each strategy uses while the node lives [bytes], int64
            ``[S_i]``.
        intervals: Live interval ``[start, end)`` of each node, int64 ``[N, 2]``.
        edges: Node pairs, int64 ``[E, 2]``; parallel edges add up.
        edge_costs: Per edge (i, j), int64 ``[S_i, S_j]``.
        usage_limit: At every time point the usages of live nodes add up to at most this [bytes].
        names: What each node is called in messages; empty, or one per node.
    """

    costs: tuple[NDArray[np.int64], ...]
    usages: tuple[NDArray[np.int64], ...]
    intervals: NDArray[np.int64]
    edges: NDArray[np.int64]
    edge_costs: tuple[NDArray[np.int64], ...]
    usage_limit: int | None = None
    names: tuple[str, ...] = ()

    def name(self, node: int) -> str:
        """What a node is called in messages: its name, or ``node 12``."""
        return self.names[node] if self.names else f"node {node}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a choice of strategies costs, counted from the problem alone.

    Attributes:
        cost: Exact sum of node and edge costs; ``FORBIDDEN`` if any chosen entry is forbidden.
        peak_usage: Largest usage over all time points [bytes].
        peak_time: First time point of that usage; 0 if nothing ever lives.
        feasible: Nothing forbidden is chosen and the peak is within the limit.
    """

    cost: int
    peak_usage: int
    peak_time: int
    feasible: bool


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """Cost and memory of one choice per node, independent of any solver.

    Sums are Python integers, so they can't overflow; a forbidden entry makes the whole cost
    ``FORBIDDEN``, whatever negative costs stand beside it.

    Args:
        problem: A problem that ``validate_problem`` accepts.
        choices: Per node, the index of its strategy.

    Returns:
        The evaluation.

    Raises:
        InputError: There is not one choice per node, or a choice is out of range.
    """
    if len(choices) != len(problem.costs):
        raise InputError(
            f"{len(choices)} choices were given for {len(problem.costs)} nodes",
            fix="give one strategy index per node",
        )
    for node, choice in enumerate(choices):
        if not 0 <= choice < len(problem.costs[node]):
            raise InputError(
                f"strategy {choice} does not exist",
                at=problem.name(node),
                fix=f"choose from 0 to {len(problem.costs[node]) - 1}",
            )
    paid = [int(cost[choice]) for cost, choice in zip(problem.costs, choices, strict=True)]
    paid += [
        int(matrix[choices[i], choices[j]])
        for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True)
    ]
    forbidden = any(value >= FORBIDDEN for value in paid)
    times, usage = usage_over_time(
        problem, [int(use[choice]) for use, choice in zip(problem.usages, choices, strict=True)]
    )
    peak = int(usage.argmax())
    fits = problem.usage_limit is None or int(usage[peak]) <= problem.usage_limit
    return Evaluation(
        cost=FORBIDDEN if forbidden else sum(paid),
        peak_usage=int(usage[peak]),
        peak_time=int(times[peak]),
        feasible=fits and not forbidden,
    )


def usage_over_time(
    problem: Problem, usages: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Total usage at every time point where it can change.

    Args:
        problem: Gives the live intervals.
        usages: Per node, what it uses while it lives [bytes].

    Returns:
        Time points, ascending, int64 ``[T]`` with T >= 1; the usage from each on [bytes], ``[T]``.
    """
    starts, ends = problem.intervals[:, 0], problem.intervals[:, 1]
    live = starts < ends
    if not live.any():
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    times = np.unique(np.concatenate([starts[live], ends[live]]))
    change = np.zeros(len(times), np.int64)
    amounts = np.asarray(usages, np.int64)[live]
    np.add.at(change, np.searchsorted(times, starts[live]), amounts)
    np.subtract.at(change, np.searchsorted(times, ends[live]), amounts)
    return times, np.cumsum(change)


def validate_problem(problem: Problem) -> None:
    """Check that all the parts of a problem fit together.

    Args:
        problem: The problem.

    Raises:
        InputError: A shape, index, dtype or sum does not fit; the message names the node or edge.
    """
    count = len(problem.costs)
    _check(
        len(problem.usages) == count,
        f"{len(problem.usages)} usage rows for {count} nodes",
        fix="give one usage vector per node",
    )
    _check(
        problem.intervals.shape == (count, 2),
        f"intervals have shape {problem.intervals.shape} for {count} nodes",
        fix=f"give an int64 array of shape ({count}, 2)",
    )
    _check(
        len(problem.names) in (0, count),
        f"{len(problem.names)} names for {count} nodes",
        fix="give one name per node, or none",
    )
    whole = np.dtype(np.int64)
    for node, (cost, usage) in enumerate(zip(problem.costs, problem.usages, strict=True)):
        if cost.ndim != 1 or not len(cost) or usage.shape != cost.shape:
            raise _misfit(cost, usage, at=problem.name(node))
        if cost.dtype != whole or usage.dtype != whole:
            _check_dtypes(cost, usage, at=problem.name(node))
    if count:
        at = np.cumsum([0, *map(len, problem.costs[:-1])])
        lowest = np.minimum.reduceat(np.concatenate(problem.costs), at)
        _check_size(lowest, at=problem.name(int(lowest.argmin())))
        usages = np.concatenate(problem.usages)
        most, least = np.maximum.reduceat(usages, at), np.minimum.reduceat(usages, at)
        used = sum(max(high, -low) for high, low in zip(most.tolist(), least.tolist(), strict=True))
        _check(
            used < 2**62,
            f"usages add up to {used}, which does not fit 64 bits",
            fix="count usages in a larger unit",
        )
    _check_edges(problem)
    late = max(map(abs, problem.intervals.ravel().tolist()), default=0)
    _check(
        late < 2**62,
        f"a time point of {late} does not fit 64 bits",
        fix="number time points from 0 on",
    )
    limit = problem.usage_limit
    _check(
        limit is None or abs(limit) < 2**62,
        f"a usage limit of {limit} does not fit 64 bits",
        fix="give a smaller one, or none",
    )


def load_problem(path: str | Path) -> Problem:
    """Read a problem in the contest's JSON form, plain or gzipped.

    Equal edge matrices become one shared array, which solvers use to do work once. Costs above
    ``FORBIDDEN`` are read as ``FORBIDDEN``.

    Args:
        path: A ``.json`` or ``.json.gz`` file.

    Returns:
        The problem.

    Raises:
        InputError: The file is no such JSON, holds numbers that are not whole, or does not fit
            together.

    Source:
        Form: repository google/iopddl, README.md ("Input Format").
    """
    data = read_json(path, fix=_FORM)
    try:
        problem = _problem(_part(data, "problem", "the file"))
        validate_problem(problem)
    except InputError as error:
        at = f"{path}: {error.at}" if error.at else str(path)
        raise InputError(
            f"not a problem in the contest's JSON form: {error.problem}", at=at, fix=error.fix
        ) from error
    return problem


def _problem(data: Any) -> Problem:
    nodes, edges = _part(data, "nodes", "problem"), _part(data, "edges", "problem")
    costs = _vectors(nodes, "costs", cap=FORBIDDEN)
    pairs = whole_pairs(_part(edges, "nodes", "problem.edges"), "problem.edges.nodes")
    rows = _list(edges, "costs", "problem.edges")
    if len(rows) != len(pairs):
        raise InputError(f"{len(rows)} edge matrices for {len(pairs)} edges", fix=_FORM)
    shared: dict[tuple[int, int, bytes], NDArray[np.int64]] = {}
    matrices = []
    for number, ((i, j), row) in enumerate(zip(pairs.tolist(), rows, strict=True)):
        where = f"problem.edges.costs[{number}]"
        if not (0 <= i < len(costs) and 0 <= j < len(costs)):
            raise InputError(
                f"edge ({i}, {j}): there are {len(costs)} nodes only",
                at=f"problem.edges.nodes[{number}]",
                fix=f"number nodes from 0 to {len(costs) - 1}",
            )
        flat = whole_numbers(row, where, cap=FORBIDDEN)
        shape = len(costs[i]), len(costs[j])
        if len(flat) != shape[0] * shape[1]:
            raise InputError(
                f"{where} has {len(flat)} entries for {shape[0]} x {shape[1]} strategies", fix=_FORM
            )
        key = (*shape, flat.tobytes())
        if key not in shared:
            shared[key] = flat.reshape(shape)
        matrices.append(shared[key])
    limit = data.get("usage_limit")
    if limit is not None and type(limit) is not int:
        raise not_numbers(limit, "problem.usage_limit")
    times = _part(nodes, "intervals", "problem.nodes")
    names = nodes.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"problem.nodes.names is {shown(names)}, not a list of names", fix=_FORM)
    return Problem(
        costs=costs,
        usages=_vectors(nodes, "usages"),
        intervals=whole_pairs(times, "problem.nodes.intervals"),
        edges=pairs,
        edge_costs=tuple(matrices),
        usage_limit=limit,
        names=tuple(names),
    )


def _part(data: Any, key: str, where: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(f"{where} is {shown(data)}, not an object", fix=_FORM)
    if key not in data:
        raise InputError(f"{where} has no {key!r}", fix=_FORM)
    return data[key]


def _list(data: Any, key: str, where: str) -> list[Any]:
    rows = _part(data, key, where)
    if not isinstance(rows, list):
        raise InputError(f"{where}.{key} is {shown(rows)}, not a list", fix=_FORM)
    return rows


def _vectors(nodes: Any, key: str, cap: int | None = None) -> tuple[NDArray[np.int64], ...]:
    where = f"problem.nodes.{key}"
    rows = _list(nodes, key, "problem.nodes")
    return tuple(whole_numbers(row, f"{where}[{n}]", cap=cap) for n, row in enumerate(rows))


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem in the contest's JSON form; equal problems give equal bytes.

    Args:
        problem: The problem.
        path: Where to; gzipped if it ends in ``.gz``.
    """
    path = Path(path)
    nodes: dict[str, object] = {
        "intervals": problem.intervals.tolist(),
        "costs": [cost.tolist() for cost in problem.costs],
        "usages": [usage.tolist() for usage in problem.usages],
    }
    if problem.names:
        nodes["names"] = list(problem.names)
    flat: dict[int, list[int]] = {}
    for matrix in problem.edge_costs:
        if id(matrix) not in flat:
            flat[id(matrix)] = matrix.ravel().tolist()
    data: dict[str, object] = {
        "name": path.name.removesuffix(".gz").removesuffix(".json"),
        "nodes": nodes,
        "edges": {
            "nodes": problem.edges.tolist(),
            "costs": [flat[id(matrix)] for matrix in problem.edge_costs],
        },
    }
    if problem.usage_limit is not None:
        data["usage_limit"] = problem.usage_limit
    text = json.dumps({"problem": data}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _check(holds: bool, problem: str, *, fix: str, at: str = "") -> None:
    if not holds:
        raise InputError(problem, at=at, fix=fix)


def _check_dtypes(*arrays: NDArray[np.int64], at: str) -> None:
    for array in arrays:
        if array.dtype != np.int64:
            raise InputError(
                f"numbers are {array.dtype}",
                at=at,
                fix="round to whole units and convert with .astype(np.int64)",
            )


def _check_size(costs: NDArray[np.int64], *, at: str) -> None:
    least = int(costs.min(initial=0))
    if least <= -FORBIDDEN:
        raise InputError(
            f"a cost of {least} is too far below zero", at=at, fix="count costs in a larger unit"
        )


def _misfit(cost: NDArray[np.int64], usage: NDArray[np.int64], *, at: str) -> InputError:
    """What is wrong with the shapes of a node's vectors."""
    if cost.ndim != 1 or not len(cost):
        return InputError(
            f"costs have shape {cost.shape}",
            at=at,
            fix="give each node a vector with at least one strategy",
        )
    return InputError(
        f"usages have shape {usage.shape}, costs {cost.shape}",
        at=at,
        fix="give one usage per strategy",
    )


def _check_edges(problem: Problem) -> None:
    count, edges = len(problem.costs), problem.edges
    _check(
        edges.ndim == 2 and edges.shape[1] == 2 and len(edges) == len(problem.edge_costs),
        f"edges have shape {edges.shape} for {len(problem.edge_costs)} edge matrices",
        fix="give an int64 array of shape (E, 2), with E matrices",
    )
    sizes = [len(cost) for cost in problem.costs]
    seen: set[int] = set()
    for (i, j), matrix in zip(edges.tolist(), problem.edge_costs, strict=True):
        if not (0 <= i < count and 0 <= j < count):
            raise InputError(
                f"there are {count} nodes only",
                at=f"edge ({i}, {j})",
                fix=f"number nodes from 0 to {count - 1}",
            )
        if matrix.shape != (sizes[i], sizes[j]):
            raise InputError(
                f"the matrix has shape {matrix.shape}, the strategies {(sizes[i], sizes[j])}",
                at=f"edge ({i}, {j})",
                fix="give one row per strategy of the first node, one column per one of the second",
            )
        if id(matrix) not in seen:
            seen.add(id(matrix))
            _check_dtypes(matrix, at=f"edge ({i}, {j})")
            _check_size(matrix, at=f"edge ({i}, {j})")
