"""What XLA:CPU finds to be one behind optimization barriers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.cost_models.compiled import read_compiled
from autoshard.graph import Graph
from autoshard.twins import FINDS_TWINS
from tests.lowering import graph_of

X, W = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)


def equals(graph: Graph, kind: str) -> list[bool]:
    """Of each op of a kind, whether an earlier one computes the same."""
    values = [graph.values[op.results[0]] for op in graph.ops if op.kind == kind]
    return [value.same != value.id for value in values]


def again(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    behind, weights = lax.optimization_barrier((x, w))
    return y + jnp.tanh(behind @ weights)


def test_ops_behind_a_barrier_are_equal_to_those_before_it() -> None:
    graph = graph_of(again, X, W)
    assert equals(graph, "dot_general") == [False, True]
    assert equals(graph, "tanh") == [False, True]
    compiled = read_compiled(jax.jit(again).lower(X, W).compile())
    once = 2 * 16 * 32 * 32
    assert compiled.flops == (once if "cpu" in FINDS_TWINS else 2 * once)


def test_other_operands_or_attributes_make_other_values() -> None:
    def fn(x: Any, w: Any) -> Any:
        behind, weights = lax.optimization_barrier((x, w))
        a, b = x[:8] @ w, behind[8:] @ weights
        return a + b, behind * 2, x * 3

    graph = graph_of(fn, X, W)
    assert not any(equals(graph, "dot_general"))
    assert not any(equals(graph, "slice"))
    assert not any(equals(graph, "multiply"))


def test_without_a_barrier_every_value_is_its_own() -> None:
    graph = graph_of(lambda x, w: jnp.tanh(x @ w), X, W)
    assert all(value.same == value.id for value in graph.values)


def test_calls_may_do_what_nobody_sees_and_stay_two() -> None:
    def fn(x: Any) -> Any:
        behind = lax.optimization_barrier(x)
        shape = jax.ShapeDtypeStruct((), np.float32)
        return [jax.pure_callback(lambda s: s, shape, v[0, 0]) for v in (x, behind)]

    assert not any(equals(graph_of(fn, X), "custom_call"))
