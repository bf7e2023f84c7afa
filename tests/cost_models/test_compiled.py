"""Numbers of compiled programs against hand computation, XLA's own counts and brute force."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.cost_models.compiled import (
    Collective,
    CompiledProgram,
    MemorySizes,
    axes_of,
    read_compiled,
    read_hlo,
)
from autoshard.cost_models.protocol import wire_bytes
from autoshard.shardings import MeshShape

DATA = Path(__file__).parents[1] / "data" / "hlo"
MESH = MeshShape(("data", "model"), (4, 2))

# A dot of one layer in the saved CPU programs: [16, 32] @ [32, 16] on each device.
DOT = 2 * 16 * 32 * 16


def saved(name: str) -> CompiledProgram:
    return read_hlo((DATA / f"{name}.txt").read_text())


def summary(program: CompiledProgram) -> list[tuple[str, int, tuple[str, ...] | None, int]]:
    return sorted((c.kind, c.nbytes, axes_of(c, MESH), c.trips) for c in program.collectives)


def test_a_scan_counts_its_body_once_per_iteration() -> None:
    program = saved("cpu_scan")
    assert program.flops == 3 * DOT
    # The activations [16, 32] and the weights [32, 16] of each layer are gathered: 2 KiB each.
    assert summary(program) == [
        ("all_gather", 2048, ("data",), 3),
        ("all_gather", 2048, ("model",), 3),
    ]
    assert program.collective_bytes == 3 * (2048 * 3 / 4 + 2048 * 1 / 2)
    assert program.unknown_trip_counts == ()


def test_nested_loops_multiply() -> None:
    program = saved("cpu_nested_scan")
    (dot,) = program.flops_by_op
    assert (dot.lhs, dot.rhs, dot.out, dot.trips) == ((16, 32), (32, 16), (16, 16), 3 * 5)
    assert program.flops == 15 * DOT
    assert summary(program) == [("all_gather", 2048, ("model",), 15)]


def test_the_gradient_of_a_scan_costs_three_times_its_dots() -> None:
    program = saved("cpu_scan_grad")
    assert program.flops == 3 * 3 * DOT
    assert [c.kind for c in program.collectives].count("all_reduce") == 2
    assert {c.trips for c in program.collectives} == {3}
    (source,) = {dot.source for dot in program.flops_by_op}
    assert source.startswith("make.py:")


def test_of_a_conditional_the_costliest_branch_counts() -> None:
    program = saved("cpu_cond")
    assert program.flops == 2 * DOT
    assert {dot.op_name for dot in program.flops_by_op} == {
        "jit(branches)/cond/branch_1_fun/dot_general"
    }


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    program = saved("cpu_while")
    assert program.flops == 2 * 16 * 32 * 32
    assert len(program.unknown_trip_counts) == 1
    assert program.unknown_trip_counts[0].startswith("while")
    # The largest value of all rows: one float, found in the loop's condition.
    assert summary(program) == [("all_reduce", 4, ("data",), 1)]


def test_every_kind_of_collective_is_read_with_its_larger_side() -> None:
    program = saved("cpu_collectives")
    local = 16 * 16 * 4
    assert summary(program) == [
        ("all_gather", local, ("data",), 1),
        ("all_reduce", local + 4, ("data", "model"), 1),  # a pair: the array and one float
        ("all_to_all", local, ("data",), 1),  # on CPU a tuple of four parts
        ("permute", local, ("data",), 1),
        ("permute", local, ("model",), 1),
        ("reduce_scatter", local, ("data",), 1),
    ]
    assert sorted(c.devices for c in program.collectives) == [2, 4, 4, 4, 4, 8]
    assert program.collective_bytes == 3 * local * 3 / 4 + 2 * local + 2 * (local + 4) * 7 / 8
    assert program.flops == 0


def test_a_convolution_and_its_gradients_cost_the_same_real_products() -> None:
    program = saved("cpu_convolution_grad")
    # 3x3 windows at stride 2x1 over 16x16: 8 outputs x 3 taps less 1 outside (XLA pads only behind)
    # by 16 outputs x 3 taps less 2 outside; 2 images, 4 to 8 channels.
    forward = 2 * (8 * 3 - 1) * (16 * 3 - 2) * 2 * 4 * 8
    assert [dot.flops for dot in program.flops_by_op] == [forward] * 3
    assert summary(program) == [("all_reduce", 3 * 3 * 4 * 8 * 4, ("data",), 1)]


def test_a_tpu_train_step_counts_overlapped_and_fused_collectives_once() -> None:
    program = saved("tpu_step")
    # Forward and backward of two matrices of 512 x 1024 over 2048 rows, 3 layers, on 8 devices.
    assert program.flops == 3 * 2 * 2048 * 512 * 1024 * 2 * 3 / 8
    matrix = 512 * 512 * 2  # half of a layer's matrix in bf16
    gathers = [("all_gather", matrix, ("data",), 3)] * 4  # two weights, forward and backward
    activations = [("all_reduce", matrix, ("model",), 3)] * 2
    gradients = [("all_reduce", matrix, ("data",), 3), ("reduce_scatter", matrix, ("data",), 3)]
    assert summary(program) == sorted(gathers + activations + gradients)
    assert all(c.source.startswith("make.py:") for c in program.collectives)
    assert program.unknown_trip_counts == ()


def test_a_tpu_batched_matmul_written_as_a_dilated_convolution_has_the_flops_of_the_dot() -> None:
    program = saved("tpu_batched_matmul")
    batched, plain = program.flops_by_op
    assert batched.flops == 2 * 4 * 128 * 512 * 128
    assert plain.flops == 2 * 256 * 512 * 1024
    # Its groups are written as axes of a mesh whose devices are permuted.
    assert summary(program) == [("all_gather", 512 * 1024 * 2, ("model",), 1)]


def test_a_windowed_einsum_is_read_as_the_reduce_scatter_that_it_stands_for() -> None:
    """``x @ w``, summed over 16 chips of a v5e slice and scattered; libtpu 0.0.42."""
    text = gzip.decompress((DATA / "tpu_windowed.txt.gz").read_bytes()).decode()
    assert text.count(" collective-permute-start(") == 5  # two each way per round, one at the end
    program = read_hlo(text)
    (scatter,) = program.collectives
    assert (scatter.kind, scatter.devices, scatter.trips) == ("reduce_scatter", 16, 1)
    assert scatter.nbytes == 8192 * 4096 * 2
    assert program.flops == 2 * 8192 * 8192 * 4096 / 16
    assert program.unknown_trip_counts == ()


LOOP = """\
HloModule loop, num_partitions=2

