"""Weights in few bits: against rounding by hand, and the accuracy that is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from autoshard import InputError
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.evaluate import evaluate
from autoshard.passes.manager import run_pipeline
from autoshard.passes.quantize import Quantize, accuracy
from autoshard.program import Boundary
from tests.lowering import lowered, module_of


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / 4


def flat(fn: Callable[..., Any], *args: Any) -> ir.Module:
    module = module_of(lowered(fn, *args))
    run_pipeline("flatten-calls", module)
    return module


def quantized(
    options: str, fn: Callable[..., Any], *args: Any, context: PassContext | None = None
) -> tuple[Any, PassContext]:
    module = flat(fn, *args)
    context = run_pipeline(f"quantize{{{options}}}", module, context)
    assert module.operation.verify()
    first = context.results["quantize"]
    assert run_pipeline(f"quantize{{{options}}}", module, context).rewrites.total == 0
    context.publish("quantize", first)
    return evaluate(module, jax.tree.leaves(args)), context


def rounded(w: Any, axis: Any, top: float = 127.0) -> tuple[Any, Any]:
    greatest = np.abs(w).max(axis, keepdims=True)
    scale = np.where(greatest == 0, 1.0, greatest / np.float32(top)).astype(np.float32)
    return np.clip(np.round(w / scale), -top, top), scale


X, W = f32(5, 32), f32(32, 40)


@pytest.mark.parametrize(("kind", "top"), [("int8", 127.0), ("int4", 7.0)])
def test_a_weight_has_one_scale_for_each_of_its_columns(kind: str, top: float) -> None:
    (found,), context = quantized(f"dtype={kind}", lambda x, w: x @ w, X, W)
    q, scale = rounded(W, 0, top)
    np.testing.assert_allclose(found, X @ q.astype(np.float32) * scale, rtol=2e-5, atol=1e-5)
    (dot,) = context.results["quantize"]
    assert (dot.argument, dot.nbytes) == ("arg1", 32 * 40 * 4)
    assert dot.stored_bytes == 32 * 40 * (1 if kind == "int8" else 0.5)
    assert dot.source.startswith("test_quantize.py:")


def test_activations_are_rounded_row_by_row_and_multiplied_as_integers() -> None:
    module = flat(lambda x, w: x @ w, X, W)
    run_pipeline("quantize{weights-only=false}", module)
    assert "(tensor<5x32xi8>, tensor<32x40xi8>) -> tensor<5x40xi32>" in str(module)
    (qx, sx), (qw, sw) = rounded(X, 1), rounded(W, 0)
    exact = qx.astype(np.int64) @ qw.astype(np.int64) * sx * sw
    np.testing.assert_allclose(evaluate(module, (X, W))[0], exact, rtol=1e-5)


def test_a_channel_of_zeros_stays_zero() -> None:
    w = W.copy()
    w[:, 3] = 0.0
    (found,), _ = quantized("dtype=int8", lambda x, w: x @ w, X, w)
    np.testing.assert_array_equal(found[:, 3], 0.0)
    assert np.isfinite(found).all()


def model(params: Any, x: Any) -> Any:
    h = jnp.tanh(jnp.einsum("bsd,dhk->bshk", x, params["q"]))
    y = jnp.einsum("bshk,hkd->bsd", h, params["o"])
    y = jax.lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), y, params["layers"])[0]
    return jnp.einsum("bsd,vd->bsv", y, params["table"])


PARAMS = {"q": f32(32, 4, 16), "o": f32(4, 16, 32), "layers": f32(3, 32, 32), "table": f32(99, 32)}
ARGS = (PARAMS, f32(2, 5, 32))
NAMES = ("layers", "o", "q", "table", "x")
BOUNDARIES = Boundaries(tuple(map(Boundary, NAMES)), (Boundary("result"),))


def test_weights_of_any_form_are_found_in_loops_too() -> None:
    _, context = quantized("dtype=int8", model, *ARGS, context=PassContext(boundaries=BOUNDARIES))
    found = [each.argument for each in context.results["quantize"]]
    assert sorted(found) == ["layers", "o", "q", "table"]


def test_weights_can_be_named() -> None:
    context = PassContext(boundaries=BOUNDARIES)
    _, context = quantized("weights=[table,q*]", model, *ARGS, context=context)
    assert sorted(d.argument for d in context.results["quantize"]) == ["q", "table"]
    with pytest.raises(InputError, match="called tabel"):
        quantized("weights=tabel", model, *ARGS, context=PassContext(boundaries=BOUNDARIES))


def test_small_weights_and_products_of_activations_stay() -> None:
    def attention(x: Any, w: Any) -> Any:
        y = x @ w
        return y @ y.T

    assert quantized("least=2000", attention, X, W)[1].results["quantize"] == ()
    assert len(quantized("least=1000", attention, X, W)[1].results["quantize"]) == 1


def test_the_report_says_what_each_product_loses() -> None:
    def model(table: Any, x: Any, layers: Any) -> Any:
        return jax.lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, layers)[0] @ table.T

    table, given = PARAMS["table"], (PARAMS["table"], f32(10, 32), PARAMS["layers"])
    module = flat(model, *given)
    before = str(module)
    found = accuracy(module, Quantize(dtype="int4"), given)
    assert str(module) == before
    last, inner = found.dots
    assert (inner.quantized.argument, last.quantized.argument) == ("arg2", "arg0")
    # The last product's error is that of the result: nothing comes after it.
    assert last.relative_error == pytest.approx(last.result_error, rel=1e-3)
    q, scale = rounded(table, 1, 7.0)
    (exact,) = evaluate(module, given)
    hidden = np.linalg.lstsq(table, exact.T, rcond=None)[0].T
    off = np.linalg.norm(hidden @ (q * scale - table).T)
    assert last.result_error == pytest.approx(off / np.linalg.norm(exact), rel=1e-3)
    # The inner one's is over all iterations, each on what it is given in the exact program.
    carry, lost, norm = given[1], 0.0, 0.0
    for w in given[2]:
        q, scale = rounded(w, 0, 7.0)
        lost += float(np.sum((carry @ (q * scale - w)) ** 2))
        norm += float(np.sum((carry @ w) ** 2))
        carry = carry + np.tanh(carry @ w)
    assert inner.relative_error == pytest.approx((lost / norm) ** 0.5, rel=1e-3)
    assert max(d.result_error for d in found.dots) < found.result_errors[0]
    assert "all together" in str(found)


def test_four_bit_activations_are_refused() -> None:
    with pytest.raises(InputError, match="four-bit"):
        quantized("dtype=int4, weights-only=false", lambda x, w: x @ w, X, W)


def test_eight_bit_floats_keep_their_own_rounding() -> None:
    (found,), _ = quantized("dtype=float8_e4m3fn", lambda x, w: x @ w, X, W)
    scale = np.abs(W).max(0, keepdims=True) / np.float32(448.0)
    q = (W / scale).astype(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(found, X @ q * scale, rtol=2e-5, atol=1e-5)
