"""Each step of a reshard is one collective in the compiled program; chains are the cheapest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from autoshard.cost_models.compiled import axes_of, read_compiled
from autoshard.reshard import Resharder, layouts, sent_bytes
from autoshard.shardings import Sharding, divides, local_shape, loosened, to_partition_spec
from tests.lowering import Simple, mesh_of, shape_of

SHAPE = (16, 32)
NBYTES = 4 * 16 * 32


def single_steps(sizes: tuple[int, ...]) -> list[tuple[str, tuple[str, ...], Sharding, Sharding]]:
    mesh = shape_of(*sizes)
    table = layouts(2, mesh)
    return [
        (kind, axes, table.shardings[i], table.shardings[j])
        for (kind, axes), (sources, targets) in table.steps.items()
        for i, j in zip(sources.tolist(), targets.tolist(), strict=True)
    ]


def compiled_step(sizes: tuple[int, ...], source: Sharding, target: Sharding) -> Any:
    mesh = mesh_of(*sizes)
    before, after = (NamedSharding(mesh, to_partition_spec(s)) for s in (source, target))
    move = jax.jit(lambda x: x, in_shardings=before, out_shardings=after)
    return read_compiled(move.lower(jax.ShapeDtypeStruct(SHAPE, np.float32)).compile())


def check_step(
    sizes: tuple[int, ...], kind: str, axes: tuple[str, ...], source: Sharding, target: Sharding
) -> None:
    """The compiled program moves what the plan says, with the collective that it says."""
    mesh = shape_of(*sizes)
    program = compiled_step(sizes, source, target)
    step = Resharder(mesh, Simple()).path(SHAPE, NBYTES, source, target)
    if len(step) != 1:
        return  # a chain is cheaper, so nobody asks for this step
    if kind == "slice":
        assert program.collectives == ()
        return
    (found,) = program.collectives
    assert found.kind == step[0].kind
    assert found.nbytes == step[0].nbytes
    if found.kind != "permute":
        assert axes_of(found, mesh) == tuple(sorted(axes))
        assert step[0].axes == axes


def sample(sizes: tuple[int, ...], count: int) -> list[Any]:
    steps = single_steps(sizes)
    return [steps[i] for i in np.random.default_rng(0).permutation(len(steps))[:count]]


@pytest.mark.parametrize(("kind", "axes", "source", "target"), sample((4, 2), 12), ids=str)
def test_a_step_is_one_collective(
    kind: str, axes: tuple[str, ...], source: Sharding, target: Sharding
) -> None:
    check_step((4, 2), kind, axes, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)], ids=str)
def test_every_step_is_one_collective(sizes: tuple[int, ...]) -> None:
    steps = single_steps(sizes)
    wrong = []
    for step in steps if len(sizes) < 3 else sample(sizes, 250):
        try:
            check_step(sizes, *step)
        except (AssertionError, ValueError) as error:
            wrong.append((step, str(error)[:200]))
    assert not wrong


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2), (2, 4, 1)], ids=str)
def test_layouts_are_all_ways_to_put_axes_into_dimensions(sizes: tuple[int, ...]) -> None:
    mesh = shape_of(*sizes)
    axes = [a for a, s in zip(mesh.names, sizes, strict=True) if s > 1]
    expected = set()
    for order in itertools.permutations(axes):
        for where in itertools.product((0, 1, None), repeat=len(axes)):
            expected.add(
                tuple(tuple(a for a, w in zip(order, where, strict=True) if w == d) for d in (0, 1))
            )
    table = layouts(2, mesh)
    assert set(table.shardings) == expected
    assert [table.index[s] for s in table.shardings] == list(range(len(expected)))
    assert not any(table.shardings[0])


@pytest.mark.parametrize("shape", [(16, 32), (4, 6), (3, 8), (1, 2)], ids=str)
def test_paths_are_the_cheapest_by_an_independent_search(shape: tuple[int, int]) -> None:
    mesh, model = shape_of(4, 2), Simple()
    nbytes = 4 * shape[0] * shape[1]
    resharder, table = Resharder(mesh, model), layouts(2, mesh)
    graph = nx.DiGraph()
    live = [s for s in table.shardings if divides(shape, s, mesh)]
    graph.add_nodes_from(live)
    for kind, axes, source, target in single_steps((4, 2)):
        if kind == "slice" and len(axes) > 1:
            continue  # of uneven targets only
        if source in live and target in live:
            pieces = [4 * int(np.prod(local_shape(shape, s, mesh))) for s in (source, target)]
            seconds = 2e-9 * pieces[1]
            if kind != "slice":
                devices = tuple(_axis(mesh, a) for a in axes)
                seconds = float(model.collective_s(kind, np.array([max(pieces)]), devices)[0])  # type: ignore[arg-type]
            old = graph.get_edge_data(source, target, {"weight": np.inf})["weight"]
            graph.add_edge(source, target, weight=min(old, seconds))
    prices = resharder.seconds(shape, nbytes)
    for source, lengths in nx.all_pairs_dijkstra_path_length(graph):
        for target, seconds in lengths.items():
            ours = prices[table.index[source], table.index[target]]
            assert ours == pytest.approx(seconds, rel=1e-3, abs=1e-11)


def _axis(mesh: Any, name: str) -> Any:
    from autoshard.cost_models.protocol import MeshAxis

    return MeshAxis(name, mesh.size((name,)))


@given(st.data())
def test_a_path_leads_from_source_to_target_and_costs_its_price(data: st.DataObject) -> None:
    mesh = shape_of(2, 2, 2)
    resharder = Resharder(mesh, Simple())
    live = [s for s in layouts(2, mesh).shardings if divides(SHAPE, s, mesh)]
    source, target = data.draw(st.sampled_from(live)), data.draw(st.sampled_from(live))
    steps = resharder.path(SHAPE, NBYTES, source, target)
    reached = source
    for step in steps:
        assert step.source == reached
        reached = step.target
    assert reached == target
    index = layouts(2, mesh).index
    price = resharder.seconds(SHAPE, NBYTES)[index[source], index[target]]
    assert sum(s.seconds for s in steps) == pytest.approx(price, rel=1e-9, abs=1e-15)
    assert (not steps) == (source == target)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2)], ids=str)
def test_no_detour_is_cheaper(sizes: tuple[int, ...]) -> None:
    mesh = shape_of(*sizes)
    prices = Resharder(mesh, Simple()).seconds(SHAPE, NBYTES)
    through = (prices[:, :, None] + prices[None, :, :]).min(axis=1)
    assert (prices <= through + 1e-12).all()


def test_layouts_that_waste_much_cannot_be_reached() -> None:
    mesh = shape_of(4, 2)
    table = layouts(2, mesh)
    prices = Resharder(mesh, Simple()).seconds((6, 7), 4 * 6 * 7)
    fit = [loosened((6, 7), s, mesh, padded=True) == s for s in table.shardings]
    assert (np.isfinite(prices[0]) == fit).all()
    assert fit[table.index[((), ("b",))]]  # 7 in two parts of 4
    assert not fit[table.index[(("a",), ())]]  # 6 in four parts of 2


def test_the_largest_tensors_have_prices() -> None:
    shape = (64, 32, 8192, 8192)  # bytes times elements do not fit 64 bits
    half = Resharder(shape_of(4, 2), Simple()).seconds(shape, math.prod(shape))
    whole = Resharder(shape_of(4, 2), Simple()).seconds(shape, 2 * math.prod(shape))
    assert (half >= 0).all()
    assert (whole >= half).all()
    assert whole.max() > half.max()


def test_steps_move_padded_pieces() -> None:
    mesh = shape_of(4, 2)
    resharder = Resharder(mesh, Simple())
    whole, split, other = ((), ()), ((), ("a",)), (("a",), ())
    (gather,) = resharder.path((8, 101), 4 * 8 * 101, split, whole)
    assert (gather.kind, gather.nbytes) == ("all_gather", 4 * 8 * 104)
    (swap,) = resharder.path((8, 101), 4 * 8 * 101, split, other)
    assert (swap.kind, swap.nbytes) == ("all_to_all", 4 * 8 * 104 / 4)


def test_a_padded_dimension_is_split_further_only_where_pieces_nest() -> None:
    mesh = shape_of(4, 2)
    resharder = Resharder(mesh, Simple())
    once, twice = (("a",),), (("a", "b"),)
    # 101: four pieces of 26 are eight of 13; 105: four of 27 are not eight of 14.
    assert [s.kind for s in resharder.path((101,), 404, once, twice)] == ["slice"]
    gather, cut = resharder.path((105,), 420, once, twice)
    assert (gather.kind, cut.kind, cut.axes) == ("all_gather", "slice", ("a", "b"))


@pytest.mark.parametrize(
    ("dtype", "compiler", "factor"),
    [
        ("bf16", "cpu", 2),
        ("f8E4M3FN", "cpu", 2),
        ("f16", "cpu", 1),
        ("f32", "cpu", 1),
        ("bf16", "tpu", 1),
    ],
)
def test_the_cpu_compiler_widens_what_it_sends(dtype: str, compiler: str, factor: int) -> None:
    assert sent_bytes(100, dtype, compiler) == 100 * factor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
def test_compiled_gathers_are_as_wide_as_we_say(dtype: str) -> None:
    mesh = mesh_of(8)
    sharded, whole = (NamedSharding(mesh, to_partition_spec(s)) for s in ((("a",),), ((),)))
    move = jax.jit(lambda x: x, in_shardings=sharded, out_shardings=whole)
    compiled = move.lower(jax.ShapeDtypeStruct((64,), dtype)).compile()
    (gather,) = read_compiled(compiled).collectives
    name = {"bfloat16": "bf16"}.get(dtype, "f32")
    assert gather.nbytes == sent_bytes(64 * np.dtype(jax.numpy.dtype(dtype)).itemsize, name, "cpu")