%step (i: s32[], n: s32[]) -> s32[] {{
  %i = s32[] parameter(0)
  %n = s32[] parameter(1)
  ROOT %s = s32[] {arithmetic}(%i, %n)
}}

%body (c: (s32[], f32[4,4], s32[])) -> (s32[], f32[4,4], s32[]) {{
  %c = (s32[], f32[4,4]{{1,0}}, s32[]) parameter(0)
  %gi = s32[] get-tuple-element(%c), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%c), index=1
  %bound = s32[] get-tuple-element(%c), index=2
  %by = s32[] constant({step})
  %copied = s32[] copy(%gi)
  %next = s32[] fusion(%copied, %by), kind=kLoop, calls=%step
  %d = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4]{{1,0}}, s32[]) tuple(%next, %d, {handed_on})
}}

%less (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %l = pred[] compare(%p, %q), direction={direction}
}}

%test (c2: (s32[], f32[4,4], s32[])) -> pred[] {{
  %c2 = (s32[], f32[4,4]{{1,0}}, s32[]) parameter(0)
  %gi2 = s32[] get-tuple-element(%c2), index=0
  %bound2 = s32[] get-tuple-element(%c2), index=2
  ROOT %w = pred[] fusion({sides}), kind=kLoop, calls=%less
}}

