"""Strategies are exactly the splits that the sharding rule allows, less XLA's traps."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.graph import Graph, Op
from autoshard.reshard import layouts
from autoshard.shardings import MeshShape, pads
from autoshard.strategies import Enumerator, Strategies
from tests.lowering import MESH, graph_of, shape_of
from tests.zoo import PROGRAMS

Row = tuple[Any, ...]


def strategies(graph: Graph, op: Op, mesh: MeshShape = MESH, scatter: bool = False) -> Strategies:
    return Enumerator(graph, mesh, scatter).of(op)


def rows(graph: Graph, op: Op, mesh: MeshShape = MESH, scatter: bool = False) -> set[Row]:
    """(operand shardings, result shardings, reduced axes, scattered), as people write them."""
    found = strategies(graph, op, mesh, scatter)
    ranks = [len(graph.values[v].shape) for v in (*op.operands, *op.results)]
    sides = [
        [layouts(rank, mesh).shardings[i] for i in ids.tolist()]
        for rank, ids in zip(ranks, (*found.operands, *found.results), strict=True)
    ]
    count = len(op.operands)
    return {
        (
            tuple(side[s] for side in sides[:count]),
            tuple(side[s] for side in sides[count:]),
            found.reduced[s],
            bool(found.scattered[s]),
        )
        for s in range(len(found))
    }


def only(graph: Graph, kind: str) -> Op:
    (op,) = (op for op in graph.ops if op.kind == kind)
    return op


def expected_of_matmul(m: int, k: int, n: int, mesh: MeshShape) -> set[Row]:
    """Each axis splits m, k or n, or nothing; written down without sharding rules."""
    found = set()
    for where in itertools.product((None, "m", "n", "k"), repeat=len(mesh.names)):
        axes = {
            d: tuple(a for a, w in zip(mesh.names, where, strict=True) if w == d) for d in "mnk"
        }
        sizes = ((size, mesh.size(axes[d])) for d, size in (("m", m), ("k", k), ("n", n)))
        if all(size % count == 0 or pads(size, count) for size, count in sizes):
            operands = ((axes["m"], axes["k"]), (axes["k"], axes["n"]))
            reduced = (axes["k"],) if axes["k"] else ()
            found.add((operands, ((axes["m"], axes["n"]),), reduced, False))
    return found


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("mkn", [(16, 32, 8), (6, 4, 7), (1, 8, 2)], ids=str)
def test_a_matmul_can_be_split_evenly_or_with_little_padding(
    sizes: tuple[int, ...], mkn: tuple[int, int, int]
) -> None:
    m, k, n = mkn
    mesh = shape_of(*sizes)
    graph = graph_of(lambda x, y: x @ y, np.ones((m, k)), np.ones((k, n)), mesh=mesh)
    assert rows(graph, only(graph, "dot_general"), mesh) == expected_of_matmul(m, k, n, mesh)


def test_a_compiler_that_scatters_reductions_may_leave_the_result_split() -> None:
    graph = graph_of(lambda x, y: x @ y, np.ones((8, 8)), np.ones((8, 8)), mesh=shape_of(4))
    scattered = {r for r in rows(graph, only(graph, "dot_general"), shape_of(4), True) if r[3]}
    operands = (((), ("a",)), (("a",), ()))
    assert scattered == {
        (operands, ((("a",), ()),), (("a",),), True),
        (operands, (((), ("a",)),), (("a",),), True),
    }


def test_elementwise_ops_keep_the_sharding_of_their_operands() -> None:
    graph = graph_of(lambda x, y: jnp.tanh(x) + y, np.ones((8, 8)), np.ones((8, 8)))
    for operands, results, reduced, _ in rows(graph, only(graph, "add")):
        assert operands == 2 * results
        assert reduced == ()


def test_axes_of_size_one_split_nothing() -> None:
    graph = graph_of(lambda x: jnp.tanh(x), np.ones((8, 8)), mesh=shape_of(2, 4, 1))
    used = {
        a for r in rows(graph, only(graph, "tanh"), shape_of(2, 4, 1)) for d in r[1][0] for a in d
    }
    assert used == {"a", "b"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_strategy_splits_what_fits_and_the_first_splits_nothing(name: str) -> None:
    program = PROGRAMS[name]
    graph = graph_of(program.fn, *program.values())
    enumerator = Enumerator(graph, MESH, False)
    for op in graph.ops:
        if op.name in ("stablehlo.while", "stablehlo.case") or op.is_alias:
            continue
        found = enumerator.of(op)
        assert found.splits[0] == 1
        assert not found.reduced[0]
        for value, ids in zip(
            (*op.operands, *op.results), (*found.operands, *found.results), strict=True
        ):
            shape = graph.values[value].shape
            assert layouts(len(shape), MESH).fitting(shape)[ids].all()
            assert not any(layouts(len(shape), MESH).shardings[ids[0]])


@pytest.mark.parametrize(
    ("combine", "splits"),
    [(jnp.sum, True), (jnp.max, True), (jnp.any, True), (jnp.prod, False), (jnp.argmax, False)],
    ids=["sum", "max", "any", "prod", "argmax"],
)
def test_a_reduction_is_split_if_an_all_reduce_can_finish_it(combine: Any, splits: bool) -> None:
    graph = graph_of(lambda x: combine(x, axis=1), np.ones((8, 16), np.float32))
    op = only(graph, "reduce")
    assert any(r[2] for r in rows(graph, op)) == splits


def test_bits_are_combined_on_one_device_as_no_all_reduce_of_integers_does_it() -> None:
    def fn(x: Any, n: Any) -> Any:  # the same shapes and combiner, of truth values and of integers
        return jnp.any(x, axis=1), jnp.bitwise_or.reduce(n, axis=1)

    graph = graph_of(fn, np.ones((8, 16), np.bool_), np.ones((8, 16), np.int32))
    truth, bits = (op for op in graph.ops if op.kind == "reduce")
    enumerator = Enumerator(graph, MESH, False)
    assert any(enumerator.of(truth).reduced)
    assert not any(enumerator.of(bits).reduced)


@pytest.mark.parametrize(
    ("combine", "start", "splits"),
    [(lax.add, 0.0, True), (lax.add, -0.0, True), (lax.add, 5.0, False), (lax.max, 5.0, True)],
)
def test_a_sum_is_split_only_if_it_starts_from_nothing(
    combine: Any, start: float, splits: bool
) -> None:
    def fn(x: Any) -> Any:
        # The first has the same sharding rule, and nothing in its way.
        return jnp.sum(x, 1), lax.reduce(x * 2, np.float32(start), combine, (1,))

    graph = graph_of(fn, np.ones((8, 16), np.float32))
    first, second = (op for op in graph.ops if op.kind == "reduce")
    assert any(r[2] for r in rows(graph, first))
    assert any(r[2] for r in rows(graph, second)) == splits


def kept_whole(graph: Graph, op: Op, operand: int, dim: int) -> bool:
    return all(not r[0][operand][dim] for r in rows(graph, op))


def test_only_the_batch_and_the_features_of_a_convolution_are_split() -> None:
    program = PROGRAMS["conv_grad"]
    graph = graph_of(program.fn, *program.values())
    splits = [
        [kept_whole(graph, op, 0, dim) for dim in range(4)]
        for op in graph.ops
        if op.kind == "convolution"
    ]
    assert splits == 3 * [[False, True, True, False]]


def test_of_a_grouped_convolution_batch_features_and_groups_are_split_but_not_space() -> None:
    program = PROGRAMS["conv_depthwise_grad"]
    graph = graph_of(program.fn, *program.values())
    convolutions = [op for op in graph.ops if op.kind == "convolution"]
    # Of images [8, 16, 16, 8], kernel [3, 3, 1, 16] and result [8, 7, 7, 16].
    for op in convolutions:
        assert op.piecewise
        assert kept_whole(graph, op, 0, 1)
        assert kept_whole(graph, op, 0, 2)
        assert not kept_whole(graph, op, 0, 0)
        assert not kept_whole(graph, op, 0, 3)
    kernel = next(op for op in convolutions if graph.values[op.results[0]].shape[0] == 3)
    assert any(r[2] for r in rows(graph, kernel))  # images are summed over


def test_an_updated_dimension_is_kept_whole() -> None:
    program = PROGRAMS["kv_cache"]
    graph = graph_of(program.fn, *program.values())
    op = only(graph, "dynamic_update_slice")
    assert [kept_whole(graph, op, 0, d) for d in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_scatter_of_one_index_per_device_is_not_split_along_what_it_indexes(count: int) -> None:
    x, i, u = np.ones((16, 8)), np.zeros(count, np.int32), np.ones((count, 8))
    graph = graph_of(lambda x, i, u: x.at[i].add(u), x, i, u)
    op = next(op for op in graph.ops if op.kind == "scatter")
    found = strategies(graph, op)
    single = [
        layouts(len(graph.values[op.operands[1]].shape), MESH).splits[i].prod() == count
        for i in found.operands[1].tolist()
    ]
    indexed = layouts(2, MESH).splits[found.operands[0], 0] > 1
    assert not any(s and k for s, k in zip(single, indexed, strict=True))
    assert indexed.any() == (count > 1)


def test_indices_and_what_they_index_are_not_both_split_after_an_idle_axis() -> None:
    mesh = shape_of(2, 2, 2)
    program = PROGRAMS["embedding_grad"]
    graph = graph_of(program.fn, *program.values(), mesh=mesh)
    for op in (op for op in graph.ops if op.kind in ("gather", "scatter")):
        found = {
            (operands[0][0], operands[1][0], operands[1][1])
            for operands, _, _, _ in rows(graph, op, mesh)
            if "a" not in str(operands)
        }
        assert not any(table and (outer or inner) for table, outer, inner in found)
        both = [r for r in rows(graph, op, mesh) if r[0][0][0] and r[0][1][0]]
        assert both, "vocabulary and batch can be split at once"


def test_bits_are_drawn_whole() -> None:
    def fn(x: Any) -> Any:
        key = jax.random.wrap_key_data(jnp.zeros(4, jnp.uint32), impl="rbg")
        return jax.random.bits(key, (16, 16)) + x

    graph = graph_of(fn, np.ones((16, 16), np.uint32))
    (op,) = (op for op in graph.ops if op.kind == "rng_bit_generator")
    assert len(strategies(graph, op)) == 1


def test_only_the_batch_of_a_transform_is_split() -> None:
    graph = graph_of(lambda x: jnp.fft.fft(x, axis=1).real, np.ones((16, 16), np.float32))
    (op,) = (op for op in graph.ops if op.kind == "fft")
    assert {r[0][0][1] for r in rows(graph, op)} == {()}
    assert {r[0][0][0] for r in rows(graph, op)} == {(), ("a",), ("b",), ("a", "b")}


@pytest.mark.parametrize(
    ("fn", "kind", "shape"),
    [
        (lambda x: jnp.sort(x, 2), "sort", (8, 16, 16)),
        (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), "custom_call", (8, 16, 16)),
    ],
    ids=["sort", "cholesky"],
)
def test_ops_over_whole_rows_or_matrices_are_split_along_the_batch_alone(
    fn: Any, kind: str, shape: tuple[int, ...]
) -> None:
    graph = graph_of(fn, np.ones(shape, np.float32))
    op = only(graph, kind)
    whole = [kept_whole(graph, op, 0, d) for d in range(3)]
    assert whole == [False, kind == "custom_call", True]


def test_an_empty_array_is_not_split() -> None:
    graph = graph_of(lambda x: x.sum(), np.ones((16, 0), np.float32))
    assert all(len(strategies(graph, op)) == 1 for op in graph.ops if op.kind == "reduce")


def test_a_window_is_not_split_along_the_dimension_it_moves_over() -> None:
    graph = graph_of(lambda x: lax.cumsum(x, axis=1), np.ones((8, 16), np.float32))
    op = only(graph, "reduce_window")
    assert [kept_whole(graph, op, 0, d) for d in (0, 1)] == [False, True]
