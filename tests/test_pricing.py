"""The problem that a solver sees says what the program costs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.pricing import Priced, price, total_seconds
from autoshard.problem import FORBIDDEN, evaluate, validate_problem
from autoshard.reshard import layouts
from autoshard.strategies import Enumerator
from autoshard.work import matmul_sizes, partial_bytes, work_of
from tests.lowering import MESH, Simple, graph_of, shape_of
from tests.zoo import PROGRAMS

X, W = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)
MODEL = Simple()


def priced_of(fn: Any, *args: Any, mesh: Any = MESH, **options: Any) -> Priced:
    return price(graph_of(fn, *args, mesh=mesh, **options), mesh, MODEL)


@pytest.mark.parametrize("name", ["mlp_step", "branches", "nested_scans", "size_zero", "scalars"])
def test_problems_are_well_formed_and_can_be_met(name: str) -> None:
    program = PROGRAMS[name]
    problem = priced_of(program.fn, *program.values()).problem
    validate_problem(problem)
    whole = [int(np.argmin(costs)) for costs in problem.costs]
    assert evaluate(problem, whole).cost >= 0
    assert all((matrix >= 0).all() for matrix in problem.edge_costs)


def test_a_dot_is_priced_by_its_local_sizes() -> None:
    graph = graph_of(lambda x, w: x @ w, X, W)
    priced = price(graph, MESH, MODEL)
    (node,) = (n for n in priced.nodes if n.kind == "op")
    assert node.strategies is not None
    for choice in range(len(node)):
        pieces = [
            layouts(2, MESH).splits[ids[choice]].prod()
            for ids in (*node.strategies.operands, *node.strategies.results)
        ]
        sizes = [4 * 16 * 32, 4 * 32 * 64, 4 * 16 * 64]
        moved = sum(s / p for s, p in zip(sizes, pieces, strict=True))
        flops = 2 * 16 * 32 * 64 / node.strategies.splits[choice]
        assert node.seconds[choice] == pytest.approx(1e-9 * (flops + moved))


def test_adding_rows_to_a_table_writes_the_rows_and_adding_them_to_zeros_the_table() -> None:
    rows, ids = np.ones((4, 32), np.float32), np.arange(4, dtype=np.int32)
    table = np.ones((1024, 32), np.float32)

    def written(fn: Any, *args: Any) -> float:
        graph = graph_of(fn, *args)
        (op,) = (op for op in graph.ops if op.kind == "scatter")
        fusion = price(graph, MESH, MODEL).fusion
        work = work_of(graph, op, Enumerator(graph, MESH, False).of(op), fusion, MESH)
        return float(work.hbm_bytes[0])

    into_table = written(lambda t, r, i: t.at[i].add(r), table, rows, ids)
    into_zeros = written(lambda r, i: jnp.zeros((1024, 32)).at[i].add(r), rows, ids)
    assert 2 * rows.nbytes <= into_table <= 4 * rows.nbytes
    assert table.nbytes <= into_zeros <= table.nbytes + 2 * rows.nbytes


def test_local_sizes_of_a_product_multiply_to_its_flops() -> None:
    program = PROGRAMS["grouped_heads"]
    graph = graph_of(program.fn, *program.values())
    enumerator = Enumerator(graph, MESH, False)
    fusion = price(graph, MESH, MODEL).fusion
    for op in graph.ops:
        if op.kind == "dot_general":
            strategies = enumerator.of(op)
            sizes = matmul_sizes(op, strategies, MESH)
            assert sizes is not None
            work = work_of(graph, op, strategies, fusion, MESH)
            np.testing.assert_allclose(2.0 * sizes.prod(axis=1), work.flops)


def test_partial_results_are_priced_before_they_are_scattered() -> None:
    graph = graph_of(lambda x, w: x @ w, X, W, mesh=shape_of(4))
    (op,) = graph.ops
    strategies = Enumerator(graph, shape_of(4), True).of(op)
    size = partial_bytes(graph, op, strategies, shape_of(4), "tpu")
    assert strategies.scattered.any()
    for s, scattered in enumerate(strategies.scattered):
        if strategies.reduced[s]:
            assert size[s] == 4 * 16 * 64
        assert not scattered or strategies.reduced[s]


def test_work_in_a_loop_is_paid_in_each_round() -> None:
    def fn(x: Any, n: int) -> Any:
        return lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ c), x)

    square = np.ones((32, 32), np.float32)
    costs = {}
    for rounds in (2, 6):
        priced = priced_of(lambda x, n=rounds: fn(x, n), square, mesh=shape_of(1))
        dots = [n for n, node in enumerate(priced.nodes) if _is_dot(priced, n)]
        costs[rounds] = int(priced.problem.costs[dots[0]][0])
    assert costs[6] == 3 * costs[2] > 0


def _is_dot(priced: Priced, number: int) -> bool:
    return priced.problem.names[number].startswith("dot_general")


def test_a_reshard_that_cannot_be_is_forbidden() -> None:
    problem = priced_of(lambda x, w: x @ w, X[:6], W).problem
    assert all((costs < FORBIDDEN).any() for costs in problem.costs)


def test_a_pinned_argument_has_one_choice() -> None:
    priced = priced_of(lambda x, w: x @ w, X, W, pins={0: (("b",), ("a",))})
    assert [len(node) for node in priced.nodes[:1]] == [1]
    (ids,) = priced.nodes[0].layouts
    assert layouts(2, MESH).shardings[int(ids[0])] == (("b",), ("a",))


def test_nodes_are_named_for_people() -> None:
    names = priced_of(lambda x, w: jnp.tanh(x @ w), X, W).problem.names
    assert names[:2] == ("argument 0", "argument 1")
    assert names[2].startswith("dot_general #0 at test_pricing.py:")


def test_picoseconds_are_seconds() -> None:
    assert total_seconds(1_500_000_000_000) == 1.5


def test_four_axes_split_few_dimensions_by_neighbours_unless_a_pin_asks_for_more() -> None:
    mesh, (x, w) = shape_of(2, 2, 2, 2), (X[:, :16], W[:16, :16])
    usual = priced_of(lambda x, w: x @ w, x, w, mesh=mesh)
    table = layouts(2, mesh)
    apart, whole = table.index[(("a", "c"), ())], table.index[((), ())]
    for node in usual.nodes:
        assert apart not in np.concatenate(node.layouts)
        assert whole in np.concatenate(node.layouts)
    pinned = priced_of(lambda x, w: x @ w, x, w, mesh=mesh, pins={0: (("a", "c"), ())})
    assert pinned.nodes[0].layouts[0].tolist() == [apart]
    (product,) = (n for n in pinned.nodes if n.kind == "op")
    assert product.strategies is not None
    assert apart in product.strategies.operands[0]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_usual_layouts_of_four_axes(rank: int) -> None:
    table = layouts(rank, shape_of(2, 2, 2, 2))
    for sharding, usual in zip(table.shardings, table.usual.tolist(), strict=True):
        runs = ["".join(dim) for dim in sharding if dim]
        assert usual == (len(runs) <= 2 and all(run in "abcd" for run in runs))
    assert layouts(rank, shape_of(2, 2, 2)).usual.all()
