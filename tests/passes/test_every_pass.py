from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.extend.mlir import ir

from autoshard.passes import registry
from autoshard.passes.context import PassContext
from autoshard.passes.instruments import Verify
from autoshard.passes.manager import run_pipeline
from autoshard.passes.module_state import op_counts
from autoshard.passes.numerics import Numerics
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import BUILTINS, info_of, lookup
from autoshard.passes.shard import Sharder
from autoshard.shardings import MeshShape
from tests.lowering import lowered, module_of

MESH = MeshShape(("a", "b"), (4, 2))
X = jax.ShapeDtypeStruct((8, 16), "float32")
W = jax.ShapeDtypeStruct((16, 16), "float32")

Step = Callable[[Any, Any], Any]
STEPS: dict[str, Step] = {
    "dot": lambda x, w: x @ w,
    "dot of a transpose": lambda x, w: x @ w.T,
    "two dots": lambda x, w: x @ (w @ w),
    "nonlinear": lambda x, w: jnp.tanh(x) * 0.5,
    "turned and back": lambda x, w: (x.T + w[:, :8]).T,
    "normalised": lambda x, w: x / (1 + (x * x).sum(-1, keepdims=True)),
    "nested call": lambda x, w: jax.jit(lambda v: v * 2 + v)(x),
    "scan": lambda x, w: jax.lax.scan(lambda c, r: (jnp.sin(c @ w.T), None), x, None, length=2)[0],
    "branch": lambda x, w: jax.lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: (v.T * 2).T, x),
    "einsum": lambda x, w: jnp.einsum("ij,kj,kl->il", x, w, w) / 16,
}

SIMPLE = [
    name
    for name in BUILTINS
    if not any(option.required for option in info_of(name).options)
    and "numerics" in info_of(name).preserves
    and not isinstance(lookup(name), Sharder)
    and name != "partition"
]
"""Built-in passes that can be run anywhere on a program that is whole."""


def program(steps: list[str], gradient: bool) -> ir.Module:
    def fn(x: Any, w: Any) -> Any:
        for step in steps:
            x = STEPS[step](x, w)
        return x

    def loss(x: Any, w: Any) -> Any:
        return (fn(x, w) ** 2).sum()

    return module_of(lowered(jax.grad(loss, argnums=(0, 1)) if gradient else fn, X, W))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.sampled_from([*SIMPLE, "mlir:cse", "mlir:canonicalize"]), min_size=1, max_size=4),
    st.booleans(),
)
def test_random_pipelines_keep_the_values_of_random_programs(
    steps: list[str], gradient: bool, names: list[str], sharded: bool
) -> None:
    text = ",".join([*names, "shard"] if sharded else names)
    context = PassContext(mesh=MESH if sharded else None)
    run_pipeline(text, program(steps, gradient), context, [Numerics(), Verify()])


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_a_built_in_pass_is_idempotent_or_says_why_not(name: str) -> None:
    info = info_of(name)
    if info.not_idempotent or any(option.required for option in info.options):
        return
    module = program(["dot of a transpose", "scan", "einsum", "turned and back"], True)
    context = PassContext(mesh=MESH)
    run_pipeline(f"flatten-calls,{name}", module, context)
    once, counts = str(module), op_counts(module)
    run_pipeline(name, module, PassContext(mesh=MESH))
    assert op_counts(module) == counts
    assert str(module) == once


def test_passes_of_other_distributions_are_found_by_entry_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = importlib.metadata.EntryPoint(
        "test-elsewhere", "tests.passes.elsewhere", "autoshard.passes"
    )
    monkeypatch.setattr(registry, "_entry_points", lambda: {"test-elsewhere": entry})
    assert str(Pipeline.parse("test-elsewhere{times=2}")) == "test-elsewhere{times=2}"
    assert "test-elsewhere" in {info.name for info in registry.registered()}
