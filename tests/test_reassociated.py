"""Partial results that are only added up are combined once on TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, autoshard
from autoshard.cost_models.topology import Topology
from tests.lowering import mesh_of

P = jax.P
A = jax.ShapeDtypeStruct((512, 4096), jnp.bfloat16)
B = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)


def planned(fn: Callable[..., Any], mesh: Any, terms: int = 2) -> Plan:
    pins = (P("a", "b"), P("b")) * terms
    step = autoshard(fn, mesh, in_shardings=pins, out_shardings=P("a"))
    return step.plan(*(A, B) * terms)


def tpu() -> Any:
    return Topology("v5e:4x4").mesh({"a": 4, "b": 4})


def two(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a @ b + c @ d


def three(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    return a @ b + c @ d + e @ f


def difference(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a @ b - c @ d


def read_again(a: Any, b: Any, c: Any, d: Any) -> Any:
    left = a @ b
    return left + c @ d, jnp.sin(left)


def converted(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a @ b).astype(jnp.float32) + (c @ d).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fn", "terms", "reductions"),
    [(two, 2, 1), (three, 3, 1), (difference, 2, 2), (read_again, 2, 2), (converted, 2, 2)],
)
def test_sums_of_partial_results_are_combined_once(
    fn: Callable[..., Any], terms: int, reductions: int
) -> None:
    plan = planned(fn, tpu(), terms)
    kinds = [c.kind for c in plan.collectives]
    assert [kind for kind in kinds if kind != "all_gather"] == [kinds[0]] * reductions
    assert kinds[0] in ("all_reduce", "reduce_scatter")


def test_the_cpu_compiler_combines_each() -> None:
    plan = planned(two, mesh_of(4, 2))
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * 2
