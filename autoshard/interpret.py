"""A solver's choices in a user's words: the plan they mean, every total recomputed from them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.branches import Block, uncounted, weigh
from autoshard.cost_models.protocol import (
    CollectiveKind,
    CostModel,
    MeshAxis,
    emitted,
    wire_bytes,
)
from autoshard.graph import Graph, Op
from autoshard.local import Decisions
from autoshard.localize import localize
from autoshard.memory import Footprint, footprint
from autoshard.moves import Moves, moves_of, value_name
from autoshard.plan import Plan
from autoshard.plan_parts import (
    BoundaryPlan,
    MemoryHolder,
    MemoryPoint,
    OpPlan,
    PlannedCollective,
    Predicted,
    SolverReport,
)
from autoshard.pricing import Node, Priced
from autoshard.program import MANUAL, Boundary
from autoshard.reassociated import reassociated
from autoshard.reshard import layouts
from autoshard.shardings import (
    MeshShape,
    Sharding,
    local_bytes,
    loosened,
    replicated,
    splitting,
)
from autoshard.timeline import timeline_of
from autoshard.twins import FINDS_TWINS, Twins, twins_of
from autoshard.uneven import Uneven, uneven_of
from autoshard.work import is_product, matmul_sizes, partial_bytes, work_of


def interpret(
    graph: Graph, priced: Priced, mesh: MeshShape, model: CostModel, choices: Sequence[int]
) -> tuple[Plan, Footprint]:
    """Turn one choice per node into a plan and what it holds; totals come from the choices."""
    sharding = _value_shardings(graph, priced, mesh, choices)
    ops = tuple(
        plan
        for op in graph.ops
        if (plan := _op_plan(graph, priced, mesh, model, choices, op, sharding)) is not None
    )
    by_index = {op.index: op for op in ops}
    twins = twins_of(graph, by_index, sharding) if model.compiler in FINDS_TWINS else Twins()
    run = [op for op in ops if op.index not in twins.ops and op.index not in twins.partial]
    products = {
        op.index: op.flops * op.trips for op in run if _is_product(graph, priced, mesh, choices, op)
    }
    final = _result_shardings(graph, mesh, sharding)
    moves = moves_of(graph, priced.resharder, ops, sharding, final)
    joined = reassociated(graph, by_index) if model.compiler == "tpu" else frozenset()
    placed = [
        *_reductions(graph, priced, mesh, model, choices, joined),
        *_written(graph, priced),
        *moves.collectives,
    ]
    sent = ((b, wire_bytes(c.kind, c.nbytes, c.devices) * c.trips) for b, c in placed)
    left_out = uncounted(graph, weigh(graph, products, sent))
    collectives = tuple(replace(c, trips=0) if b in left_out else c for b, c in placed)
    counted = [
        op for op in run if (graph.ops[op.index].parent, graph.ops[op.index].region) not in left_out
    ]
    decisions = Decisions(
        ops=by_index,
        arguments=tuple(sharding[v] for v in graph.arguments),
        results=final,
        chains={(r.value, r.chain[-1]): r.chain for r in moves.reshards},
        twins=twins.ops,
    )
    local = localize(graph, mesh, decisions)
    memory = footprint(graph, local, model.compiler)
    slices = [moved for moved in moves.slices if moved.block not in left_out]
    compute_s = sum(op.seconds * op.trips for op in counted)
    compute_s += sum(moved.seconds for moved in slices)
    communication_s = sum(c.seconds * c.trips for c in collectives)
    timeline = timeline_of(
        graph, local, mesh, model, ops=counted, collectives=collectives, slices=slices
    )
    # Sums in another order differ in their last digits.
    exposed_s = min(communication_s, max(0.0, timeline.seconds - compute_s))
    found = Plan(
        mesh=mesh,
        cost_model=model.name,
        arguments=_boundaries(
            graph,
            mesh,
            graph.arguments,
            graph.argument_info,
            [sharding[v] for v in graph.arguments],
        ),
        results=_boundaries(graph, mesh, graph.results, graph.result_info, final),
        ops=ops,
        reshards=moves.reshards,
        collectives=collectives,
        predicted=Predicted(
            flops=sum(products.get(op.index, 0.0) for op in counted),
            hbm_bytes=sum(op.hbm_bytes * op.trips for op in counted),
            collective_bytes=sum(
                wire_bytes(c.kind, c.nbytes, c.devices) * c.trips for c in collectives
            ),
            peak_bytes=memory.peak_bytes,
            compute_s=compute_s,
            communication_s=communication_s,
            dispatch_s=model.dispatch_s,
            step_s=compute_s + exposed_s + model.dispatch_s,
            exposed_s=exposed_s,
        ),
        timeline=timeline.events,
        memory=tuple(MemoryPoint(op, b) for op, b in memory.timeline),
        holders=tuple(MemoryHolder(n, b) for n, b in memory.holders),
        uncounted_loops=tuple(
            graph.ops[i].source or f"{graph.ops[i].kind} #{i}" for i in graph.unknown_trips
        ),
        uneven=_uneven(graph, priced, mesh, ops, sharding, final, moves),
        solver=SolverReport("", "", 0.0, 0.0, 0, 0, 0.0),
        memory_limit=None,
        planning_s=0.0,
        signature=graph.signature(),
        fingerprint=hashlib.sha256(f"{graph.fingerprint()} {mesh}".encode()).hexdigest(),
    )
    return found, memory


def _uneven(
    graph: Graph,
    priced: Priced,
    mesh: MeshShape,
    ops: Sequence[OpPlan],
    sharding: dict[int, Sharding],
    final: tuple[Sharding, ...],
    moves: Moves,
) -> Uneven:
    """What the plan splits unevenly, and what it leaves whole because the mesh does not divide."""
    flops = {}
    for op in ops:
        ways = mesh.size(axis for _, axes in op.factors for axis in axes)
        flops[op.index] = op.flops * op.trips, graph.ops[op.index].flops / ways * op.trips
    return uneven_of(
        graph,
        mesh,
        arguments=[sharding[v] for v in graph.arguments],
        results=final,
        made=sharding,
        stored=priced.fusion.materialized,
        copies=[(r.value, target) for r in moves.reshards for target in r.chain],
        flops=flops,
        name=lambda value: value_name(graph, value),
    )


def _is_product(
    graph: Graph, priced: Priced, mesh: MeshShape, choices: Sequence[int], plan: OpPlan
) -> bool:
    """Whether XLA runs an op as a product, or it is a ``shard_map``, which may have some."""
    if plan.name == MANUAL:
        return True
    op = graph.ops[plan.index]
    number = _op_node(priced, op)
    strategies = None if number is None else priced.nodes[number].strategies
    sizes = None if strategies is None else matmul_sizes(op, strategies, mesh)
    return is_product(op.name, sizes, 0 if number is None else choices[number])


def _value_shardings(
    graph: Graph, priced: Priced, mesh: MeshShape, choices: Sequence[int]
) -> dict[int, Sharding]:
    """Sharding of every value that has one; free values have none of their own."""
    found = {}
    for tensor in graph.values:
        number, position = priced.maker[tensor.id]
        if number >= 0:
            table = layouts(len(tensor.shape), mesh)
            ids = priced.nodes[number].layouts[position]
            found[tensor.id] = table.shardings[int(ids[choices[number]])]
    return found


def _op_plan(
    graph: Graph,
    priced: Priced,
    mesh: MeshShape,
    model: CostModel,
    choices: Sequence[int],
    op: Op,
    sharding: dict[int, Sharding],
) -> OpPlan | None:
    """The plan of one op; None for free ones, which take any sharding."""
    if op.results and all(graph.values[v].free for v in op.results):
        return None
    shapes = tuple(f"{t.dtype}{list(t.shape)}" for t in (graph.values[v] for v in op.results))
    results = tuple(sharding[v] for v in op.results)
    node_number = _op_node(priced, op)
    if node_number is None:
        wanted = (
            results
            if op.name == "stablehlo.while" or op.is_alias
            else tuple(replicated(len(graph.values[v].shape)) for v in op.operands)
        )
        return OpPlan(
            index=op.index,
            name=op.name,
            source=op.source,
            shapes=shapes,
            factors=(),
            operands=wanted,
            results=results,
            partial=None,
            reduced=(),
            piecewise=False,
            trips=op.trips,
            flops=0.0,
            hbm_bytes=0.0,
            compute_s=0.0,
            hbm_s=0.0,
            seconds=0.0,
            reduce_s=0.0,
            nbytes=0,
        )
    node, choice = priced.nodes[node_number], choices[node_number]
    strategies = node.strategies
    assert strategies is not None
    work = work_of(graph, op, strategies, priced.fusion, mesh)
    operands = tuple(
        layouts(len(graph.values[v].shape), mesh).shardings[int(ids[choice])]
        for v, ids in zip(op.operands, strategies.operands, strict=True)
    )
    axes = strategies.factor_axes[choice]
    sizes = op.rule.sizes if op.rule is not None else ()
    factors = tuple((f"{_letter(f)}={sizes[f]}", a) for f, a in enumerate(axes) if a)
    reduced = strategies.reduced[choice]
    partial = None
    if strategies.scattered[choice]:
        gone = set(reduced[0])
        partial = tuple(tuple(a for a in d if a not in gone) for d in results[0])
    body = priced.bodies.get(op.index)
    return OpPlan(
        index=op.index,
        name=op.name,
        source=op.source,
        shapes=shapes,
        factors=factors,
        operands=operands,
        results=results,
        partial=partial,
        reduced=reduced,
        piecewise=op.piecewise and bool(factors),
        trips=op.trips,
        flops=float(work.flops[choice]) if body is None else body.flops,
        hbm_bytes=float(work.hbm_bytes[choice]) if body is None else body.hbm_bytes,
        compute_s=float(model.compute_s(work)[choice]) if body is None else body.compute_s,
        hbm_s=float(model.hbm_s(work)[choice]) if body is None else body.hbm_s,
        seconds=float(node.seconds[choice]),
        reduce_s=float(node.reduce_s[choice]),
        nbytes=sum(
            local_bytes(graph.values[v].shape, graph.values[v].nbytes, s, mesh)
            for v, s in zip(op.results, results, strict=True)
            if priced.fusion.materialized[v]
        ),
    )


def _letter(factor: int) -> str:
    """Factors are named as Shardy prints them: i, j, k and so on."""
    return chr(ord("i") + factor) if factor < 18 else f"z_{factor - 17}"


def _op_node(priced: Priced, op: Op) -> int | None:
    if not op.results:
        return next((n for n, node in enumerate(priced.nodes) if _is_node_of(node, op)), None)
    number, _ = priced.maker[op.results[0]]
    return number if number >= 0 and _is_node_of(priced.nodes[number], op) else None


def _is_node_of(node: Node, op: Op) -> bool:
    return node.kind == "op" and node.op == op.index


def _result_shardings(
    graph: Graph, mesh: MeshShape, sharding: dict[int, Sharding]
) -> tuple[Sharding, ...]:
    tied = {r: graph.arguments[a] for a, r in graph.ties}
    final = []
    for r, value in enumerate(graph.results):
        pin = graph.result_info[r].pin
        if r in tied:
            final.append(sharding[tied[r]])
        elif pin is not None:
            final.append(splitting(pin, mesh))
        else:
            shape = graph.values[value].shape
            made = sharding.get(value, replicated(len(shape)))
            final.append(loosened(shape, made, mesh))  # a result is never padded
    return tuple(final)


def _reductions(
    graph: Graph,
    priced: Priced,
    mesh: MeshShape,
    model: CostModel,
    choices: Sequence[int],
    joined: frozenset[int],
) -> list[tuple[Block, PlannedCollective]]:
    """What completes partial results, but for those that are added to another's first."""
    found = []
    for number, node in enumerate(priced.nodes):
        strategies, choice = node.strategies, choices[number]
        if strategies is None or not strategies.reduced[choice] or node.op in joined:
            continue
        op = graph.ops[node.op]
        kind: CollectiveKind = "reduce_scatter" if strategies.scattered[choice] else "all_reduce"
        for result, axes in itertools.product(range(len(op.results)), strategies.reduced[choice]):
            partial = partial_bytes(graph, op, strategies, mesh, model.compiler, result)
            size = float(partial[choice])
            named = tuple(MeshAxis(a, mesh.size((a,))) for a in axes)
            made = emitted(model, kind, named)
            collective = PlannedCollective(
                kind=made,
                axes=axes,
                devices=mesh.size(axes),
                nbytes=size,
                trips=op.trips,
                seconds=float(model.collective_s(made, np.array([size]), named)[0]),
                op=op.index,
                value=op.results[result],
                dtype=graph.values[op.results[result]].dtype,
                why=f"partial results of {op.kind} #{op.index}",
                source=op.source,
            )
            found.append(((op.parent, op.region), collective))
    return found


