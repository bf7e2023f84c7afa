"""Products in the cheapest order, against every order; transposes that disappear."""

from __future__ import annotations

import itertools
import math
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

from autoshard import InputError
from autoshard.cost_models.protocol import CollectiveKind, CostModel, Floats, MeshAxis
from autoshard.counting import trip_count
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.evaluate import evaluate
from autoshard.passes.manager import run_pipeline
from autoshard.program import Boundary, main_block, operations, shape_of, source_of
from autoshard.shardings import MeshShape
from tests.lowering import Simple, lowered, module_of


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / 4


def reassociated(fn: Callable[..., Any], *args: Any, options: str = "") -> tuple[ir.Module, int]:
    """The rewritten module, checked against the function; and how many rewrites that took."""
    module = module_of(lowered(fn, *args))
    run_pipeline("flatten-calls", module)
    before = evaluate(module, args)
    made = run_pipeline(f"reassociate{options}", module).rewrites.total
    assert module.operation.verify()
    for got, want in zip(evaluate(module, args), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    assert run_pipeline(f"reassociate{options}", module).rewrites.total == 0  # idempotent
    return module, made


def names(module: ir.Module) -> list[str]:
    return [o.name.removeprefix("stablehlo.") for o in operations(main_block(module))]


def dot_flops(module: ir.Module) -> float:
    """FLOP of all products, read off shapes; bodies of loops as often as they run."""
    total = 0.0
    for operation in operations(main_block(module)):
        if operation.name != "stablehlo.dot_general":
            continue
        around = operation.parent
        assert around is not None
        times = trip_count(around.operation) if around.name == "stablehlo.while" else 1
        assert times is not None
        lhs, rhs, out = map(shape_of, (*operation.operands, *operation.results))
        batch_and_sum = math.prod(lhs) * math.prod(rhs) / math.prod(out)  # batch * summed^2
        batch = str(operation).partition("batching_dims = [")[2].partition("]")[0]
        batched = math.prod(lhs[int(d)] for d in batch.split(",") if d)
        total += 2.0 * math.prod(out) * math.sqrt(batch_and_sum / batched) * times
    return total


def least_chain(sizes: tuple[int, ...]) -> float:
    """FLOP of the best order of a chain of matrices, by trying every place for the last product."""
    if len(sizes) < 3:
        return 0.0
    return min(
        least_chain(sizes[: k + 1]) + least_chain(sizes[k:]) + 2.0 * sizes[0] * sizes[k] * sizes[-1]
        for k in range(1, len(sizes) - 1)
    )


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=4, max_size=6), st.randoms(use_true_random=False))
def test_a_chain_of_matrices_takes_the_fewest_operations(sizes: list[int], random: Any) -> None:
    def in_some_order(*matrices: Any) -> Any:
        left = list(matrices)
        while len(left) > 1:
            k = orders[len(left)]
            left[k : k + 2] = [left[k] @ left[k + 1]]
        return left[0]

    orders = {n: random.randrange(n - 1) for n in range(2, len(sizes))}
    args = [f32(a, b) for a, b in itertools.pairwise(sizes)]
    module, _ = reassociated(in_some_order, *args)
    assert dot_flops(module) == pytest.approx(least_chain(tuple(sizes)))


EINSUMS = ["bij,bjk,kl,bl->bi", "ij,kj,ki->ij", "abc,cd,de,b->ae", "bhqd,bhkd,bhkv->bqhv"]


@pytest.mark.parametrize("formula", EINSUMS)
def test_an_einsum_multiplied_from_the_right_takes_no_more_than_the_best_path(formula: str) -> None:
    inputs = formula.partition("->")[0].split(",")
    size = dict(zip("abcdehijklqv", (2, 3, 12, 4, 9, 2, 11, 3, 7, 5, 6, 3), strict=True))
    args = [f32(*(size[n] for n in labels)) for labels in inputs]
    backwards: list[tuple[int, ...]] = [
        (len(args) - 1 - k, len(args) - 2 - k) for k in range(len(args) - 1)
    ]

    def product(*args: Any) -> Any:
        return jnp.einsum(formula, *args, optimize=backwards)

    module, _ = reassociated(product, *args)
    best = module_of(lowered(lambda *a: jnp.einsum(formula, *a, optimize="optimal"), *args))
    run_pipeline("flatten-calls", best)
    assert dot_flops(module) <= dot_flops(best)


def test_a_low_rank_product_in_a_loop_is_not_multiplied_out() -> None:
    def adapted(x: Any, down: Any, up: Any) -> Any:
        return lax.scan(lambda x, _: (jnp.tanh(x @ (down @ up)), None), x, length=3)[0]

    args = f32(8, 32), f32(32, 2), f32(2, 32)
    module, made = reassociated(adapted, *args)
    assert made == 1
    assert dot_flops(module) == 3 * 2 * 2 * 8 * 32 * 2


def test_a_product_that_is_read_twice_is_not_computed_twice() -> None:
    def both(a: Any, b: Any, c: Any) -> Any:
        ab = a @ b
        return ab, ab @ c

    assert reassociated(both, f32(20, 2), f32(2, 20), f32(20, 2))[1] == 0


