"""The normal form computes the same, without calls, repetitions and what nothing reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P

from autoshard.program import REGION_OPS, main_block, normalize, source_of, terminator, walk
from tests.lowering import lowered, mesh_of, module_of
from tests.zoo import PROGRAMS

X, W = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)
LOOPS = ("scan_remat_grad", "nested_scans", "branches", "while_until", "fori_dynamic")


def normal(fn: Callable[..., Any], *args: Any) -> ir.Module:
    module = module_of(lowered(fn, *args))
    normalize(module)
    return module


def names(module: ir.Module) -> list[str]:
    return [operation.name for _, _, operation in walk(main_block(module))]


@pytest.mark.parametrize("name", [*LOOPS, "nested_jit", "experts", "random_inside", "scalars"])
def test_the_normal_form_gives_the_same_values(name: str) -> None:
    program = PROGRAMS[name]
    lowering = lowered(program.fn, *program.values())
    expected = jax.tree.leaves(jax.jit(program.fn)(*program.values()))
    normalize(module_of(lowering))
    found = jax.tree.leaves(lowering.compile()(*program.values()))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["nested_jit", "scan_layers_grad"])
def test_calls_are_inlined_into_one_function(name: str) -> None:
    program = PROGRAMS[name]
    module = normal(program.fn, *program.values())
    assert "func.call" not in names(module)
    assert [op.operation.name for op in module.body.operations].count("func.func") == 1


def test_repeated_and_unread_ops_are_removed() -> None:
    def fn(x: Any, w: Any) -> Any:
        jnp.sin(x @ w)  # nothing reads it
        return x @ w + jnp.tanh(x @ w)

    assert names(normal(fn, X, W)).count("stablehlo.dot_general") == 1
    assert "stablehlo.sine" not in names(normal(fn, X, W))


def test_a_manual_computation_that_nothing_reads_is_removed_with_its_collectives() -> None:
    product: Callable[..., Any] = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "a"),
        mesh=mesh_of(8),
        in_specs=(P(None, "a"), P("a")),
        out_specs=P(),
    )

    def fn(x: Any, w: Any) -> Any:  # the gradient of a sum does not need the sum
        return jax.grad(lambda w: jnp.sum(product(x, w)))(w)

    found = names(normal(fn, X, W))
    assert found.count("sdy.manual_computation") == 1
    assert "stablehlo.all_reduce" not in found


def test_a_barrier_keeps_a_repetition_apart() -> None:
    def fn(x: Any, w: Any) -> Any:
        return x @ w + jnp.tanh(lax.optimization_barrier(x) @ w)

    assert names(normal(fn, X, W)).count("stablehlo.dot_general") == 2


def test_a_loop_no_longer_carries_what_nothing_reads() -> None:
    def fn(x: Any, w: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            x, norm = carry
            return (jnp.tanh(x @ w), norm + jnp.sum(x @ w)), x.sum()

        (x, _), _ = lax.scan(body, (x, 0.0), None, length=3)
        return x

    module = normal(fn, X, W)
    (loop,) = (op for _, _, op in walk(main_block(module)) if op.name == "stablehlo.while")
    assert [tuple(ir.RankedTensorType(r.type).shape) for r in loop.results] == [
        (),
        (16, 32),
        (32, 32),
    ]
    assert names(module).count("stablehlo.dot_general") == 1
    assert "stablehlo.reduce" not in names(module)


def test_the_result_of_a_value_that_a_loop_never_changes_is_the_value_itself() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, c: (c[0] @ c[1], c[1]), (x, w))

    module = normal(fn, X, W)
    block = main_block(module)
    assert terminator(block).operands[1] == block.arguments[1]


@pytest.mark.parametrize("name", LOOPS)
def test_loops_carry_whatever_they_read_but_constants(name: str) -> None:
    program = PROGRAMS[name]
    module = normal(program.fn, *program.values())
    for _, _, operation in walk(main_block(module)):
        if operation.name != "stablehlo.while":
            continue
        for region in operation.regions:
            for value in reads_from_outside(region.blocks[0]):
                while value.owner.name not in ("stablehlo.constant", "stablehlo.iota"):
                    assert not isinstance(value.owner, ir.Block)
                    value = value.owner.operands[0]


def reads_from_outside(block: ir.Block) -> list[Any]:
    inside: set[Any] = set(block.arguments)
    found = []
    for op in block.operations:
        inside.update(op.operation.results)
        found += [v for v in op.operation.operands if v not in inside]
        if op.operation.name in REGION_OPS:
            for region in op.operation.regions:
                found += [v for v in reads_from_outside(region.blocks[0]) if v not in inside]
    return found


@pytest.mark.parametrize("name", ["scan_remat_grad", "branches", "embedding_grad"])
def test_two_lowerings_have_the_same_ops_in_the_same_order(name: str) -> None:
    program = PROGRAMS[name]
    first, second = (normal(program.fn, *program.values()) for _ in range(2))
    assert names(first) == names(second)


def test_an_op_with_an_effect_stays() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda v: None, x.sum())
        return x * 2

    assert "stablehlo.custom_call" in names(normal(fn, X))


def test_a_loop_goes_on_carrying_what_an_effect_inside_an_inner_loop_reads() -> None:
    def fn(x: Any) -> Any:
        def inner(_: Any, d: Any) -> Any:
            jax.debug.callback(lambda v: None, d)
            return d + 1

        def body(c: Any, _: Any) -> Any:
            lax.fori_loop(0, 3, inner, c)
            return c * 2, None

        lax.scan(body, x, None, length=3)
        return x

    module = normal(fn, X)
    assert module.operation.verify()
    outer, _ = (op for _, _, op in walk(main_block(module)) if op.name == "stablehlo.while")
    assert "tensor<16x32xf32>" in [str(result.type) for result in outer.results]


def test_a_function_that_a_reduction_calls_stays() -> None:
    def larger(a: Any, b: Any) -> Any:
        return jnp.where(a > b, a, b)

    def fn(x: Any) -> Any:
        return lax.reduce(x, np.float32(0), larger, (0,)), jnp.where(x > 0, x, 1)

    lowering = lowered(fn, X)
    normalize(module_of(lowering))
    assert module_of(lowering).operation.verify()
    np.testing.assert_array_equal(lowering.compile()(X)[0], np.ones(32))


def test_the_source_is_the_line_of_the_users_code() -> None:
    def fn(x: Any) -> Any:
        return jnp.sin(x)

    module = normal(fn, X)
    (sine,) = (op for _, _, op in walk(main_block(module)) if op.name == "stablehlo.sine")
    line = fn.__code__.co_firstlineno + 1
    assert source_of(sine) == f"test_program.py:{line}"
