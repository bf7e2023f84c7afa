"""Whatever a caller gives that is of the wrong kind is refused in words, with a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import AutoshardError, InputError, Plan, autoshard, register_rule
from tests.lowering import mesh_of

MESH = mesh_of(4, 2)
X, W = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)


def function(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


STEP = autoshard(function, MESH)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return STEP.plan(X, W)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"donate_argnums": "x"}, "donate_argnums has 'x'"),
        ({"donate_argnums": 1.5}, "donate_argnums has 1.5"),
        ({"donate_argnums": ("x",)}, "donate_argnums has 'x'"),
        ({"donate_argnums": (None,)}, "donate_argnums has None"),
        ({"static_argnums": 0.0}, "static_argnums has 0.0"),
        ({"donate_argnames": 3}, "donate_argnames has 3"),
        ({"static_argnames": [3]}, "static_argnames has 3"),
        ({"in_shardings": {"x": P(3)}}, "the spec of x has 3"),
        ({"progress": 3}, "progress is a int"),
        ({"memory_limit": "4GiB"}, "memory limit of '4GiB'"),
        ({"time_limit_s": None}, "time limit of None"),
        ({"plan": "plan.json"}, "plan is a str"),
    ],
)
def test_an_option_of_another_kind_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoshardError, match=says):
        autoshard(function, MESH, **options).plan(X, W)


def test_numbers_of_numpy_count_as_numbers() -> None:
    position: Any = np.int64(0)
    assert autoshard(function, MESH, donate_argnums=position).convention.donate_argnums == (0,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": 1.5}, "repeats is 1.5"),
        ({"repeats": "3"}, "repeats is '3'"),
        ({"repeats": True}, "repeats is True"),
        ({"budget_s": -1}, "budget_s is -1"),
        ({"budget_s": "1"}, "budget_s is '1'"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
    ],
)
def test_a_validation_needs_something_to_measure(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        STEP.validate(X, W, **options)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda p: p.explain(None), "asked for by a NoneType"),
        (lambda p: p.explain("x", pins=["a"]), "'a' is no sharding"),
        (lambda p: p.explain("x", pins="a"), "'a' is no sharding"),
        (lambda p: p.explain("x", alternatives=-1), "alternatives is -1"),
        (lambda p: p.explain("x", alternatives="2"), "alternatives is '2'"),
        (lambda p: p.why(None), "asked for by a NoneType"),
        (lambda p: p.why(1.5), "asked for by a float"),
        (lambda p: p.why([1]), "asked for by a list"),
        (lambda p: p.why(True), "asked for by a bool"),
        (lambda p: p.why(0, program=3), "program is given as a int"),
        (lambda p: p.lint(large_bytes="x"), "large_bytes is 'x'"),
        (lambda p: p.lint(large_bytes=-1), "large_bytes is -1"),
        (lambda p: p.lint(large_bytes=1e6), "large_bytes is 1000000.0"),
        (lambda p: p.to_flax_rules(3), "named by a int"),
        (lambda p: p.diff(3), "compared with a int"),
        (lambda p: p.save(None), "where to save the plan is None"),
        (lambda p: p.save(3), "where to save the plan is 3"),
        (lambda p: p.save(Path.cwd()), "where to save the plan is a folder"),
        (lambda p: p.write_stablehlo(None), "where to write the program is None"),
        (lambda p: type(p).load(None), "the plan's file is None"),
        (lambda p: type(p).load(99), "the plan's file is 99"),
        (lambda p: type(p).load(Path.cwd()), "the plan's file is a folder"),
        (lambda p: type(p).from_json([1]), "a list is no plan"),
    ],
)
def test_a_question_of_another_kind_is_refused(
    plan: Plan, ask: Callable[[Plan], Any], says: str
) -> None:
    with pytest.raises(AutoshardError, match=says):
        ask(plan)


def test_one_sharding_may_be_asked_for_alone(plan: Plan) -> None:
    (alternative,) = plan.explain("x", pins=P("a")).alternatives  # type: ignore[arg-type]
    assert alternative.sharding == (("a",), ())


def _no_rule(operands: Any, results: Any) -> str:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (_no_rule, r"raised KeyError: 'boom'\n  at:  .*\(\(8, 8\),\) -> \(\(8, 8\),\)"),
        (lambda shapes: "i -> i", "raised TypeError"),
        (lambda a, b: 3, "returned a int"),
        (lambda a, b: "i", "cannot be read"),
    ],
)
def test_an_error_in_a_rule_names_the_rule_and_the_shapes(rule: Any, says: str) -> None:
    with (
        register_rule("stablehlo.fft", rule),
        pytest.raises(InputError, match=says),
    ):
        autoshard(lambda x: jnp.fft.fft(x), MESH).plan(jax.ShapeDtypeStruct((8, 8), jnp.complex64))
