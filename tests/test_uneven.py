"""What the mesh does not divide is no error: it is padded as priced, and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import autoshard
from autoshard.experiments.random_plans import RandomPlans
from autoshard.plan import Plan
from autoshard.shardings import MeshShape, divides, loosened, pads
from autoshard.validate import Validation
from tests.lowering import Simple, mesh_of

MESHES = ((3,), (5,), (6,), (7,), (8,), (3, 2), (4, 2), (2, 2, 2))
# From jax 0.12 on XLA may replicate what is gathered along one axis and sent along another, if its
# pieces are padded (see docs/decisions.md): values and most bytes are right.
REPLICATES = tuple(map(int, jax.__version__.split(".")[:2])) > (0, 10)


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def attention(x: Any, w: Any) -> Any:
    """[B, T, D] by [D, H, K]: heads that nothing divides."""
    q = jnp.einsum("btd,dhk->bthk", x, w) / 4
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, q))
    return jnp.einsum("bhts,bshk,dhk->btd", scores, q, w) / 8


def language_model(x: Any, w: Any, t: Any) -> Any:
    def loss(w: Any) -> Any:
        logits = jnp.tanh(x) @ w
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(t)), t])

    return jax.value_and_grad(loss)(w)


def regrouped(x: Any, w: Any, t: Any) -> Any:
    """Reshapes that merge and split what is uneven, pieces of it, and sums over it."""
    y = jnp.tanh(x @ w)
    flat = (y.reshape(-1) * 2).reshape(w.shape[1], -1)
    parts = jnp.concatenate([flat[1:], flat[:1] * 3]).T + jnp.pad(flat, ((0, 0), (1, 0)))[:, 1:].T
    return parts.sum(0), jnp.max(y, -1) + t, y[:, ::2] @ w[:, ::2].T


def figures_agree(found: Validation, tolerance: float = 2e-5) -> None:
    assert found.max_relative_error is not None
    assert found.max_relative_error <= tolerance, found.worst_value
    assert found.involuntary_remat == 0
    assert found.unnamed_collectives == ()
    for figure in ("flops", "collective_bytes"):
        predicted, compiled = (getattr(f, figure) for f in (found.predicted, found.compiled))
        assert predicted == pytest.approx(compiled, rel=1e-3), figure


@settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    rows=st.integers(1, 40),
    columns=st.integers(2, 40),
    width=st.sampled_from([1, 3, 5, 8]),
    sizes=st.sampled_from([m for m in MESHES if len(m) == 1 or not REPLICATES]),
    fn=st.sampled_from([language_model, regrouped]),
    seed=st.integers(0, 60),
)
def test_a_random_plan_of_odd_sizes_runs_as_written(
    rows: int, columns: int, width: int, sizes: tuple[int, ...], fn: Callable[..., Any], seed: int
) -> None:
    args = normal(rows, width), normal(width, columns), np.arange(rows, dtype=np.int32) % columns
    step = autoshard(fn, mesh_of(*sizes), solver=RandomPlans(seed, (0.5, 1.0)))
    figures_agree(step.validate(*args, repeats=1))


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((4,), 25), pytest.param((4, 2), 13, marks=pytest.mark.slow)],
    ids=str,
)
def test_heads_are_padded_rather_than_computed_on_every_device(
    sizes: tuple[int, ...], heads: int
) -> None:
    x, w = normal(1, 33, 40), normal(40, heads, 16)
    mesh = mesh_of(*sizes)
    step = autoshard(attention, mesh, cost_model=Simple())
    plan, found = step.plan(x, w), step.validate(x, w, repeats=1)
    figures_agree(found)
    assert plan.is_padded
    assert all(divides(b.shape, b.sharding, plan.mesh) for b in (*plan.arguments, *plan.results))
    flops = autoshard(attention, mesh_of(1)).plan(x, w).predicted.flops
    assert plan.predicted.flops < 0.5 * flops


def vocabulary(size: int, mesh: tuple[int, ...] = (8,)) -> Plan:
    def logits(h: Any, head: Any) -> Any:
        return jax.nn.logsumexp(h @ head, axis=-1)

    return autoshard(logits, mesh_of(*mesh), cost_model=Simple()).plan(
        jax.ShapeDtypeStruct((3, 64), np.float32), jax.ShapeDtypeStruct((64, size), np.float32)
    )


def test_a_vocabulary_of_50257_is_split_and_the_plan_says_what_that_wastes() -> None:
    plan = vocabulary(50257)
    (product,) = (op for op in plan.ops if op.name == "stablehlo.dot_general")
    assert product.flops == 2 * 3 * 64 * 6283  # 50257 / 8, rounded up
    (logits,) = (p for p in plan.uneven.padded if p.name.startswith("dot_general"))
    assert logits.sharding == ((), ("a",))
    assert logits.waste_bytes == 4 * 3 * 6283 - 4 * 3 * 50257 // 8
    assert logits.waste_flops == pytest.approx(2 * 3 * 64 * (6283 - 50257 / 8))
    whole = plan.uneven.whole[0]
    assert (whole.size, whole.ways, whole.pad_to) == (50257, 8, 50264)
    assert "head" in whole.values[0]
    text = str(plan)
    assert "padded on the way" in text
    assert "pad to 50264" in text
    assert Plan.from_json(plan.to_json()).uneven == plan.uneven


def test_an_even_vocabulary_leaves_nothing_to_say() -> None:
    plan = vocabulary(512)
    assert not plan.is_padded
    assert not plan.uneven.loosened
    assert 512 not in {w.size for w in plan.uneven.whole}


@pytest.mark.parametrize(
    ("shape", "spec", "kept"),
    [
        ((25, 8), P("a"), P("a")),  # four parts of 7
        ((9, 8), P(("a", "b")), P()),  # eight parts of 2 would be 16, four of 3 12
        ((10, 8), P(("b", "a")), P("b")),
        ((1, 8), P("a", "b"), P(None, "b")),
        ((0, 8), P("a"), P()),
    ],
    ids=str,
)
def test_a_constraint_is_padded_if_that_wastes_little_and_else_loosened_with_a_note(
    shape: tuple[int, ...], spec: Any, kept: Any
) -> None:
    mesh = mesh_of(4, 2)

    def fn(x: Any) -> Any:
        return jnp.sin(jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec)))

    x = normal(*shape)
    plan = autoshard(fn, mesh).plan(x)
    (constraint,) = (op for op in plan.ops if op.name == "sdy.sharding_constraint")
    assert NamedSharding(mesh, kept).is_equivalent_to(_named(mesh, constraint.results[0]), 2)
    assert bool(plan.uneven.loosened) == (kept != spec)
    assert all(str(spec) in note and "test_uneven.py" in note for note in plan.uneven.loosened)
    np.testing.assert_allclose(autoshard(fn, mesh)(x), np.sin(2 * x), rtol=1e-6)


def _named(mesh: Any, sharding: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*sharding))


@pytest.mark.parametrize("batch", [0, 1, 3, 7])
def test_a_batch_smaller_than_the_mesh_is_no_error(batch: int) -> None:
    fn = jax.jit(lambda x, w: (jnp.tanh(x @ w).sum(), x[::-1] @ w))
    x, w = normal(batch, 16), normal(16, 6)
    for ours, theirs in zip(autoshard(fn, mesh_of(4, 2))(x, w), fn(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@given(st.integers(1, 300), st.integers(1, 16))
def test_what_is_padded_keeps_two_elements_a_part_and_wastes_a_quarter_at_most(
    size: int, count: int
) -> None:
    part = -(-size // count)
    if pads(size, count):
        assert size % count
        assert part >= 2
        assert part * count <= 1.25 * size
    kept = loosened((size,), (("a",),), MeshShape(("a",), (count,)), padded=True)
    assert bool(kept[0]) == (pads(size, count) or size % count == 0)