def test_products_of_other_precision_or_type_are_left_apart() -> None:
    def mixed(a: Any, b: Any, c: Any) -> Any:
        high = lax.dot(a, b, precision=lax.Precision.HIGHEST)
        wide = lax.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16),
                       preferred_element_type=jnp.float32)  # fmt: skip
        return high @ c, wide @ c

    assert reassociated(mixed, f32(20, 2), f32(2, 20), f32(20, 2))[1] == 0


def test_integers_stay_exact() -> None:
    args = [np.arange(-30, 30, dtype=np.int32).reshape(s) for s in ((20, 3), (3, 20), (20, 3))]
    module = module_of(lowered(lambda a, b, c: (a @ b) @ c, *args))
    assert run_pipeline("reassociate", module).rewrites.total == 1
    np.testing.assert_array_equal(evaluate(module, args)[0], (args[0] @ args[1]) @ args[2])


def test_transposes_of_products_and_of_what_they_read_disappear() -> None:
    def turned(a: Any, b: Any, c: Any) -> Any:
        return (a @ b).T, jnp.tanh(a.T).T @ b, (jnp.maximum(c.T, 0.0) * 2.0).T @ b

    module, _ = reassociated(turned, f32(5, 6), f32(6, 7), f32(8, 6))
    assert "transpose" not in names(module)


def test_one_option_leaves_the_order_and_one_the_transposes() -> None:
    def chain(a: Any, b: Any, c: Any) -> Any:
        return (a @ b) @ c.T

    args = f32(20, 2), f32(2, 20), f32(3, 20)
    kept, _ = reassociated(chain, *args, options="{products=false}")
    assert dot_flops(kept) == 2 * 2 * 20 * 20 + 2 * 20 * 20 * 3
    ordered, _ = reassociated(chain, *args, options="{transposes=false}")
    assert dot_flops(ordered) < dot_flops(kept)
    assert "transpose" in names(ordered)


def test_new_products_come_from_the_lines_of_the_old_ones() -> None:
    module, _ = reassociated(lambda a, b, c: (a @ b) @ c, f32(20, 2), f32(2, 20), f32(20, 2))
    dots = [o for o in operations(main_block(module)) if o.name == "stablehlo.dot_general"]
    assert {source_of(dot).partition(":")[0] for dot in dots} == {"test_reassociate.py"}


def test_no_chain_is_too_long() -> None:
    def chain(*matrices: Any) -> Any:
        product = matrices[0]
        for matrix in matrices[1:]:
            product = product @ matrix
        return product

    args = [f32(12, 2) if k % 2 == 0 else f32(2, 12) for k in range(24)]
    module, _ = reassociated(chain, *args)
    before = module_of(lowered(chain, *args))
    assert dot_flops(module) < dot_flops(before)


def test_a_gradient_keeps_its_values() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh((x @ w["a"]) @ w["b"]) ** 2)

    w = {"a": f32(16, 3), "b": f32(3, 16)}
    reassociated(jax.grad(lambda a, b, x: loss({"a": a, "b": b}, x)), w["a"], w["b"], f32(4, 16))


class FastLinks(Simple):
    """Collectives that cost next to nothing."""

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        return nbytes * 1e-12


def test_what_sharding_makes_cheap_decides_where_time_is_asked_for() -> None:
    """With b split over 8 devices, a product that sums over b is an eighth of the work for each.

    (x w) v takes 2abc + 2acd operations, x (w v) takes 2bcd + 2abd, of which all is split.
    """
    args = f32(64, 64), f32(64, 16), f32(16, 64)
    pins = (
        Boundary("x", pin=((), ("a",))),
        Boundary("w", pin=(("a",), ())),
        Boundary("v", pin=((), ())),
    )

    def first_product(cost: str, model: CostModel, fn: Callable[..., Any]) -> tuple[int, ...]:
        context = PassContext(
            mesh=MeshShape(("a",), (8,)),
            cost_model=model,
            boundaries=Boundaries(pins, (Boundary("result"),)),
        )
        module = module_of(lowered(fn, *args))
        run_pipeline(f"flatten-calls,reassociate{{cost={cost}}}", module, context)
        np.testing.assert_allclose(evaluate(module, args)[0], fn(*args), rtol=1e-3, atol=1e-3)
        dots = (o for o in operations(main_block(module)) if o.name == "stablehlo.dot_general")
        return shape_of(next(dots).results[0])

    for fn in (lambda x, w, v: (x @ w) @ v, lambda x, w, v: x @ (w @ v)):
        assert first_product("flops", FastLinks(), fn) == (64, 16)
        assert first_product("time", FastLinks(), fn) == (64, 64)
        assert first_product("time", Simple(), fn) == (64, 16)  # there is less to add up


def test_times_need_a_mesh() -> None:
    module = module_of(lowered(lambda a, b, c: (a @ b) @ c, f32(4, 4), f32(4, 4), f32(4, 4)))
    with pytest.raises(InputError, match="mesh"):
        run_pipeline("reassociate{cost=time}", module)