def _written(graph: Graph, priced: Priced) -> list[tuple[Block, PlannedCollective]]:
    """The collectives that the program contains itself, in the bodies of its ``shard_map``s."""
    found = []
    for index, cost in priced.bodies.items():
        op = graph.ops[index]
        for sent in cost.collectives:
            written = sent.op.collective
            assert written is not None
            collective = PlannedCollective(
                kind=written.kind,
                axes=written.axes,
                devices=written.devices,
                nbytes=sent.nbytes,
                trips=sent.trips * op.trips,
                seconds=sent.seconds,
                op=index,
                value=op.results[0] if op.results else op.operands[0],
                dtype=sent.dtype,
                why=f"written in the shard_map #{index}",
                source=sent.op.source,
            )
            found.append(((op.parent, op.region), collective))
    return found


def _boundaries(
    graph: Graph,
    mesh: MeshShape,
    values: Sequence[int],
    known: Sequence[Boundary],
    shardings: Sequence[Sharding],
) -> tuple[BoundaryPlan, ...]:
    rows = []
    for value, info, sharding in zip(values, known, shardings, strict=True):
        tensor = graph.values[value]
        rows.append(
            BoundaryPlan(
                info.name,
                tensor.shape,
                tensor.dtype,
                sharding,
                local_bytes(tensor.shape, tensor.nbytes, sharding, mesh),
                info.donated,
                info.pin is not None and not info.required,
            )
        )
    return tuple(rows)
