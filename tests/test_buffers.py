"""Which values of a device's program get a buffer, by small programs on a single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.buffers import in_post_order, kernels, needs_copy
from autoshard.cost_models.protocol import Compiler
from autoshard.local import DotSide
from autoshard.localize import localize
from tests.lowering import MESH, graph_of

X = np.ones((8, 32), np.float32)
W = np.ones((32, 32), np.float32)
LONG = np.ones((128, 64), np.float32)


def written(fn: Callable[..., Any], *args: Any, compiler: Compiler = "cpu") -> list[str]:
    """Kinds of the kernels of a function."""
    program = localize(graph_of(fn, *args), MESH, None)
    return [k.kind for k in kernels(program.main, list(program.values), compiler).kernels]


def test_elementwise_work_fuses_into_what_reads_it() -> None:
    assert written(lambda x: jnp.sin(x) * 2 + 1, X) == ["add"]


def test_what_a_product_reads_is_written_first() -> None:
    assert written(lambda x, w: (x + 1) @ w, X, W) == ["add", "dot_general"]


def test_dear_values_that_several_ops_read_are_kept_and_cheap_ones_computed_again() -> None:
    assert written(lambda x: (jnp.tanh(x) + 1, jnp.tanh(x) * 3), X).count("tanh") == 1
    assert "abs" not in written(lambda x: (jnp.abs(x) + 1, jnp.abs(x) * 3), X)


def test_a_reduction_computes_its_operand_on_the_way_if_it_alone_reads_it() -> None:
    assert written(lambda x: jnp.abs(x).sum(1), X) == ["reduce"]
    both = written(lambda x: (jnp.abs(x).sum(1), jnp.abs(x) + 1), X)
    assert sorted(both) == ["abs", "add", "reduce"]


def test_a_large_reduction_multiplies_on_the_way_but_computes_nothing_else() -> None:
    assert written(lambda x: (x * x).sum(1), LONG) == ["reduce"]
    assert written(lambda x: jnp.abs(x).sum(1), LONG) == ["abs", "reduce"]
    assert written(lambda x: jnp.abs(x).sum(1), LONG, compiler="tpu") == ["reduce"]


def test_a_long_dimension_of_a_small_operand_is_reduced_in_two_passes() -> None:
    x = np.ones((4, 64), np.float32)
    assert written(lambda x: x.sum(1), x) == ["reduce_window", "reduce"]
    assert written(lambda x: x.sum(0), x) == ["reduce"]


def test_products_copy_operands_that_are_out_of_order_on_cpu_alone() -> None:
    x = np.ones((2, 8, 4, 16), np.float32)  # batch, position, head, channel

    def scores(q: Any, k: Any) -> Any:
        return jnp.einsum("bshd,bthd->bhst", q, k)

    assert written(scores, x, x).count("copy") == 2
    assert "copy" not in written(scores, x, x, compiler="gpu")


@pytest.mark.parametrize(
    ("shape", "side", "is_lhs", "copied"),
    [
        ((8, 16), DotSide((), (0,)), True, False),  # any matrix will do
        ((8, 4, 16), DotSide((), (2,)), True, False),
        ((8, 4, 16), DotSide((), (0, 1)), True, True),
        ((8, 4, 16), DotSide((), (0, 1)), False, False),
        ((2, 8, 16), DotSide((0,), (2,)), True, False),
        ((2, 8, 16), DotSide((1,), (2,)), True, True),
        ((1, 8, 16), DotSide((1,), (2,)), True, False),  # a dimension of size one is nowhere
        ((2, 8, 16), DotSide((0,), (2,)), False, True),
    ],
)
def test_order_of_a_products_operand(
    shape: tuple[int, ...], side: DotSide, is_lhs: bool, copied: bool
) -> None:
    assert needs_copy(shape, side, is_lhs) is copied


def test_ops_are_ordered_depth_first_from_the_first_result_and_dead_ones_left_out() -> None:
    program = localize(graph_of(lambda x: (jnp.exp(jnp.sin(x)), jnp.cos(x)), X), MESH, None)
    assert [op.kind for op in in_post_order(program.main)] == ["sine", "exponential", "cosine"]


def test_views_share_the_buffer_of_what_they_show() -> None:
    program = localize(graph_of(lambda x, w: (x @ w).reshape(-1), X, W), MESH, None)
    found = kernels(program.main, list(program.values), "cpu")
    (dot,) = found.kernels
    assert found.returned == dot.outputs
