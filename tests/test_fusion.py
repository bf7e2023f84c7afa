"""The fusion model of the unsharded program: what is written, when, and how often it is held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.fusion import fuse
from autoshard.graph import Graph
from tests.lowering import graph_of

X = np.ones((64, 64), np.float32)


def made_by(graph: Graph, kind: str) -> int:
    (value,) = (op.results[0] for op in graph.ops if op.kind == kind)
    return value


def test_fused_values_are_not_written_and_never_held() -> None:
    graph = graph_of(lambda x: jnp.abs(x) + jnp.sign(x @ x), X)
    fusion = fuse(graph, "cpu")
    for kind, written in (("abs", False), ("sign", False), ("dot_general", True), ("add", True)):
        value = made_by(graph, kind)
        assert fusion.materialized[value] is written
        assert (fusion.spans[value] != (0, 0)) is written
        assert (fusion.copies[value] > 0) is written


def test_arguments_are_held_from_the_first_step_to_the_last() -> None:
    graph = graph_of(lambda x: jnp.sin(x @ x) @ x, X)
    fusion = fuse(graph, "tpu")
    assert fusion.spans[graph.arguments[0]] == (0, fusion.steps)
    assert fusion.copies[graph.arguments[0]] == 1


def test_operands_that_a_product_copies_count_for_the_time_of_the_copy() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.einsum("bshd,bthd->bhst", x, x)

    graph = graph_of(fn, np.ones((2, 8, 4, 16), np.float32))
    argument = graph.arguments[0]
    assert fuse(graph, "cpu").copies[argument] > 1
    assert fuse(graph, "gpu").copies[argument] == 1


def test_a_value_that_a_loop_reads_is_held_until_the_loop_ends() -> None:
    def fn(x: jax.Array) -> Any:
        w = x @ x
        return lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x)

    graph = graph_of(fn, X)
    fusion = fuse(graph, "cpu")
    outside = graph.ops[next(op.index for op in graph.ops if op.kind == "dot_general")].results[0]
    inside = made_by(graph, "tanh")
    assert fusion.spans[outside][1] >= fusion.spans[inside][1]


def test_free_values_and_views_are_never_written() -> None:
    graph = graph_of(lambda x: ((x + 2.0) @ x).reshape(-1), X)
    fusion = fuse(graph, "cpu")
    assert not any(fusion.materialized[t.id] for t in graph.values if t.free)
    assert not fusion.materialized[made_by(graph, "reshape")]
