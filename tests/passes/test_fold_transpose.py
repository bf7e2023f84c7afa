from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from autoshard.passes.context import PassContext, Rewrites
from autoshard.passes.evaluate import evaluate, random_arguments
from autoshard.passes.manager import run_pipeline
from autoshard.program import main_block, operations
from tests.lowering import lowered, module_of

X, Y = jnp.ones((3, 4)), jnp.ones((5, 4))
B = jnp.ones((2, 3, 4))


def module(fn: Callable[..., Any], *args: Any) -> ir.Module:
    return module_of(lowered(fn, *args))


def transposes(m: ir.Module) -> int:
    return Counter(o.name for o in operations(main_block(m)))["stablehlo.transpose"]


def looped(x: Any, y: Any) -> Any:
    def body(i: Any, c: Any) -> Any:
        return jax.lax.cond(c.sum() > 0, lambda c: c + (x @ y.T).T.T, lambda c: c, c)

    return jax.lax.fori_loop(0, 3, body, jnp.ones((3, 5)))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "transpose of transpose": (lambda x: x.T.T + 1, (X,), 0),
    "three transposes": (lambda b: b.transpose(1, 2, 0).transpose(2, 1, 0), (B,), 1),
    "dot of a transpose": (lambda x, y: x @ y.T, (X, Y), 0),
    "dot of two transposes": (lambda x, y: x.T.T @ y.T, (X, Y), 0),
    "batched dot": (lambda b: jnp.einsum("bij,bjk->bik", b, b.transpose(0, 2, 1)), (B,), 0),
    "free dimensions out of order": (
        lambda b, y: jax.lax.dot_general(b.transpose(1, 0, 2), y, (((2,), (1,)), ((), ()))),
        (B, Y),
        1,
    ),
    "broadcast of a transpose": (
        lambda x: jax.lax.broadcast_in_dim(x.T, (2, 4, 3), (1, 2)),
        (X,),
        0,
    ),
    "transpose of a constant": (lambda x: x + jnp.ones((4, 3)).T, (X,), 0),
    "transpose of a literal": (lambda x: x + jnp.full((3, 4), 2.0).T.T, (X,), 0),
    "inside a loop and a branch": (looped, (X, Y), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_transposes_are_folded_and_values_stay(case: str) -> None:
    fn, args, left = CASES[case]
    m = module(fn, *args)
    arguments = random_arguments(m, seed=1)
    before = evaluate(m, arguments)
    run_pipeline("flatten-calls,fold-transpose", m)
    m.operation.verify()
    assert transposes(m) == left
    for a, b in zip(before, evaluate(m, arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_rewrites_are_counted_and_stop_at_a_limit() -> None:
    def fn(x: Any, y: Any) -> Any:
        return (x @ y.T).T + y @ x.T

    heard: list[str] = []
    for limit, left in ((None, 1), (1, 2), (0, 3)):
        m = module(fn, X, Y)
        heard.clear()
        context = PassContext(rewrites=Rewrites(limit, lambda r: heard.append(str(r))))
        run_pipeline("fold-transpose", m, context)
        assert transposes(m) == left
        assert context.rewrites.total == 3 - left == len(heard)
        assert all("dot-of-transpose-right on dot_general at test_fold" in h for h in heard)


def test_source_lines_survive() -> None:
    m = module(lambda x, y: x @ y.T, X, Y)
    run_pipeline("fold-transpose", m)
    dot = next(o for o in operations(main_block(m)) if o.name == "stablehlo.dot_general")
    assert "test_fold_transpose.py" in str(dot.location)
