"""Hand-made plans: the shardings that experts would write, and the values they leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.experiments.arrays import ArraySpec
from autoshard.experiments.experts import mesh_shape, sharding_of
from autoshard.experiments.workloads import WORKLOADS, Workload, make
from autoshard.shardings import MeshShape, divides

Compile = Callable[[Any], Any]
MESHES = (
    MeshShape(("x",), (8,)),
    MeshShape(("data", "model"), (4, 2)),
    MeshShape(("a", "b", "c"), (2, 2, 2)),
    MeshShape(("a", "b", "c"), (2, 4, 1)),
)
# Small enough to compile 24 times: one layer where a loop over layers is not the point.
OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"blocks": 1},
    "llama": {"layers": 2, "seq": 8},
    "llama_unrolled": {"layers": 1, "seq": 8},
    "moe": {"layers": 1, "seq": 8, "remat": False},
    "moe_ragged": {"layers": 1, "seq": 8, "remat": False},
    "llama_prefill": {"layers": 1},
    "llama_decode": {"layers": 1, "seq": 8},
    "flax_transformer": {"layers": 1, "seq": 8},
    "equinox_mixer": {"layers": 1},
    "haiku_lstm": {"layers": 1},
    "dlrm": {},
    "resnet": {},
    "conformer": {"layers": 1},
    "diffusion_transformer": {"layers": 1},
}
CASES = [(name, expert) for name in WORKLOADS for expert in make(name).experts]


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def as_tuples(sharding: P, rank: int) -> tuple[tuple[str, ...], ...]:
    entries = [*sharding, *[None] * (rank - len(sharding))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("name", "expert"), CASES)
def test_every_array_is_split_evenly_with_no_axis_used_twice(
    name: str, expert: str, mesh: MeshShape
) -> None:
    workload = make(name)
    shardings = workload.experts[expert].in_shardings(mesh)
    assert structure(shardings) == structure(workload.args)
    for leaf, sharding in zip(
        jax.tree.leaves(workload.args), jax.tree.leaves(shardings), strict=True
    ):
        axes = as_tuples(sharding, len(leaf.shape))
        assert divides(leaf.shape, axes, mesh)
        used = [axis for dim in axes for axis in dim]
        assert len(used) == len(set(used))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("name", "expert"), CASES)
def test_what_replaces_a_donated_argument_is_split_as_that_argument(
    name: str, expert: str, mesh: MeshShape
) -> None:
    workload = make(name)
    plan = workload.experts[expert]
    results = plan.out_shardings(mesh)
    for number, result in zip(workload.donate_argnums, results, strict=False):
        assert plan.in_shardings(mesh)[number] == result


@pytest.mark.parametrize(
    ("expert", "query", "key", "head", "down", "tokens"),
    [
        ("dp", P(), P(), P(), P(), P(("data", "model"))),
        (
            "fsdp",
            P(None, ("data", "model")),
            P(None, ("data", "model")),
            P(("data", "model")),
            P(None, None, ("data", "model")),
            P(("data", "model")),
        ),
        (
            "tp",
            P(None, None, "model"),
            P(None, None, "model"),
            P(None, "model"),
            P(None, "model"),
            P("data"),
        ),
        (
            "2d",
            P(None, "data", "model"),
            P(None, "data", "model"),
            P("data", "model"),
            P(None, "model", "data"),
            P("data"),
        ),
    ],
)
def test_llama_is_split_as_in_the_textbook(
    expert: str, query: P, key: P, head: P, down: P, tokens: P
) -> None:
    workload = make("llama")
    state, batch = workload.experts[expert].in_shardings(MESHES[1])
    layers = state.params["layers"]
    got = (layers["wq"], layers["wk"], state.params["head"], layers["w_down"], batch["tokens"])
    assert got == (query, key, head, down, tokens)
    assert state.m == state.v == state.params
    assert state.step == P()


def test_decoding_splits_the_cache_by_heads_first_and_by_sequences_after() -> None:
    _, cache, tokens, _ = make("llama_decode").experts["tp"].in_shardings(MESHES[1])
    assert cache["k"] == P(None, "model", None, "data")  # four heads fill only the first axis
    assert tokens == P()


def test_experts_of_a_mixture_go_to_the_model_axis() -> None:
    state, _ = make("moe").experts["ep"].in_shardings(MESHES[1])
    assert state.params["layers"]["w_up"] == P(None, "model", "data")


def test_positions_of_a_prompt_go_to_the_model_axis() -> None:
    params, cache, tokens, _ = make("llama_prefill").experts["cp"].in_shardings(MESHES[1])
    assert tokens == P("data", "model")
    assert cache["k"] == P(None, "data")
    assert params["layers"]["wq"] == P()


@pytest.mark.parametrize(
    ("expert", "large"),
    [
        ("dp", P()),
        ("table", P(("data", "model"))),
        ("row", P(None, ("data", "model"))),
        ("column", P(None, None, ("data", "model"))),
        ("table_row", P("data", "model")),
    ],
)
def test_large_embedding_tables_are_split_and_small_ones_are_not(expert: str, large: P) -> None:
    params, batch = make("dlrm").experts[expert].in_shardings(MESHES[1])
    assert params["large_tables"] == large
    assert set(params["small_tables"]) == {P()}
    assert batch["large_ids"] == P(("data", "model"))


def test_a_dimension_that_no_axis_divides_stays_whole() -> None:
    mesh = MeshShape(("x", "y"), (2, 4))
    spec = ArraySpec((6, 3), ("heads", "embed"))
    rules = {"heads": ("x", "y"), "embed": ("x", "y")}
    assert sharding_of(spec, rules, mesh) == (("x",), ())


def test_any_kind_of_mesh_is_read() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert mesh_shape(mesh) == mesh_shape(mesh.abstract_mesh) == MESHES[1]


@functools.cache
def unsharded(name: str, quick_compile: Compile) -> tuple[Workload, Any, Any]:
    workload = make(name, **OPTIONS[name])
    args = workload.init(0)
    step = quick_compile(jax.jit(workload.fn).lower(*workload.args))
    return workload, args, jax.tree.map(np.asarray, step(*args))


@pytest.mark.parametrize(("name", "expert"), CASES)
def test_an_experts_plan_leaves_the_values_alone(
    name: str, expert: str, quick_compile: Compile
) -> None:
    workload, args, expected = unsharded(name, quick_compile)
    plan = workload.experts[expert]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def named(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)

    step = jax.jit(
        workload.fn,
        in_shardings=named(plan.in_shardings(mesh)),
        out_shardings=named(plan.out_shardings(mesh)),
    )
    placed = jax.device_put(args, named(plan.in_shardings(mesh)))
    result = quick_compile(step.lower(*workload.args))(*placed)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True
    ):
        # Integers (keys, counters) come out exactly.
        relative = workload.tolerance.get(str(b.dtype), 0.0)
        bound = relative * np.max(np.abs(b))
        difference = np.max(np.abs(np.asarray(a, np.float64) - b))
        assert difference <= bound, jax.tree_util.keystr(path)
