from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.analytic import F32_PASSES, AnalyticModel, chip_of_kind
from autoshard.cost_models.protocol import CollectiveKind, MeshAxis, Work, emitted
from autoshard.cost_models.topology import parse_layout
from autoshard.errors import InputError, UnknownNameError


def dot(dtype: str, *dims: tuple[int, int, int, int], hbm: bool = True) -> Work:
    """Matmuls of the given (batch, m, n, k), with the traffic of their operands and results."""
    table = np.array(dims, dtype=np.int64)
    b, m, n, k = table.T.astype(np.float64)
    nbytes = 2.0 * b * (m * k + k * n + m * n) if hbm else np.zeros(len(dims))
    return Work("stablehlo.dot_general", dtype, 2 * b * m * n * k, nbytes, table)


def test_a_large_matmul_runs_at_the_share_of_peak_that_the_compiler_estimates() -> None:
    work = dot("bf16", (1, 8192, 8192, 8192))
    for chip, peak, share in (("v5e", 197e12, 0.97), ("v5p", 459e12, 0.90), ("v6e", 918e12, 0.87)):
        rate = work.flops / AnalyticModel(chip).compute_s(work)
        assert rate == pytest.approx([peak * share])


@pytest.mark.parametrize(
    ("dtype", "over_bf16"),
    [("bf16", 1.0), ("f16", 1.0), ("f32", 1.0), ("f8E4M3FN", 1.0), ("i8", 0.5), ("ui8", 0.5)],
)
def test_element_types_cost_what_v5e_takes_for_them(dtype: str, over_bf16: float) -> None:
    model = AnalyticModel("v5e")
    dims = (1, 4096, 4096, 4096)
    ratio = model.compute_s(dot(dtype, dims)) / model.compute_s(dot("bf16", dims))
    assert ratio == pytest.approx([over_bf16])


def test_f32_at_highest_precision_takes_more_passes() -> None:
    work = dot("f32", (1, 4096, 4096, 4096))
    highest = AnalyticModel("v5e", f32_passes=F32_PASSES["highest"])
    assert highest.compute_s(work) == pytest.approx(5.7 * AnalyticModel("v5e").compute_s(work))


@given(
    st.sampled_from(["v4", "v5e", "v6e"]),
    st.tuples(*[st.integers(1, 600)] * 4),
)
def test_padding_never_makes_a_matmul_cheaper(chip: str, dims: tuple[int, int, int, int]) -> None:
    model = AnalyticModel(chip)
    work = dot("bf16", dims)
    least = work.flops / model.peak_flops("bf16")
    assert model.compute_s(work) >= least


def test_dimensions_are_padded_to_the_matrix_unit_and_streamed_rows_to_8() -> None:
    model = AnalyticModel("v5e")
    work = dot("bf16", (1, 32, 128, 128), (1, 31, 100, 65), (1, 32, 128, 129), (1, 33, 128, 128))
    exact, padded, deeper, taller = model.compute_s(work)
    assert padded == pytest.approx(exact)
    assert deeper == pytest.approx(2 * exact)
    assert taller == pytest.approx(40 / 32 * exact)


def test_few_rows_cost_no_less_than_putting_the_weights_in_place() -> None:
    # 7341 cycles for 4096 x 4096 at 1.5 GHz, by XLA:TPU's estimate.
    model = AnalyticModel("v5e")
    few, fewer, vector = model.compute_s(
        dot("bf16", (1, 16, 4096, 4096), (1, 2, 4096, 4096), (1, 1, 4096, 4096))
    )
    assert few == fewer == pytest.approx(7341 / 1.5e9, rel=0.05)
    assert vector == pytest.approx(18 * few)
    assert AnalyticModel("v6e").compute_s(dot("bf16", (1, 8, 100, 100)))[0] == pytest.approx(
        AnalyticModel("v6e").compute_s(dot("bf16", (1, 8, 256, 256)))[0]
    )


def test_a_single_vector_leaves_the_matrix_unit_of_a_tpu() -> None:
    one, eight = AnalyticModel("v5e").compute_s(dot("bf16", (1, 1, 4096, 4096), (1, 8, 4096, 4096)))
    assert one == pytest.approx(18 * eight)


def test_gpus_do_not_pad() -> None:
    model = AnalyticModel("H100")
    work = dot("bf16", (1, 7, 100, 65))
    assert model.compute_s(work) == pytest.approx(work.flops / (989e12 * 0.75))


