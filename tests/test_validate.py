"""The comparison tells agreement from disagreement."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import autoshard
from autoshard.cost_models.compiled import Collective
from autoshard.plan_parts import PlannedCollective
from autoshard.validate import captured_stderr, match_collectives, relative_error
from tests.lowering import mesh_of
from tests.zoo import PROGRAMS


def planned(kind: Any, nbytes: float, devices: int = 4, trips: int = 1) -> PlannedCollective:
    return PlannedCollective(
        kind=kind,
        axes=("a",),
        devices=devices,
        nbytes=nbytes,
        trips=trips,
        seconds=0.0,
        op=0,
        value=0,
        dtype="f32",
        why="a value",
        source="here.py:1",
    )


def compiled(kind: Any, nbytes: int, devices: int = 4, trips: int = 1) -> Collective:
    return Collective(kind, nbytes, devices, (tuple(range(devices)),), trips, "op", "here.py:1")


def test_equal_collectives_match_whatever_their_order() -> None:
    plans = [planned("all_reduce", 8), planned("all_gather", 64), planned("all_reduce", 16)]
    found = [compiled("all_gather", 64), compiled("all_reduce", 16), compiled("all_reduce", 8)]
    assert match_collectives(plans, found) == ((), ())


@pytest.mark.parametrize(
    "other",
    [
        compiled("all_gather", 64),
        compiled("all_reduce", 64, devices=2),
        compiled("all_reduce", 64, trips=3),
        compiled("all_reduce", 68),
    ],
    ids=["kind", "devices", "trips", "bytes"],
)
def test_a_collective_that_differs_is_named_on_both_sides(other: Collective) -> None:
    unnamed, absent = match_collectives([planned("all_reduce", 64)], [other])
    assert len(unnamed) == len(absent) == 1
    assert "here.py:1" in unnamed[0]
    assert "a value" in absent[0]


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_a_compiled_collective_may_be_several_planned_ones_combined(sizes: list[int]) -> None:
    plans = [planned("all_reduce", s) for s in sizes]
    assert match_collectives(plans, [compiled("all_reduce", sum(sizes))]) == ((), ())


def test_collectives_of_a_branch_that_does_not_count_are_not_missed() -> None:
    assert match_collectives([planned("all_reduce", 8, trips=0)], []) == ((), ())


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.nan, 1.0], [0.0, 1.0], np.inf),
        ([-np.inf], [np.inf], np.inf),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.25),
        ([True, False], [True, True], 0.5),
        ([], [], 0.0),
        ([1 + 1j], [1 - 1j], 2 / np.sqrt(2)),
    ],
    ids=str,
)
def test_errors_are_relative_to_the_largest_value(ours: Any, theirs: Any, error: float) -> None:
    assert relative_error(jnp.array(ours), jnp.array(theirs)) == pytest.approx(error)


def test_keys_are_compared_by_their_bits() -> None:
    one, two = jax.random.key(1), jax.random.key(2)
    assert relative_error(one, one) == 0
    assert relative_error(one, two) > 0


def test_what_c_code_writes_to_stderr_is_captured_and_passed_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with captured_stderr() as log:
        os.write(2, b"from C\n")
    assert "from C" in log[0]
    assert "from C" in capfd.readouterr().err


def test_a_plan_that_says_something_else_is_found_out() -> None:
    program = PROGRAMS["mlp_step"]
    step = autoshard(program.fn, mesh_of(4, 2))
    plan = step.plan(*program.values())
    ops = tuple(replace(op, flops=2 * op.flops) for op in plan.ops)
    wrong = replace(
        plan,
        ops=ops,
        collectives=plan.collectives[1:],
        predicted=replace(plan.predicted, flops=2 * plan.predicted.flops),
    )
    lying = autoshard(program.fn, mesh_of(4, 2), plan=wrong)
    found = lying.validate(*program.values(), repeats=1)
    assert found.compiled.flops is not None
    assert found.predicted.flops == pytest.approx(2 * found.compiled.flops)
    assert any(d.what == "flops" and d.source.startswith("zoo.py:") for d in found.disagreements)
    assert len(found.unnamed_collectives) == min(1, len(plan.collectives))
    assert "where they part" in str(found)


def test_with_shapes_alone_nothing_runs() -> None:
    program = PROGRAMS["mlp_step"]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.values())
    found = autoshard(program.fn, mesh_of(4, 2)).validate(*shapes)
    assert found.max_relative_error is None
    assert found.trials_s == ()
    assert found.compiled.flops == found.predicted.flops


def test_arguments_are_not_consumed_although_donated() -> None:
    program = PROGRAMS["mlp_step"]
    values = jax.tree.map(jnp.asarray, program.values())
    step = autoshard(program.fn, mesh_of(4, 2), donate_argnums=program.donate)
    found = step.validate(*values, repeats=3)
    assert len(found.trials_s) == 3
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(values))


def test_a_compiled_program_above_the_memory_limit_is_told() -> None:
    x = np.ones((64, 64), np.float32)
    held = autoshard(lambda x: jnp.tanh(x @ x), mesh_of(4, 2), memory_limit=2**20).validate(x)
    assert held.memory_limit == 2**20
    assert "memory limit" not in str(held)
    over = replace(held, compiled=replace(held.compiled, peak_bytes=2**20 + 2048))
    assert "needs 2 KiB more than the memory limit of 1 MiB" in str(over)
