"""Products beside their collectives: the same values, FLOPs and bytes; gains as priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.cost_models import named_cost_model
from autoshard.cost_models.compiled import CompiledProgram, read_compiled
from autoshard.cost_models.protocol import CostModel
from autoshard.passes.collective_matmul import Overlap
from autoshard.passes.context import PassContext
from autoshard.passes.manager import run_pipeline
from autoshard.program import main_block, operations, source_of
from autoshard.shardings import MeshShape
from tests.lowering import Simple, mesh_of, module_of

SHAPE = MeshShape(("a", "b"), (4, 2))


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def gather(x: Any, dim: int = 0, axis: Any = "a") -> Any:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(x: Any, dim: int = 0, axis: Any = "a") -> Any:
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def batched(x: Any, w: Any) -> Any:
    return jnp.einsum("bij,bjk->bik", x, w)


X, W, PAIR = f32(32, 8), f32(8, 8), (P("a"), P())
BATCH, WEIGHTS = f32(8, 3, 8), f32(8, 8, 4)
SUMMED = (P(None, "a"), P("a"))

CASES: dict[str, tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]] = {
    "gathered rows": (lambda x, w: gather(x) @ w, PAIR, P(), (X, W)),
    "gathered by two products": (lambda x, w: (lambda y: (y @ w, y @ (w + 1)))(gather(x)),
                                 PAIR, P(), (X, W)),
    "gathered columns": (lambda x, w: w @ gather(x, 1), (P(None, "a"), P()), P(), (f32(8, 32), W)),
    "gathered and summed": (lambda x, w: w @ gather(x), PAIR, P(), (X, f32(8, 32))),
    "gathered batch": (lambda x, w: batched(gather(x), w), PAIR, P(), (BATCH, WEIGHTS)),
    "scattered rows": (lambda x, w: scatter(x @ w), SUMMED, P("a"), (X, W)),
    "scattered columns": (lambda x, w: scatter(x @ w, 1), SUMMED, P(None, "a"), (X, W)),
    "scattered batch": (lambda x, w: scatter(batched(x, w)),
                        (P(None, None, "a"), P(None, "a")), P("a"), (BATCH, WEIGHTS)),
    "over both axes": (lambda x, w: gather(x, 0, ("a", "b")) @ w,
                       (P(("a", "b")), P()), P(), (X, W)),
    "in a loop": (lambda x, w: lax.scan(
        lambda c, _: (scatter(jnp.tanh(gather(c) @ w) @ w.T) / 4, None), x, length=3)[0],
        PAIR, P("a"), (X, W)),
}  # fmt: skip

WHOLE = (lambda x, w: (lambda y: (y @ w, y + 1))(gather(x)), PAIR, P(), (X, W))


def decompose(
    name: str, options: str, model: CostModel | None = None
) -> tuple[CompiledProgram, CompiledProgram, PassContext, float]:
    """A case compiled before and after the pass, and how far apart the values are."""
    fn, specs, out, args = CASES.get(name, WHOLE)
    mapped: Any = jax.shard_map(
        fn, mesh=mesh_of(4, 2), in_specs=specs, out_specs=out, check_vma=False
    )
    plain = jax.jit(mapped).lower(*args).compile()
    lowering = jax.jit(lambda *args: mapped(*args)).lower(*args)
    module = module_of(lowering)
    run_pipeline("flatten-calls", module)
    context = run_pipeline(
        f"collective-matmul{{{options}}}", module, PassContext(mesh=SHAPE, cost_model=model)
    )
    assert module.operation.verify()
    again = run_pipeline(f"collective-matmul{{{options}}}", module, PassContext(mesh=SHAPE))
    assert again.rewrites.total == 0
    sources = [o for o in operations(main_block(module)) if o.name.endswith("permute")]
    assert {source_of(o).partition(":")[0] for o in sources} <= {"test_collective_matmul.py"}
    compiled = lowering.compile()
    error = 0.0
    for got, want in zip(
        jax.tree.leaves(compiled(*args)), jax.tree.leaves(plain(*args)), strict=True
    ):
        error = max(error, float(np.abs(np.asarray(got - want)).max() / np.abs(want).max()))
    return read_compiled(plain), read_compiled(compiled), context, error


@pytest.mark.parametrize("name", CASES)
def test_values_flops_and_bytes_stay(name: str) -> None:
    before, after, context, error = decompose(name, "always=true")
    assert context.rewrites.total == (2 if name == "in a loop" else 1)
    assert error < 1e-6
    assert after.flops == before.flops
    assert after.collective_bytes == before.collective_bytes
    ring = {c.devices for c in after.collectives}
    assert ring == ({8} if name == "over both axes" else {4})
    assert {c.kind for c in after.collectives} == {"permute"}


@pytest.mark.parametrize("name", ["gathered rows", "gathered and summed", "scattered columns"])
def test_half_a_piece_can_travel_each_way(name: str) -> None:
    before, after, _, error = decompose(name, "always=true, both-ways=true")
    assert error < 1e-6
    assert after.flops == before.flops
    assert after.collective_bytes == before.collective_bytes
    assert len(after.collectives) == 2 * 3


def test_a_gather_that_something_else_reads_stays_whole() -> None:
    before, after, context, _ = decompose("read whole", "always=true")
    assert context.rewrites.total == 0
    assert after.collectives == before.collectives


def test_nothing_is_decomposed_without_a_gain_or_a_word() -> None:
    for model in (None, Simple(), named_cost_model("v5e", {"a": 4, "b": 2})):
        _, _, context, _ = decompose("gathered rows", "both-ways=false", model)
        assert context.rewrites.total == 0  # tiny pieces, or devices that overlap nothing


def test_the_gain_is_what_the_model_says_of_the_pieces() -> None:
    """1 ns a FLOP or byte of memory, 1 us and 10 ns a byte for each collective."""
    _, _, context, _ = decompose("gathered rows", "both-ways=false", Simple(compiler="tpu"))
    (found,) = context.results["collective-matmul"]
    assert isinstance(found, Overlap)
    gather_s = 1e-6 + 1e-8 * 32 * 8 * 4 * 3 / 4
    dot_s = 1e-9 * (2 * 32 * 8 * 8 + 4 * (32 * 8 + 8 * 8 + 32 * 8))
    assert found.apart_s == pytest.approx(gather_s + dot_s)
    piece_s = 1e-9 * (2 * 8 * 8 * 8 + 4 * (8 * 8 + 8 * 8 + 8 * 8))
    permute_s = 1e-6 + 1e-8 * 8 * 8 * 4
    assert found.together_s == pytest.approx(3 * max(permute_s, piece_s) + piece_s)
    assert found.gain_s == found.apart_s - found.together_s
    assert context.rewrites.total == 1


def test_a_ring_that_is_too_long_stays() -> None:
    _, _, context, _ = decompose("over both axes", "always=true, limit=4")
    assert context.rewrites.total == 0
