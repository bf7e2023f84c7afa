"""What is read off a module: loops, products, aliases, ties, constants, places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.cost_models.compiled import read_compiled
from autoshard.errors import InputError
from autoshard.graph import Graph
from tests.lowering import graph_of, mesh_of
from tests.zoo import PROGRAMS

X, W = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)


def loops(graph: Graph) -> list[int]:
    return [op.body_trips for op in graph.ops if op.name == "stablehlo.while"]


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_runs_its_body_once_per_element(length: int, reverse: bool) -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=length, reverse=reverse)[0]

    assert loops(graph_of(fn, X)) == [length]


def test_trips_of_nested_loops_multiply() -> None:
    program = PROGRAMS["nested_scans"]
    graph = graph_of(program.fn, *program.values())
    assert loops(graph) == [3, 6]
    (dot,) = (op for op in graph.ops if op.kind == "dot_general")
    assert dot.trips == 6


def test_an_interpreted_kernel_runs_once_per_step_of_its_grid() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] @ x[...].T

    def fn(x: Any) -> Any:
        return pallas.pallas_call(
            kernel,
            grid=(4, 2),
            in_specs=[pallas.BlockSpec((4, 16), lambda i, j: (i, j))],
            out_specs=pallas.BlockSpec((4, 4), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((16, 8), jnp.float32),
            interpret=True,
        )(x)

    graph = graph_of(fn, X)
    assert loops(graph) == [8]
    assert not graph.unknown_trips


@pytest.mark.parametrize("name", ["fori_dynamic", "while_until"])
def test_a_loop_whose_trips_the_program_does_not_state_counts_once_and_is_listed(name: str) -> None:
    program = PROGRAMS[name]
    graph = graph_of(program.fn, *program.values())
    (loop,) = (op for op in graph.ops if op.name == "stablehlo.while")
    assert graph.unknown_trips == (loop.index,)
    assert loop.body_trips == 1


@pytest.mark.parametrize(
    "name",
    [
        *("attention_grad", "scan_remat_grad", "nested_scans", "experts", "kv_cache"),
        *("conv_same", "conv_grad", "conv_depthwise_strided", "conv_depthwise_grad"),
        *("conv_one_dimension", "half_precision", "complex_numbers"),
    ],
)
def test_products_cost_what_xla_compiles_for_one_device(name: str) -> None:
    program = PROGRAMS[name]
    graph = graph_of(program.fn, *program.values())
    ours = sum(op.flops * op.trips for op in graph.ops if op.kind in ("dot_general", "convolution"))
    compiled = jax.jit(program.fn).lower(*program.values()).compile()
    assert ours == read_compiled(compiled).flops > 0


def test_a_barrier_only_renames_its_operands() -> None:
    graph = graph_of(lambda x, w: lax.optimization_barrier((x, w)), X, W)
    assert [graph.values[v].alias for v in graph.results] == list(graph.arguments)


def test_what_is_computed_from_constants_alone_is_free() -> None:
    def fn(x: Any) -> Any:
        return jnp.where(jnp.arange(16)[:, None] > jnp.arange(32), x, 0.0)

    graph = graph_of(fn, X)
    costly = [op.kind for op in graph.ops if not all(graph.values[v].free for v in op.results)]
    assert costly == ["select"]


def test_a_loop_reads_and_makes_its_carried_values_under_one_name() -> None:
    graph = graph_of(lambda x, w: lax.fori_loop(0, 5, lambda _, c: c @ w, x), X, W)
    (loop,) = (op for op in graph.ops if op.name == "stablehlo.while")
    (dot,) = (op for op in graph.ops if op.kind == "dot_general")
    assert set(dot.operands) <= set(loop.results)
    assert dot.results[0] in loop.returned[0]
    assert graph.results[0] in loop.results


def test_ties_and_boundaries_are_kept() -> None:
    graph = graph_of(lambda x, w: (x + 1, w), X, W, ties=[(0, 0)])
    assert graph.ties == ((0, 0),)
    assert [b.name for b in graph.argument_info] == ["argument 0", "argument 1"]
    assert graph.results[1] == graph.arguments[1]


def test_the_fingerprint_is_that_of_the_program() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    first, again = graph_of(fn, X, W), graph_of(fn, X, W)
    other = graph_of(fn, X.astype(jnp.bfloat16), W)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert first.signature()[:2] == ("argument %0: f32[16,32]", "argument %1: f32[32,32]")


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("int4", 64), ("int8", 128), ("bool", 128), ("bfloat16", 256), ("complex64", 1024)],
)
def test_values_have_their_size_in_bytes(dtype: str, nbytes: int) -> None:
    graph = graph_of(lambda x: x, jax.ShapeDtypeStruct((16, 8), dtype))
    assert graph.values[graph.arguments[0]].nbytes == nbytes


def test_every_op_points_to_a_line_of_the_users_code() -> None:
    program = PROGRAMS["mlp_step"]
    graph = graph_of(program.fn, *program.values())
    assert {op.source.partition(":")[0] for op in graph.ops if op.kind == "dot_general"} == {
        "zoo.py"
    }


def test_constraints_prescribe_shardings_and_open_ones_say_nothing() -> None:
    mesh = mesh_of(4, 2)
    spec: Any = PartitionSpec  # partly annotated

    def fn(x: Any) -> Any:
        closed = NamedSharding(mesh, spec("b"))
        part = NamedSharding(mesh, spec(spec.UNCONSTRAINED, "a"))
        free = NamedSharding(mesh, spec(spec.UNCONSTRAINED, spec.UNCONSTRAINED))
        constrain: Any = jax.lax.with_sharding_constraint
        return constrain(constrain(constrain(x, closed) + 1, part) + 1, free)

    found = [op for op in graph_of(fn, X).ops if op.name == "sdy.sharding_constraint"]
    assert [op.fixed and op.fixed[1][0] for op in found] == [(("b",), ()), ((), ("a",)), None]
    assert [op.is_alias for op in found] == [False, False, True]


def test_a_constraint_over_another_mesh_is_refused() -> None:
    other = jax.sharding.Mesh(np.array(jax.devices()), ("elsewhere",))
    sharding = NamedSharding(other, PartitionSpec("elsewhere"))
    with pytest.raises(InputError, match="elsewhere"):
        graph_of(lambda x: jax.lax.with_sharding_constraint(x, sharding), X)


def test_programs_that_differ_in_an_attribute_alone_have_different_signatures() -> None:
    x = np.ones((8, 8), np.float32)

    def product(dims: Any) -> Any:
        return graph_of(lambda a, b: lax.dot_general(a, b, (dims, ((), ()))), x, x)

    def loop(count: int) -> Any:
        return graph_of(lambda a: lax.fori_loop(0, count, lambda _, c: jnp.sin(c), a), x)

    assert product(((1,), (0,))).signature() == product(((1,), (0,))).signature()
    assert product(((1,), (0,))).signature() != product(((0,), (1,))).signature()
    assert loop(3).fingerprint() != loop(4).fingerprint()