def test_an_op_takes_the_larger_of_arithmetic_and_traffic_plus_its_start() -> None:
    model = AnalyticModel("v5e")
    work = dot("bf16", (1, 16, 8192, 8192), (1, 8192, 8192, 8192))
    compute, traffic, total = model.compute_s(work), model.hbm_s(work), model.op_s(work)
    assert traffic[0] > compute[0]
    assert compute[1] > traffic[1]
    assert total == pytest.approx(np.maximum(compute, traffic) + 876 / 1.05e9)


def test_an_op_within_a_fusion_does_not_start_on_its_own() -> None:
    work = Work("stablehlo.add", "f32", np.array([1e6]), np.zeros(1))
    model = AnalyticModel("v5e")
    assert model.op_s(work) == pytest.approx(model.compute_s(work))


def test_a_latency_bound_gather_on_a_line_of_four_takes_the_8_us_that_were_measured() -> None:
    # Source: jax-ml/scaling-book, sharding.md, pop quiz 2, part 2.
    times = AnalyticModel("v5e").collective_s(
        "all_gather", np.array([131072.0]), (MeshAxis("y", 4),)
    )
    assert times == pytest.approx([8e-6], rel=0.05)


def test_the_gather_that_the_book_profiled_is_predicted_within_a_fifth() -> None:
    # 680 us measured for bf16[2048, 8192] over the unwrapped 4-axis of a v5e 8x4.
    times = AnalyticModel("v5e").collective_s(
        "all_gather", np.array([2048 * 8192 * 2.0]), (MeshAxis("y", 4),)
    )
    assert times == pytest.approx([680e-6], rel=0.2)


def test_a_ring_of_16_is_twice_as_fast_per_byte_as_a_line_of_8_on_v5e() -> None:
    model = AnalyticModel("v5e", collective_fixed_s=0.0)
    nbytes = np.array([1e9])
    ring = model.collective_s("all_gather", nbytes, (MeshAxis("x", 16),))
    line = model.collective_s("all_gather", nbytes, (MeshAxis("x", 8),))
    assert line / ring == pytest.approx(2 * 7 / 8)


def test_two_devices_of_one_chip_share_it() -> None:
    model = AnalyticModel("v7x")
    assert model.peak_flops("bf16") == pytest.approx(2307e12 / 2)
    assert model.memory_bytes == pytest.approx(94.74 * 2**30)


@pytest.mark.parametrize(("kind", "times"), [("all_reduce", 1.0), ("all_to_all", 7.4)])
def test_leaving_the_node_costs_an_h100_only_what_the_way_out_is_short_of(
    kind: CollectiveKind, times: float
) -> None:
    # Out of a node go 400 GB/s for 8 GPUs: enough for a reduction, whose data leaves once, but
    # not for an exchange in which each GPU sends its own.
    model = AnalyticModel("H100", collective_fixed_s=0.0)
    nbytes = np.array([1e9])
    node = model.collective_s(kind, nbytes, (MeshAxis("x", 8),))
    eight = model.collective_s(kind, nbytes, (MeshAxis("x", 8), MeshAxis("y", 8)))
    assert eight / node == pytest.approx([times], rel=0.01)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GB200", "GB200-NVL72"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_device_kinds_lead_to_their_chip(kind: str, chip: str) -> None:
    assert chip_of_kind(kind) == chip


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(InputError, match="no cost model is known for devices of kind 'TPU v99'"):
        chip_of_kind("TPU v99")


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no chip is called 'v9'"):
        AnalyticModel("v9")


@pytest.mark.parametrize(
    ("layout", "axes", "made"),
    [
        ("v5e:4x4 d=x:4,y:4", ("d",), "all_reduce"),  # the whole of a square
        ("v5p:2x2x4 d=x:2,y:2,z:2 m=z:2@2", ("d", "m"), "all_reduce"),  # of a box
        ("v5e:4x8 d=x:4,y:8", ("d",), "reduce_scatter"),
        ("v5e:2x2 d=x:2,y:2", ("d",), "reduce_scatter"),
        ("v5p:4x4x4 d=x:4,y:4 m=z:4", ("d",), "reduce_scatter"),
    ],
)
def test_a_reduce_scatter_over_a_whole_slice_stays_an_all_reduce_on_tpu(
    layout: str, axes: tuple[str, ...], made: str
) -> None:
    """What XLA:TPU (libtpu 0.0.42) made of such groups when compiled ahead of time."""
    where = parse_layout(layout)
    model = AnalyticModel(where.topology.chip or "", layout=where)
    over = tuple(MeshAxis(a, where.sizes[a]) for a in axes)
    assert emitted(model, "reduce_scatter", over) == made
    assert emitted(model, "all_gather", over) == "all_gather"
    assert emitted(AnalyticModel("v5e"), "reduce_scatter", over) == "reduce_scatter"
