"""The program of one device under a plan: shapes, collectives, and where reshards happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.graph import Graph
from autoshard.local import Decisions, LocalBlock, LocalOp, LocalProgram, step_of
from autoshard.localize import localize
from autoshard.shardings import Sharding, replicated
from tests.lowering import MESH, graph_of

X, W = np.ones((16, 32), np.float32), np.ones((32, 64), np.float32)


@dataclass(frozen=True)
class Choice:
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    partial: Sharding | None = None
    reduced: tuple[tuple[str, ...], ...] = ()


def whole(graph: Graph, values: Sequence[int]) -> tuple[Sharding, ...]:
    return tuple(replicated(len(graph.values[v].shape)) for v in values)


def local(
    graph: Graph,
    choices: Mapping[str, Choice],
    arguments: Sequence[Sharding],
    chains: Mapping[tuple[int, Sharding], Sequence[Sharding]] | None = None,
) -> LocalProgram:
    """Ops of the given kinds as chosen, everything else whole."""
    ops = {
        op.index: choices.get(op.kind, Choice(whole(graph, op.operands), whole(graph, op.results)))
        for op in graph.ops
    }
    results = whole(graph, graph.results)
    return localize(graph, MESH, Decisions(ops, arguments, results, chains or {}))


def kinds(block: LocalBlock) -> list[str]:
    return [op.kind for op in block.ops]


def shapes(program: LocalProgram, op: LocalOp) -> list[tuple[int, ...]]:
    return [program.values[v].shape for v in (*op.inputs, *op.outputs)]


def test_a_product_summed_over_two_groups_of_axes_ends_in_two_all_reduces() -> None:
    graph = graph_of(lambda x, w: jnp.einsum("ab,bc->c", x, w), X, W)
    dot = next(op for op in graph.ops if op.kind == "dot_general")
    operands = whole(graph, dot.operands)
    both = Choice(operands, whole(graph, dot.results), None, (("a",), ("b",)))
    program = local(graph, {"dot_general": both}, whole(graph, graph.arguments))
    reduces = [op for op in program.main.ops if op.kind == "all_reduce"]
    assert [op.axes for op in reduces] == [("a",), ("b",)]
    assert reduces[1].inputs == reduces[0].outputs


def test_shapes_are_those_of_one_devices_piece() -> None:
    graph = graph_of(lambda x, w: x @ w, X, W)
    rows: Sharding = (("a",), ())
    columns: Sharding = ((), ("b",))
    result: Sharding = (("a",), ("b",))
    v = graph.results[0]
    program = local(
        graph,
        {"dot_general": Choice((rows, columns), (result,))},
        [rows, columns],
        {(v, replicated(2)): [(("a",), ()), replicated(2)]},
    )
    dot, first, second = program.main.ops
    assert shapes(program, dot) == [(4, 32), (32, 32), (4, 32)]
    assert program.values[dot.outputs[0]].nbytes == 4 * 32 * 4
    assert (first.kind, first.axes, first.dims) == ("all_gather", ("b",), (1,))
    assert (second.kind, second.axes, second.dims) == ("all_gather", ("a",), (0,))
    assert program.main.returned == second.outputs


def test_two_readers_of_one_reshard_share_it() -> None:
    graph = graph_of(lambda x: (jnp.sin(x), jnp.cos(x)), X)
    rows: Sharding = (("a",), ())
    argument = graph.arguments[0]
    program = local(graph, {}, [rows], {(argument, replicated(2)): [replicated(2)]})
    assert sorted(kinds(program.main)) == ["all_gather", "cosine", "sine"]


def test_values_that_cost_nothing_are_made_at_each_reader_in_its_sharding() -> None:
    graph = graph_of(lambda x, w: (x + 1.0, w + 1.0), X, W)
    program = local(graph, {}, whole(graph, graph.arguments))
    made = [op for op in program.main.ops if op.kind == "broadcast_in_dim"]
    assert [program.values[op.outputs[0]].shape for op in made] == [(16, 32), (32, 64)]


def test_a_loop_carries_only_what_it_changes_and_reshards_the_rest_before_it() -> None:
    square = np.ones((32, 32), np.float32)
    graph = graph_of(lambda x, w: lax.fori_loop(0, 5, lambda _, c: c @ w, x), X, square)
    dot = next(op for op in graph.ops if op.kind == "dot_general")
    rows: Sharding = (("a",), ())
    program = local(
        graph,
        {},
        [replicated(2), rows],
        {
            (dot.operands[1], replicated(2)): [replicated(2)],
            (graph.arguments[1], replicated(2)): [replicated(2)],
        },
    )
    loop = next(op for op in program.main.ops if op.kind == "while")
    gather = next(op for op in program.main.ops if op.kind == "all_gather")
    (body,) = loop.blocks
    assert kinds(program.main).index("all_gather") < kinds(program.main).index("while")
    assert "all_gather" not in kinds(body)
    product = next(op for op in body.ops if op.kind == "dot_general")
    assert product.inputs[1] == gather.outputs[0]
    assert gather.outputs[0] in loop.inputs[len(loop.outputs) :]


def test_branches_are_blocks_of_their_own_that_read_from_outside() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    graph = graph_of(fn, X)
    program = local(graph, {}, whole(graph, graph.arguments))
    (choice,) = (op for op in program.main.ops if op.blocks)
    assert [kinds(block) for block in choice.blocks] == [["cosine"], ["sine"]]
    assert program.main.params[0] in choice.inputs


def test_steps_are_told_apart_by_what_changes() -> None:
    a, b, none = ("a",), ("b",), ()
    assert step_of((a, none), (none, none)) == ("all_gather", a, 0)
    assert step_of((none, none), (none, b)) == ("slice", b, 1)
    assert step_of((("a", "b"), none), (a, b)) == ("all_to_all", b, 1)
    assert step_of((("a", "b"), none), (("b", "a"), none))[0] == "permute"
    assert step_of((a, b), (b, a))[0] == "permute"


def test_padding_is_gathered_then_cut_off_and_made_zero_where_a_product_sums_over_it() -> None:
    odd = np.ones((16, 101), np.float32)
    graph = graph_of(lambda x, w: x @ w.T, odd, odd)
    split: Sharding = ((), ("a",))
    dot = next(op for op in graph.ops if op.kind == "dot_general")
    turn = next(op for op in graph.ops if op.kind == "transpose")
    turned: Sharding = (("a",), ())
    program = local(
        graph,
        {
            "transpose": Choice((split,), (turned,)),
            "dot_general": Choice((split, turned), whole(graph, dot.results), None, (("a",),)),
        },
        whole(graph, graph.arguments),
        {(v, split): [split] for v in graph.arguments},
    )
    assert turn.results[0] == dot.operands[1]
    assert kinds(program.main) == [
        *("pad", "slice", "transpose", "pad", "slice", "select", "select", "dot_general"),
        "all_reduce",
    ]
    pad, cut = program.main.ops[:2]
    assert [program.values[op.outputs[0]].shape for op in (pad, cut)] == [(16, 104), (16, 26)]
    gathered = local(
        graph_of(jnp.sin, odd), {"sine": Choice((split,), (split,))}, [split],
        {(1, replicated(2)): [replicated(2)]},
    )  # fmt: skip
    assert kinds(gathered.main) == ["sine", "all_gather", "slice"]
    assert [gathered.values[op.outputs[0]].shape for op in gathered.main.ops] == [
        *((16, 26), (16, 104), (16, 101)),
    ]
