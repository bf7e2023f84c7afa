"""Where values are read, and where a reshard for a reader happens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.graph import Graph, Op
from autoshard.reads import Read, reads
from tests.lowering import graph_of
from tests.zoo import PROGRAMS

X, W = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)


def only(graph: Graph, kind: str) -> Op:
    (op,) = (op for op in graph.ops if op.kind == kind)
    return op


def of(graph: Graph, op: Op) -> list[Read]:
    return [r for r in reads(graph) if r.op == op.index and not r.returned]


def test_every_operand_result_and_returned_value_is_read_once_in_program_order() -> None:
    program = PROGRAMS["nested_scans"]
    graph = graph_of(program.fn, *program.values())
    found = reads(graph)
    expected = sum(len(op.operands) + sum(map(len, op.returned)) for op in graph.ops)
    assert len(found) == len({(r.op, r.position, r.returned, r.block) for r in found})
    assert len(found) == expected + len(graph.results)
    assert [r.op for r in found[-len(graph.results) :]] == [len(graph.ops)] * len(graph.results)


def test_what_a_loop_changes_is_resharded_in_each_of_its_rounds() -> None:
    graph = graph_of(lambda x, w: lax.fori_loop(0, 5, lambda _, c: jnp.sin(c) @ w, x), X, W)
    loop, sine = only(graph, "while"), only(graph, "sine")
    (read,) = of(graph, sine)
    assert (read.block, read.trips, read.origin) == ((loop.index, 1), 5, read.value)


def test_what_a_loop_carries_unchanged_is_resharded_once_before_it() -> None:
    graph = graph_of(lambda x, w: lax.fori_loop(0, 5, lambda _, c: c @ w, x), X, W)
    read = next(r for r in of(graph, only(graph, "dot_general")) if r.position == 1)
    assert (read.block, read.trips, read.origin) == ((-1, 0), 1, graph.arguments[1])


def test_through_nested_loops_it_is_resharded_before_the_outermost() -> None:
    def fn(x: Any, w: Any) -> Any:
        inner = lambda _, c: c @ w  # noqa: E731
        return lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 5, inner, c), x)

    graph = graph_of(fn, X, W)
    left, right = of(graph, only(graph, "dot_general"))
    assert (left.trips, right.trips) == (15, 1)
    assert right.block == (-1, 0)


def test_a_branch_reshards_for_itself() -> None:
    def fn(x: Any, w: Any, flag: Any) -> Any:
        return lax.fori_loop(0, 5, lambda _, c: lax.cond(flag, lambda c: c @ w, jnp.sin, c), x)

    graph = graph_of(fn, X, W, np.bool_(True))
    branch = only(graph, "case")
    right = of(graph, only(graph, "dot_general"))[1]
    assert (right.block[0], right.trips) == (branch.index, 5)
