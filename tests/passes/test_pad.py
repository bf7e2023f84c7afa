"""Padded dimensions: the values of the program, sizes that the mesh divides, gains as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.mlir import ir

from autoshard import autoshard
from autoshard.passes.context import PassContext
from autoshard.passes.evaluate import evaluate
from autoshard.passes.manager import run_pipeline
from autoshard.passes.pad import Padding
from autoshard.program import main_block, operations, shape_of
from autoshard.shardings import MeshShape
from tests.lowering import Simple, lowered, mesh_of, module_of

MESH = MeshShape(("a",), (4,))


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / 2


def padded(
    fn: Callable[..., Any], *args: Any, options: str = "always=true"
) -> tuple[ir.Module, tuple[Padding, ...]]:
    """The padded module, checked against the function on NaN-free values."""
    module = module_of(lowered(fn, *args))
    run_pipeline("flatten-calls", module)
    leaves = jax.tree.leaves(args)
    want = evaluate(module, leaves)
    context = run_pipeline(f"pad{{{options}}}", module, PassContext(mesh=MESH, cost_model=Simple()))
    assert module.operation.verify()
    for one, other in zip(evaluate(module, leaves), want, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    made: tuple[Padding, ...] = context.results["pad"]
    again = run_pipeline("pad{always=true}", module, PassContext(mesh=MESH))
    assert options != "always=true" or again.rewrites.total == 0
    return module, made


def sizes(made: tuple[Padding, ...]) -> set[tuple[int, int]]:
    return {(p.size, p.padded) for p in made}


def dot_shapes(module: ir.Module) -> set[int]:
    return {
        n
        for o in operations(main_block(module))
        if o.name == "stablehlo.dot_general"
        for value in (*o.operands, *o.results)
        for n in shape_of(value)
    }


def test_a_vocabulary_is_padded_and_no_probability_changes() -> None:
    def loss(table: Any, ids: Any, labels: Any) -> Any:
        logits = jnp.tanh(table[ids]) @ table.T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -picked.mean(), jax.nn.softmax(logits), jnp.argmax(logits, -1)

    ids = np.array([0, 26, 5, 31], np.int32)  # one beyond the end: clamped or filled as before
    module, made = padded(
        lambda t, i, y: (loss(t, i, y), jax.grad(lambda t: loss(t, i, y)[0])(t)),
        f32(27, 16), ids, np.array([26, 0, -1, 40], np.int32),
    )  # fmt: skip
    assert sizes(made) == {(27, 28)}
    assert 27 not in dot_shapes(module)


def test_odd_heads_are_padded_in_a_loop_and_in_its_gradient() -> None:
    def attend(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in range(3))
            shares = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
            mixed = jnp.einsum("bhst,bthk->bshk", shares, v)
            return x + jnp.einsum("bshk,dhk->bsd", mixed, w[3]), None

        return jnp.sum(lax.scan(layer, x, weights)[0] ** 2)

    module, made = padded(jax.grad(attend), f32(2, 4, 8, 3, 4) / 2, f32(4, 8, 8))
    assert sizes(made) == {(3, 4)}
    assert 3 not in dot_shapes(module)


def test_every_kind_of_sum_and_boundary() -> None:
    def mixed(x: Any, w: Any, n: Any) -> Any:
        y = x @ w
        return (
            (y.sum(1), y.max(1), y.min(1), y.prod(1)),
            ((y > 0).all(1), (y > 1).any(1)),
            (jnp.sort(y, 1), jnp.cumsum(y, 1), y[:, 1:], y[:, ::-1]),
            (y.reshape(-1), jnp.concatenate([y, y], 1), jnp.exp(100.0 * y).min()),
            ((x.astype(jnp.int32) @ n).max(1), jnp.linalg.norm(jnp.log(jnp.abs(y)), axis=1)),
        )

    n = np.arange(8 * 11, dtype=np.int32).reshape(8, 11) - 100
    _, made = padded(mixed, f32(4, 8), f32(8, 11), n)
    assert sizes(made) == {(11, 12)}


def test_summed_padding_is_masked_even_where_it_is_not_finite() -> None:
    def odd(x: Any, w: Any, v: Any) -> Any:
        return (1.0 / (x @ w)) @ v, jnp.log(x @ w) @ jnp.exp(v)  # 1/0 and log(0) in the padding

    _, made = padded(odd, np.abs(f32(4, 8)), np.abs(f32(8, 7)), f32(7, 8))
    assert sizes(made) == {(7, 8)}


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from([3, 5, 6, 7, 8, 9]), min_size=3, max_size=4), st.integers(0, 4))
def test_random_chains_keep_their_values(widths: list[int], kind: int) -> None:
    between: Any = (
        jnp.tanh,
        jax.nn.softmax,
        lambda x: x - x.mean(-1, keepdims=True),
        lambda x: jnp.where(x > 0, x, 1 / x),
        lambda x: x.T.reshape(x.shape),
    )[kind]

    def chain(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = between(x @ w)
        return x, x.sum()

    args = [f32(a, b) for a, b in zip([5, *widths], widths, strict=False)]
    _, made = padded(chain, *args)
    for padding in made:
        assert padding.size < padding.padded == -(-padding.size // 4) * 4


def looped(x: Any, w: Any) -> Any:
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=4)[0]


def test_padding_is_kept_where_the_plan_gets_faster() -> None:
    args = f32(65, 65), f32(65, 65)
    _, made = padded(looped, *args, options="most=0.1")
    (padding,) = made
    assert (padding.size, padding.padded) == (65, 68)
    assert 0 < padding.after_s < padding.before_s
    assert padding.source.startswith("test_pad.py:")


def test_padding_that_does_not_pay_is_left_out() -> None:
    assert padded(looped, f32(5, 5), f32(5, 5), options="most=1.0")[1] == ()


def test_the_padded_program_runs_sharded() -> None:
    args = f32(65, 65), f32(65, 65)
    times = []
    for pipeline in ("flatten-calls,shard", "flatten-calls,pad{always=true},shard"):
        step = autoshard(looped, mesh_of(4), cost_model=Simple(), pipeline=pipeline)
        times.append(step.plan(*args).predicted.step_s)
        np.testing.assert_allclose(step(*args), looped(*args), rtol=1e-4, atol=1e-5)
    assert times[1] < times[0]


@pytest.mark.parametrize("options", ["always=true, sizes=[7]", "always=true, most=0.05"])
def test_what_is_padded_can_be_limited(options: str) -> None:
    args = f32(8, 7), f32(7, 27)
    wanted = {(7, 8)} if "sizes" in options else {(27, 28)}
    assert sizes(padded(lambda x, w: jnp.tanh(x @ w), *args, options=options)[1]) == wanted
