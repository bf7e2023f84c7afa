"""XLA still gets these shardings wrong: when one of these tests fails, a trap can be opened."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import autoshard
from autoshard.cost_models.compiled import read_compiled
from tests.lowering import mesh_of

MESH = mesh_of(4, 2)


def placed(*spec: str | None) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


@pytest.mark.parametrize("method", ["set", "add", "max"])
def test_a_scatter_of_one_index_writes_neighbouring_rows(method: str) -> None:
    x, row = np.arange(128, dtype=np.float32).reshape(16, 8), -np.arange(8, dtype=np.float32)

    def fn(x: Any, i: Any, row: Any) -> Any:
        rows = lax.with_sharding_constraint(x, placed("a"))
        return getattr(rows.at[i], method)(row, unique_indices=True, indices_are_sorted=True)

    sharded = jax.jit(fn, in_shardings=placed(), out_shardings=placed("a"))
    expected = x.copy()
    expected[5] = {"set": row, "add": x[5] + row, "max": np.maximum(x[5], row)}[method]
    assert not np.array_equal(sharded(x, np.int32(5), row), expected)


def test_a_sum_that_starts_from_five_counts_the_start_once_per_device() -> None:
    x = np.ones((16, 8), np.float32)

    def fn(x: Any) -> Any:
        return lax.reduce(x, np.float32(5), lax.add, (0,))

    sharded = jax.jit(fn, in_shardings=placed("a"), out_shardings=placed())
    np.testing.assert_array_equal(sharded(x), np.full(8, 16 + 4 * 5))


@pytest.mark.parametrize("method", [lax.bitwise_or, lax.bitwise_and, lax.bitwise_xor])
def test_bits_of_integers_are_not_combined_across_devices(method: Any) -> None:
    x = np.arange(128, dtype=np.int32).reshape(16, 8)

    def fn(x: Any) -> Any:
        return lax.reduce(x, np.int32(-1 if method is lax.bitwise_and else 0), method, (0,))

    with pytest.raises(jax.errors.JaxRuntimeError, match="Unsupported reduction"):
        jax.jit(fn, in_shardings=placed("a"), out_shardings=placed())(x)
    ours = autoshard(fn, MESH, in_shardings=PartitionSpec("a"))
    np.testing.assert_array_equal(ours(x), fn(x))


def test_a_maximum_over_devices_forgets_nan() -> None:
    """Known, and not avoided: columns without a NaN of their own are right."""
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    x[3, 1] = np.nan
    largest = jax.jit(lambda x: x.max(0), in_shardings=placed("a"), out_shardings=placed())(x)
    assert not np.isnan(largest).any()
    np.testing.assert_array_equal(np.delete(largest, 1), np.delete(x.max(0), 1))


def test_the_gradient_of_a_kernel_is_wrong_when_split_along_space() -> None:
    rng = np.random.default_rng(0)
    x = jax.numpy.asarray(rng.normal(size=(8, 16, 16, 8)), np.float32)
    g = jax.numpy.asarray(rng.normal(size=(8, 16, 16, 16)), np.float32)

    def fn(x: Any, g: Any) -> Any:
        x = lax.with_sharding_constraint(x, placed(None, "a"))
        g = lax.with_sharding_constraint(g, placed(None, "a"))
        return lax.conv_general_dilated(
            x, g, (1, 1), [(1, 1), (1, 1)], dimension_numbers=("CHWN", "IHWO", "HWNC")
        )

    ours = jax.jit(fn, in_shardings=placed(), out_shardings=placed())(x, g)
    expected = lax.conv_general_dilated(
        x, g, (1, 1), [(1, 1), (1, 1)], dimension_numbers=("CHWN", "IHWO", "HWNC")
    )
    assert not np.allclose(ours, expected, rtol=1e-2, atol=1e-2)


def test_the_gradient_of_a_depthwise_kernel_is_wrong_when_images_are_split() -> None:
    """Convolutions with groups run on pieces instead; see ``autoshard.grouped``."""

    def fn(x: Any, g: Any) -> Any:
        return lax.conv_general_dilated(
            x, g, (1,), [(2, 2)], dimension_numbers=("CWN", "IWO", "NWC"), batch_group_count=32
        )

    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(8, 16, 32)).astype(np.float32) for _ in range(2))
    sharded = jax.jit(fn, in_shardings=placed("a"), out_shardings=placed())
    assert not np.allclose(sharded(x, g), jax.jit(fn)(x, g), rtol=1e-2, atol=1e-2)


def test_a_convolution_split_by_groups_of_several_features_is_gathered() -> None:
    def fn(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(
            x, k, (1,), [(2, 2)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
        )

    shapes = (jax.ShapeDtypeStruct(s, np.float32) for s in ((8, 16, 32), (5, 4, 64)))
    split = placed(None, None, "a")
    program = read_compiled(
        jax.jit(fn, in_shardings=split, out_shardings=split).lower(*shapes).compile()
    )
    assert [c.kind for c in program.collectives] == ["all_gather", "all_gather"]


@pytest.mark.parametrize(
    ("fn", "shape", "spec"),
    [
        (lambda x: jnp.fft.fft(x, axis=1), (16, 32), ("a",)),
        (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (8, 16, 16), (None, "a")),
    ],
    ids=["the batch of an FFT", "a dimension of a matrix to decompose"],
)
def test_an_operand_split_so_is_gathered(
    fn: Any, shape: tuple[int, ...], spec: tuple[str | None, ...]
) -> None:
    sharded = jax.jit(fn, in_shardings=placed(*spec), out_shardings=placed(*spec))
    program = read_compiled(sharded.lower(jax.ShapeDtypeStruct(shape, np.float32)).compile())
    assert [c.kind for c in program.collectives] == ["all_gather"]


def test_an_update_split_where_it_fills_a_part_is_gathered() -> None:
    cached, update = (
        jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 32, 16), (8, 16, 16))
    )
    sharded = jax.jit(
        lambda cached, update: lax.dynamic_update_slice(cached, update, (0, 0, 0)),
        in_shardings=(placed(), placed(None, "a")),
        out_shardings=placed(),
    )
    program = read_compiled(sharded.lower(cached, update).compile())
    assert [c.kind for c in program.collectives] == ["all_gather"]


def test_a_gather_split_both_ways_after_an_idle_axis_permutes_its_result() -> None:
    mesh = mesh_of(2, 2, 2)
    table, ids, out = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("c", "b", "b"))
    look_up = jax.jit(lambda t, i: t[i], in_shardings=(table, ids), out_shardings=out)
    shapes = jax.ShapeDtypeStruct((64, 32), np.float32), jax.ShapeDtypeStruct((8,), np.int32)
    program = read_compiled(look_up.lower(*shapes).compile())
    assert "permute" in {c.kind for c in program.collectives}
