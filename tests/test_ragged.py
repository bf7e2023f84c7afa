"""Products of groups of rows: how they may be split, and what they cost."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.lax import RaggedDotDimensionNumbers

from autoshard.extract import extract
from autoshard.graph import Graph, Op
from autoshard.program import normalize
from autoshard.reshard import layouts
from autoshard.shardings import Sharding
from autoshard.strategies import Enumerator
from autoshard.work import matmul_sizes
from tests.lowering import MESH, boundaries, module_of

ROWS, IN, OUT, GROUPS = 64, 16, 32, 8
X = np.ones((ROWS, IN), np.float32)
W = np.ones((GROUPS, IN, OUT), np.float32)
Y = np.ones((ROWS, OUT), np.float32)
SIZES = np.full(GROUPS, ROWS // GROUPS, np.int32)


def forward(x: Any, w: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(x, w, sizes)


def gradient(x: Any, y: Any, sizes: Any) -> Any:
    """The product that the gradient of the matrices is."""
    numbers = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, y, sizes, numbers)


def batched(x: Any, w: Any, sizes: Any) -> Any:
    return jax.vmap(jax.lax.ragged_dot)(x, w, sizes)


def for_tpu(fn: Any, *args: Any) -> Graph:
    """A graph as an accelerator gets it; on CPU JAX writes masks and dots."""
    lowering = jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=("tpu",))
    module = module_of(lowering)
    normalize(module)
    return extract(module, MESH, *boundaries(fn, *args))


def ragged(graph: Graph) -> Op:
    (op,) = (op for op in graph.ops if op.kind == "ragged_dot")
    return op


def ways(graph: Graph, op: Op) -> set[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]]:
    """The shardings of operands and result under every strategy that uses one axis alone."""
    strategies = Enumerator(graph, MESH, False).of(op)

    def named(values: tuple[int, ...], columns: Any, row: int) -> tuple[Sharding, ...]:
        shapes = [graph.values[v].shape for v in values]
        return tuple(
            layouts(len(shape), MESH).shardings[column[row]]
            for shape, column in zip(shapes, columns, strict=True)
        )

    found = set()
    for row in range(len(strategies)):
        used = {a for axes in strategies.factor_axes[row] for a in axes}
        if used == {"a"}:
            operands = named(op.operands, strategies.operands, row)
            found.add((operands, named(op.results, strategies.results, row)))
    return found


A: tuple[str, ...] = ("a",)


def test_a_product_of_grouped_rows_is_split_along_columns_and_summed_dimensions_alone() -> None:
    graph = for_tpu(forward, X, W, SIZES)
    assert ways(graph, ragged(graph)) == {
        ((((), ()), ((), (), A), ((),)), (((), A),)),
        ((((), A), ((), A, ()), ((),)), (((), ()),)),
    }


def test_the_gradient_of_the_matrices_is_split_along_their_rows_or_columns() -> None:
    graph = for_tpu(gradient, X, Y, SIZES)
    assert ways(graph, ragged(graph)) == {
        ((((), A), ((), ()), ((),)), (((), A, ()),)),
        ((((), ()), ((), A), ((),)), (((), (), A),)),
    }


def test_batches_of_groups_are_left_whole() -> None:
    graph = for_tpu(batched, X[None], W[None], SIZES[None])
    assert ways(graph, ragged(graph)) == set()


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (forward, (X, W, SIZES)),
        (gradient, (X, Y, SIZES)),
        (batched, (X[None], W[None], SIZES[None])),
    ],
    ids=["forward", "gradient", "batched"],
)
def test_it_costs_as_many_products_as_there_are_groups(fn: Any, args: Any) -> None:
    assert ragged(for_tpu(fn, *args)).flops == 2.0 * ROWS * IN * OUT * GROUPS


def test_the_masked_dots_of_a_cpu_cost_the_same() -> None:
    lowering = jax.jit(lambda *args: forward(*args)).lower(X, W, SIZES)
    module = module_of(lowering)
    normalize(module)
    graph = extract(module, MESH, *boundaries(forward, X, W, SIZES))
    dots = sum(op.flops for op in graph.ops if op.kind == "dot_general")
    assert dots == ragged(for_tpu(forward, X, W, SIZES)).flops


@pytest.mark.parametrize(("fn", "other"), [(forward, W), (gradient, Y)])
def test_the_matrix_unit_is_given_all_of_its_work(fn: Any, other: Any) -> None:
    graph = for_tpu(fn, X, other, SIZES)
    op = ragged(graph)
    strategies = Enumerator(graph, MESH, False).of(op)
    sizes = matmul_sizes(op, strategies, MESH)
    assert sizes is not None
    np.testing.assert_array_equal(2 * sizes.prod(axis=1), op.flops / strategies.splits)