ENTRY %main (x0: f32[4,4]) -> f32[4,4] {{
  %x0 = f32[4,4]{{1,0}} parameter(0)
  %start = s32[] constant({start})
  %last = s32[] constant({bound})
  %state = (s32[], f32[4,4]{{1,0}}, s32[]) tuple(%start, %x0, %last)
  %loop = (s32[], f32[4,4]{{1,0}}, s32[]) while(%state), condition=%test, body=%body
  ROOT %out = f32[4,4]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
HOLDS = {
    "LT": lambda i, bound: i < bound,
    "LE": lambda i, bound: i <= bound,
    "GT": lambda i, bound: i > bound,
    "GE": lambda i, bound: i >= bound,
    "NE": lambda i, bound: i != bound,
}
FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@settings(deadline=None, max_examples=200)
@given(
    start=st.integers(-20, 20),
    bound=st.integers(-20, 20),
    step=st.integers(-4, 4).filter(bool),
    direction=st.sampled_from(sorted(HOLDS)),
    subtract=st.booleans(),
    flip=st.booleans(),
)
def test_a_trip_count_read_from_the_condition_is_that_of_running_the_loop(
    start: int, bound: int, step: int, direction: str, subtract: bool, flip: bool
) -> None:
    text = LOOP.format(
        start=start,
        bound=bound,
        step=-step if subtract else step,
        arithmetic="subtract" if subtract else "add",
        direction=FLIPPED[direction] if flip else direction,
        sides="%bound2, %gi2" if flip else "%gi2, %bound2",
        handed_on="%bound",
    )
    counters = itertools.count(start, step)
    steps = itertools.takewhile(lambda i: HOLDS[direction](i, bound), counters)
    trips = len(list(itertools.islice(steps, 1000)))
    program = read_hlo(text)
    if trips == 1000:  # it never ends
        assert program.unknown_trip_counts == ("loop",)
        assert program.flops == 128
    else:
        assert program.unknown_trip_counts == ()
        assert program.flops == 128 * trips


def test_a_bound_that_the_body_changes_is_no_bound() -> None:
    text = LOOP.format(
        start=0,
        bound=7,
        step=1,
        arithmetic="add",
        direction="LT",
        sides="%gi2, %bound2",
        handed_on="%next",
    )
    assert read_hlo(text).unknown_trip_counts == ("loop",)


WINDOW = """\
HloModule window

ENTRY %main (x: f32[2,{inputs},3], k: f32[{taps},3,5]) -> f32[2,{outputs},5] {{
  %x = f32[2,{inputs},3]{{2,1,0}} parameter(0)
  %k = f32[{taps},3,5]{{2,1,0}} parameter(1)
  ROOT %c = f32[2,{outputs},5]{{2,1,0}} convolution(%x, %k), \
window={{size={taps} stride={stride} pad={low}_{high} lhs_dilate={holes} rhs_dilate={spread}}}, \
dim_labels=b0f_0io->b0f
}}
"""


@settings(deadline=None, max_examples=200)
@given(
    inputs=st.integers(1, 9),
    taps=st.integers(1, 9),
    stride=st.integers(1, 4),
    low=st.integers(-2, 4),
    high=st.integers(-2, 4),
    holes=st.integers(1, 4),
    spread=st.integers(1, 3),
)
def test_a_convolution_counts_the_products_with_real_elements(
    inputs: int, taps: int, stride: int, low: int, high: int, holes: int, spread: int
) -> None:
    padded = low + (inputs - 1) * holes + 1 + high
    outputs = max(0, (padded - (taps - 1) * spread - 1) // stride + 1)
    real = {low + i * holes for i in range(inputs)}
    products = sum(o * stride + t * spread in real for o in range(outputs) for t in range(taps))
    numbers = {"inputs": inputs, "taps": taps, "outputs": outputs, "stride": stride}
    text = WINDOW.format(low=low, high=high, holes=holes, spread=spread, **numbers)
    assert read_hlo(text).flops == 2 * products * 2 * 3 * 5


CALLS = """\
HloModule calls, num_partitions=8

%gather (q: f32[4]) -> f32[32] {
  %q = f32[4]{0} parameter(0)
  ROOT %g = f32[32]{0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (a: f32[6,8], b: f32[8,10], c: f32[4]) -> f32[32] {
  %a = f32[6,8]{1,0} parameter(0)
  %b = f32[8,10]{1,0} parameter(1)
  %c = f32[4]{0} parameter(2)
  %m = f32[6,10]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"
  %w = (f32[6,10]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %o = f32[4]{0} custom-call(%c), custom_call_target="lapack_something"
  %s = ((f32[4]{0}), f32[32]{0}) async-start(%c), calls=%gather
  %e = f32[32]{0} async-done(%s), calls=%gather
  %h = (f32[4]{0}, f32[32]{0}) all-gather-start(%c), replica_groups=[1,8]<=[8], dimensions={0}
  %i = f32[32]{0} all-gather-done(%h)
  %j = f32[4]{0} collective-broadcast(%c), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %k = f32[4]{0} all-reduce-start(%c), replica_groups={}, to_apply=%add
}
"""


def test_matmul_calls_count_and_unknown_calls_are_named() -> None:
    program = read_hlo(CALLS)
    assert [dot.flops for dot in program.flops_by_op] == [2 * 6 * 8 * 10] * 2
    assert program.opaque_calls == ("lapack_something",)


def test_a_collective_in_two_halves_counts_once() -> None:
    program = read_hlo(CALLS)
    assert sorted((c.kind, c.nbytes, c.devices) for c in program.collectives) == [
        ("all_gather", 4 * 4 * 8, 8),
        ("all_gather", 4 * 4 * 8, 8),
        ("all_reduce", 16, 8),
        ("broadcast", 16, 4),
    ]
    gathers = 2 * wire_bytes("all_gather", 128, 8)
    assert program.collective_bytes == gathers + 2 * 16 * 7 / 8 + 16 * 3 / 4


def collective(kind: str, groups: tuple[tuple[int, ...], ...]) -> Collective:
    return Collective(kind, 8, len(groups[0]), groups, 1, "", "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "groups", "axes"),
    [
        ("all_gather", ((0, 1), (2, 3), (4, 5), (6, 7)), ("model",)),
        ("all_gather", ((0, 2, 4, 6), (1, 3, 5, 7)), ("data",)),
        ("all_gather", ((6, 2, 4, 0), (1, 3, 7, 5)), ("data",)),
        ("all_reduce", (tuple(range(8)),), ("data", "model")),
        ("all_reduce", tuple((i,) for i in range(8)), ()),
        ("all_gather", ((0, 2), (4, 6), (1, 3), (5, 7)), None),  # half of an axis
        ("permute", ((0, 2), (4, 6), (1, 3), (5, 7)), ("data",)),
        ("all_gather", ((0, 3), (1, 2), (4, 7), (5, 6)), None),
        ("all_gather", ((0, 1), (2, 3)), None),  # another number of devices
        ("all_gather", ((0, 1, 2), (3, 4, 5), (6, 7)), None),
    ],
)
def test_axes_are_named_where_groups_are_a_sub_mesh(
    kind: str, groups: tuple[tuple[int, ...], ...], axes: tuple[str, ...] | None
) -> None:
    assert axes_of(collective(kind, groups), MESH) == axes


@pytest.mark.parametrize("axes", [("z",), ("x", "z"), ("y", "z"), ("x", "y", "z")])
def test_groups_made_from_axes_give_the_axes_back(axes: tuple[str, ...]) -> None:
    mesh = MeshShape(("x", "y", "z"), (2, 1, 3))
    ids = np.arange(6).reshape(mesh.sizes)
    order = sorted(range(3), key=lambda d: mesh.names[d] in axes)
    groups = ids.transpose(order).reshape(-1, mesh.size(axes))
    found = axes_of(collective("all_reduce", tuple(map(tuple, groups.tolist()))), mesh)
    assert found == tuple(a for a in axes if a != "y")  # an axis of one device joins nobody


def test_the_peak_counts_what_a_result_reuses_once() -> None:
    program = read_hlo(CALLS, memory=MemorySizes(100, 60, 30, 50))
    assert program.peak_bytes == 140
    sizes = (program.argument_bytes, program.output_bytes, program.temp_bytes, program.alias_bytes)
    assert sizes == (100, 60, 30, 50)
    assert read_hlo(CALLS).peak_bytes is None


def test_a_program_compiled_here_has_the_flops_and_bytes_of_its_shardings() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def at(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def two_products(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w) @ v

    m, n, k = 64, 48, 32
    function = jax.jit(
        two_products,
        in_shardings=(at("data"), at(None, "model"), at("model")),
        out_shardings=at("data"),
        donate_argnums=0,
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (k, n), (n, k))]
    program = read_compiled(function.lower(*shapes).compile())
    assert program.flops == 2 * (2 * m * n * k) / 8
    assert summary(program) == [("all_reduce", m // 4 * k * 4, ("model",), 1)]
    assert program.argument_bytes == (m // 4 * k + k * n // 2 + n // 2 * k) * 4
    assert program.output_bytes == program.alias_bytes == m // 4 * k * 4
    assert all(dot.source.startswith("test_compiled.py:") for dot in program.flops_by_op)


def test_xla_counts_the_same_convolution() -> None:
    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=numbers,
            feature_group_count=2,
        )  # fmt: skip

    x, k = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 9, 12, 4), (3, 3, 2, 8)))
    compiled = jax.jit(convolve).lower(x, k).compile()
    counted = (compiled.cost_analysis() or {})["flops"]
    assert read_compiled(compiled).flops == pytest.approx(counted, rel=1e-3)
