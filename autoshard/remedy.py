"""The cheapest plan without a collective: solved anew with that reduction or reshard forbidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.diff import Change, diff
from autoshard.errors import InfeasibleError
from autoshard.graph import Graph
from autoshard.plan import Plan
from autoshard.plan_parts import PlannedCollective, ReshardPlan
from autoshard.program import MANUAL
from autoshard.replan import Mask, Replanner
from autoshard.reshard import layouts
from autoshard.shardings import MeshShape, Sharding

REDUCTIONS = ("all_reduce", "reduce_scatter")
"""Collectives that combine partial results; all others move a value."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Remedy:
    """The cheapest plan without a collective.

    Attributes:
        step_s: Predicted time of a call [s].
        step_delta_s: That less the present plan's [s].
        peak_bytes: Predicted peak of memory [bytes].
        peak_delta_bytes: That less the present plan's [bytes].
        status: What the solver proved.
        changes: What it shards differently; arguments and results first.
        instead: Collectives that it asks for and the present plan does not.
    """

    step_s: float
    step_delta_s: float
    peak_bytes: int
    peak_delta_bytes: int
    status: str
    changes: tuple[Change, ...]
    instead: tuple[PlannedCollective, ...]


def move_of(plan: Plan, c: PlannedCollective) -> ReshardPlan | None:
    """The reshard that a collective is a step of."""
    return next((r for r in plan.reshards if r.value == c.value and r.reader == c.op), None)


def is_written(graph: Graph, plan: Plan, c: PlannedCollective) -> bool:
    """Whether the program contains a collective itself, inside a ``shard_map``."""
    inside = c.op < len(graph.ops) and graph.ops[c.op].name == MANUAL
    return inside and (c.kind in REDUCTIONS or move_of(plan, c) is None)


def without(
    replanner: Replanner, planned: Sequence[PlannedCollective]
) -> tuple[Remedy | None, str]:
    """The cheapest plan in which some collectives are forbidden, or why there is none."""
    plan = replanner.plan
    if any(is_written(replanner.graph, plan, c) for c in planned):
        return None, "cannot be avoided: the program asks for it itself, inside a shard_map"
    allowed: dict[int, Mask] = {}
    apart: dict[int, Mask] = {}
    for c in planned:
        if c.kind in REDUCTIONS:
            _forbid_reduction(replanner, c, allowed)
            if not any(mask.any() for mask in allowed.values()):
                return None, "cannot be avoided: there is no other way to run the op"
        else:
            _forbid_moves(replanner, c, allowed, apart)
    try:
        other = replanner.again(allowed, apart)
    except InfeasibleError as error:
        return None, f"cannot be avoided: {error.problem}"
    if any(_is_there(c, other) for c in planned):
        return None, "cannot be avoided: the value is moved for another reader then"
    now, then = plan.predicted, other.predicted
    found = diff(plan, other)
    return (
        Remedy(
            then.step_s,
            then.step_s - now.step_s,
            then.peak_bytes,
            then.peak_bytes - now.peak_bytes,
            other.solver.status,
            tuple(sorted(found.changes, key=lambda change: change.kind == "op")),
            found.gained,
        ),
        "",
    )


def _is_there(c: PlannedCollective, plan: Plan) -> bool:
    return any(
        (d.value, d.op, d.kind in REDUCTIONS) == (c.value, c.op, c.kind in REDUCTIONS)
        for d in plan.collectives
        if d.trips
    )


def _forbid_reduction(replanner: Replanner, c: PlannedCollective, allowed: dict[int, Mask]) -> None:
    number, _ = replanner.priced.maker[c.value]
    strategies = replanner.priced.nodes[number].strategies
    assert strategies is not None
    _and(allowed, number, np.array([not groups for groups in strategies.reduced]))


def _forbid_moves(
    replanner: Replanner,
    c: PlannedCollective,
    allowed: dict[int, Mask],
    apart: dict[int, Mask],
) -> None:
    """Let the readers that a reshard serves take the value as it is made, or a slice of it."""
    plan, graph, priced = replanner.plan, replanner.graph, replanner.priced
    mesh = plan.mesh
    move = move_of(plan, c)
    assert move is not None
    block = move.block
    readers = {r.reader for r in plan.reshards if r.value == c.value and r.block == block}
    if len(graph.ops) in readers:
        _forbid_at_the_end(replanner, c.value, allowed)
    for edge, ((i, j), (value, wanted)) in enumerate(
        zip(priced.problem.edges.tolist(), priced.moved, strict=True)
    ):
        node = priced.nodes[j]
        tied = node.kind == "argument" and len(graph.ops) in readers
        if value == c.value and (node.op in readers or node.kind == "hub" or tied):
            number, position = priced.maker[value]
            made = priced.nodes[i].layouts[position if i == number else 0]
            shape = graph.values[value].shape
            _and(apart, edge, quiet(made, wanted, shape, mesh))


def _forbid_at_the_end(replanner: Replanner, value: int, allowed: dict[int, Mask]) -> None:
    """Have a result made in the sharding it is given back in, or in one that is cut to it."""
    plan, graph, priced = replanner.plan, replanner.graph, replanner.priced
    tied = {r for _, r in graph.ties}
    for position, result in enumerate(graph.results):
        if result != value or position in tied:
            continue
        number, place = priced.maker[value]
        made = priced.nodes[number].layouts[place]
        shape = graph.values[value].shape
        table = layouts(len(shape), plan.mesh)
        if graph.result_info[position].pin is None:  # only padding is taken off at the end
            _and(allowed, number, table.dividing(shape)[made])
        else:
            pin = np.array([table.index[plan.results[position].sharding]])
            _and(allowed, number, quiet(made, pin, shape, plan.mesh)[:, 0])


def quiet(made: Ids, wanted: Ids, shape: tuple[int, ...], mesh: MeshShape) -> Mask:
    """Which pairs of layouts need no communication: the wanted is cut from the made, ``[M, W]``."""
    table = layouts(len(shape), mesh)
    rows, back_rows = np.unique(made, return_inverse=True)
    columns, back_columns = np.unique(wanted, return_inverse=True)
    small = np.array(
        [
            [_is_cut(table.shardings[i], table.shardings[j]) for j in columns.tolist()]
            for i in rows.tolist()
        ],
        np.bool_,
    ).reshape(len(rows), len(columns))
    i, j = (side.ravel() for side in np.meshgrid(rows, columns, indexing="ij"))
    small &= table.nested(shape, i, j).reshape(small.shape)
    return small[back_rows][:, back_columns]


def _is_cut(made: Sharding, wanted: Sharding) -> bool:
    return all(w[: len(m)] == m for m, w in zip(made, wanted, strict=True))


def _and(masks: dict[int, Mask], key: int, mask: Mask) -> None:
    masks[key] = masks[key] & mask if key in masks else mask
