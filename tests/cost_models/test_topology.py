from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import autoshard
from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.layout import Layout, LogicalAxis, Ride, factorisations, layout_of
from autoshard.cost_models.planned import PlannedDevice
from autoshard.cost_models.protocol import MeshAxis
from autoshard.cost_models.routes import route
from autoshard.cost_models.saved import describe, restore
from autoshard.cost_models.topology import Topology, parse_layout, topology_of
from autoshard.errors import AutoshardError, InputError, UnknownNameError

SLICES = ("v5e:4x4", "v6e:8x16", "v5p:2x2x1", "v5p:4x4x8", "tpu7x:2x2x2", "v3:4x4", "2*v5e:4x8")
OTHERS = ("h100:8x2", "gb200:72", "cpu:8")


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "cores", "rings"),
    [
        ("v5e:4x4", 16, 2, 1, "--"),
        ("v5e:8x16", 128, 16, 1, "-r"),
        ("v6e:16x16", 256, 32, 1, "rr"),
        ("v5p:4x4x8", 128, 32, 2, "rrr"),
        ("v5p:2x4x4", 32, 8, 2, "---"),
        ("v4:16x16x16", 4096, 1024, 2, "rrr"),
        ("tpu7x:4x4x4", 128, 16, 1, "rrr-"),
        ("v2:16x16", 512, 64, 1, "rr-"),
        ("v3:16x16", 512, 32, 1, "---"),
        ("2*v5e:16x16", 512, 64, 1, "-rr"),
        ("h100:8x4", 32, 4, 1, "--"),
        ("cpu:8", 8, 1, 1, "-"),
    ],
)
def test_a_topology_knows_its_devices_hosts_cores_and_rings(
    name: str, devices: int, hosts: int, cores: int, rings: str
) -> None:
    topology = Topology(name)
    assert (topology.devices, topology.hosts, topology.cores_per_device) == (devices, hosts, cores)
    assert "".join("-r"[axis.wrapped] for axis in topology.axes) == rings
    assert Topology(topology.name) == topology


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:32x32", "a v5e pod is 16x16 chips"),
        ("v5e:1x8", "one at most twice the other"),
        ("v5e:4x4x4", "has 2 axes, not 3"),
        ("v5p:4x4", "has 3 axes, not 2"),
        ("v5p:4x4x6", "whole cubes"),
        ("v5p:16x20x32", "a v5p pod is"),
        ("h100:16", "has 8 devices"),
        ("cpu:4x2", "one axis"),
        ("3*h100:8", "only TPUs come in slices"),
        ("v5e", "is no topology"),
        ("v5e:0x4", "has no devices"),
        ("0*v5e:4x4", "has no devices"),
    ],
)
def test_what_does_not_exist_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        Topology(name)
    assert error.value.fix


def test_an_unknown_chip_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="no chip is called 'v5x'"):
        Topology("v5x:4x4")


@pytest.mark.parametrize("name", [*SLICES, *OTHERS])
def test_every_layout_takes_each_device_once_and_is_read_back_from_its_text(name: str) -> None:
    topology = Topology(name)
    for sizes in factorisations(topology.devices, 2):
        try:
            found = topology.layouts({"a": sizes[0], "b": sizes[1]})
        except InputError:
            continue
        assert len(set(map(str, found))) == len(found)
        for layout in (found[0], found[-1]):
            places = layout.positions()
            seen = set(zip(*(places[a.name].ravel() for a in topology.axes), strict=True))
            assert len(seen) == topology.devices
            assert parse_layout(str(layout)) == layout


def test_all_layouts_of_a_small_slice_are_found() -> None:
    # Each of x and y (2 x 2) goes whole to one axis, as each axis has two devices.
    texts = {str(layout) for layout in Topology("v5e:2x2").layouts({"a": 2, "b": 2})}
    assert texts == {"v5e:2x2 a=x:2 b=y:2", "v5e:2x2 a=y:2 b=x:2"}
    on_x = {str(m) for m in Topology("v5e:4x4").layouts({"a": 2, "b": 8}) if "a=x" in str(m)}
    assert on_x == {"v5e:4x4 a=x:2@2 b=x:2,y:4", "v5e:4x4 a=x:2 b=x:2@2,y:4"}


def test_the_meshes_of_a_slice_are_all_factorisations_best_first() -> None:
    found = list(Topology("v5e:4x4").meshes(["data", "model"]))
    assert sorted(m.sizes["data"] for m in found) == [1, 2, 4, 8, 16]
    first = found[0].sizes
    assert first == {"data": 16, "model": 1}


def test_tensor_parallel_devices_are_put_on_the_fastest_links() -> None:
    # Both devices of a chip, rather than neighbours on the torus; GPUs of a node, not two nodes.
    assert str(Topology("tpu7x:4x4x4").layouts({"data": 64, "model": 2})[0]).endswith("core:2")
    assert str(Topology("h100:8x4").layouts({"data": 4, "model": 8})[0]).endswith("model=nvlink:8")
    assert "data=dcn:2" in str(Topology("2*v5e:16x16").layouts({"data": 32, "model": 16})[0])


def test_slices_can_be_put_on_a_named_axis() -> None:
    topology = Topology("2*v5e:4x4")
    chosen = topology.layouts({"data": 8, "model": 4}, dcn={"model": 2})[0]
    assert any(ride == Ride("dcn", 2) for ride in chosen.axes[1].rides)
    with pytest.raises(InputError, match="cannot be laid out"):
        topology.layouts({"data": 8, "model": 4}, dcn={"data": 4})


@pytest.mark.parametrize("name", SLICES)
def test_a_mesh_of_planned_devices_tells_its_layout(name: str) -> None:
    topology = Topology(name)
    devices = topology.devices
    for layout in topology.layouts({"data": devices // 2, "model": 2}):
        mesh = topology.mesh(layout=layout)
        assert topology_of(list(mesh.devices.flat)) == topology
        found = layout_of(mesh.devices, mesh.axis_names, topology)
        assert found is not None
        there, here = layout.positions(), found.positions()
        assert all(np.array_equal(there[axis], here[axis]) for axis in there)
    assert sorted(d.id for d in mesh.devices.flat) == list(range(devices))
    hosts = [d.process_index for d in mesh.devices.flat]
    assert sorted(set(hosts)) == list(range(topology.hosts))


def test_a_mesh_that_jumps_about_has_no_layout() -> None:
    topology = Topology("v5e:4x4")
    mesh = topology.mesh({"data": 16})
    order = [0, 5, 1, 2, 3, 4, *range(6, 16)]
    assert layout_of(mesh.devices[order], ("data",), topology) is None


def test_devices_are_laid_out_by_their_coordinates() -> None:
    topology = Topology("v5p:2x2x2")
    layout = topology.layouts({"data": 4, "model": 2})[-1]
    wanted = topology.mesh(layout=layout).devices
    shuffled = [wanted.flat[i] for i in (3, 0, 7, 1, 6, 2, 5, 4)]
    assert np.array_equal(topology.mesh(layout=layout, devices=shuffled).devices, wanted)
    with pytest.raises(InputError, match="none was given"):
        topology.mesh(layout=layout, devices=shuffled[1:])


def test_folded_axes_that_share_an_axis_are_joined() -> None:
    layout = parse_layout("v5e:16x16 a=x:4@4 b=x:2@2,y:16 c=x:2")
    assert layout.rides(["b", "c"]) == (Ride("x", 4), Ride("y", 16))
    assert layout.rides(["a", "c"]) == (Ride("x", 2), Ride("x", 4, 4))
    assert layout.rides(["a", "b", "c"]) == (Ride("x", 16), Ride("y", 16))


def test_strided_parts_share_their_links_and_only_whole_axes_are_rings() -> None:
    layout = parse_layout("v5e:16x16 a=x:4@4 b=x:4 c=y:16")
    link = 4.5e10
    (strided,) = route(layout, ["a"]).torus
    assert (strided.bytes_per_s, strided.wrapped, strided.hop_s) == (link / 4, True, 4e-6)
    (neighbours,) = route(layout, ["b"]).torus
    assert (neighbours.bytes_per_s, neighbours.wrapped) == (link, False)
    (whole,) = route(layout, ["a", "b"]).torus
    assert (whole.size, whole.bytes_per_s, whole.wrapped) == (16, link, True)


def test_parts_of_one_axis_that_lie_apart_share_its_links_too() -> None:
    layout = parse_layout("v5e:16x16 a=x:4@4 b=x:2@2,y:16 c=x:2")
    rates = [axis.bytes_per_s for axis in route(layout, ["a", "c"]).torus]
    assert rates == [4.5e10 / 2, 4.5e10 / 8]


def seconds(text: str, kind: str, names: tuple[str, ...], nbytes: float) -> float:
    return float(route(parse_layout(text), names).seconds(kind, np.array(nbytes)))  # type: ignore[arg-type]


def test_devices_of_a_chip_gather_once_or_each_for_itself() -> None:
    text = "v7x:4x4x4 data=x:4,y:4,z:4 model=core:2"
    # Alone, the two devices of a chip share six links for data of their own.
    alone = seconds(text, "all_gather", ("data",), 1e9)
    assert alone == pytest.approx(2 * 1e9 / (6 * 9e10))
    # Together they receive it once, and pass it on between the dies.
    together = seconds(text, "all_gather", ("data", "model"), 1e9)
    assert together == pytest.approx(1e9 / (6 * 9e10))
    assert seconds(text, "all_gather", ("model",), 1e9) == pytest.approx(0.5e9 / 6e11)


def test_slices_reduce_over_dcn_what_each_device_keeps() -> None:
    text = "2*v5e:16x16 data=dcn:2,x:16 model=y:16"
    over_ici = 2 * 1e9 / 9e10
    over_dcn = 2 * (1e9 / 16) * (1 / 2) / 3.125e9
    both = seconds(text, "all_reduce", ("data",), 1e9)
    assert both == pytest.approx(max(over_ici, over_dcn))
    # Alone over DCN, everything goes there.
    alone = seconds("2*v5e:16x16 data=dcn:2 fsdp=x:16,y:16", "all_reduce", ("data",), 1e9)
    assert alone == pytest.approx(1e9 / 3.125e9)


def test_groups_across_nodes_share_the_way_out() -> None:
    text = "h100:8x4 data=node:4 model=nvlink:8"
    assert seconds(text, "all_gather", ("data",), 1e9) == pytest.approx(0.75e9 / (4e11 / 8))


@given(
    st.sampled_from(SLICES[:5]),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
    st.integers(0, 10**6),
    st.floats(1e3, 1e10),
)
def test_no_gather_is_faster_than_its_links_allow(
    name: str, kind: str, pick: int, nbytes: float
) -> None:
    topology = Topology(name)
    choices = topology.layouts({"a": topology.devices // 2, "b": 2})
    layout = choices[pick % len(choices)]
    chip = topology.chip
    assert chip is not None
    links = 2 * len(topology.shape) * chip.value("ici_oneway_effective")
    inside = chip.value("d2d_oneway", "hbm_bw") if topology.devices_per_chip > 1 else 0.0
    time = float(route(layout, ["a"]).seconds(kind, np.array(nbytes)))  # type: ignore[arg-type]
    received = nbytes * (1 - 2 / topology.devices) / (4 if kind == "all_to_all" else 1)
    assert time >= received / topology.devices_per_chip / (links + inside) * (1 - 1e-9)


def test_the_model_of_a_mesh_prices_collectives_where_its_axes_lie() -> None:
    topology = Topology("v5e:16x16")
    good = AnalyticModel("v5e", layout=parse_layout("v5e:16x16 data=x:16 model=y:16"))
    bad = AnalyticModel("v5e", layout=parse_layout("v5e:16x16 data=x:4,y:4@4 model=x:4@4,y:4"))
    nbytes = np.array([1e9])
    one, both = (MeshAxis("model", 16),), (MeshAxis("data", 16), MeshAxis("model", 16))
    assert bad.collective_s("all_gather", nbytes, one) > good.collective_s(
        "all_gather", nbytes, one
    )
    assert bad.collective_s("all_gather", nbytes, both) == good.collective_s(
        "all_gather", nbytes, both
    )
    assert topology.layouts({"data": 16, "model": 16})[0].sizes == {"data": 16, "model": 16}
    with pytest.raises(InputError, match="says nothing of"):
        AnalyticModel("v5p", layout=good.layout)


def test_a_model_with_a_layout_is_saved_and_restored() -> None:
    model = AnalyticModel("v5e", layout=parse_layout("v5e:4x4 data=x:4,y:2@2 model=y:2"))
    text = describe(model)
    assert text is not None
    again = restore(text)
    assert isinstance(again, AnalyticModel)
    assert again.layout == model.layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:4x4 a=x:4", "does not take each position of axis 'y'"),
        ("v5e:4x4 a=x:4 b=y:4@2", "does not take each position of axis 'y'"),
        ("v5e:4x4 a=x:4,y:4 b=q:2", "has no axis 'q'"),
        ("v5e:4x4 a=x:four,y:4", "says no part"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(AutoshardError, match=message):
        parse_layout(text)


def test_sizes_that_do_not_fill_the_slice_are_refused() -> None:
    with pytest.raises(InputError, match=r"data=4, model=2 has 8 devices, v5e:4x4 has 16"):
        Topology("v5e:4x4").mesh({"data": 4, "model": 2})
    with pytest.raises(InputError, match="is for v5e:2x2"):
        Topology("v5e:4x4").mesh(layout="v5e:2x2 a=x:2 b=y:2")


@pytest.mark.parametrize("name", ["v5e:2x2", "h100:4", "cpu:4"])
def test_a_function_is_planned_for_devices_that_nobody_has(name: str) -> None:
    mesh = Topology(name).mesh({"data": 2, "model": 2})
    step = autoshard(lambda w, x, key: (x @ w, jax.random.normal(key, (4,))), mesh)
    shapes = [jax.ShapeDtypeStruct((256, 256), "float32")] * 2
    plan = step.plan(*shapes, jax.eval_shape(lambda: jax.random.key(0)))
    assert plan.predicted.step_s > 0
    with pytest.raises(InputError, match="are planned, nothing can run"):
        step.compile(*shapes, jax.eval_shape(lambda: jax.random.key(0)))


def test_a_topology_prices_a_mesh_of_other_devices() -> None:
    mesh = Topology("cpu:4").mesh({"data": 2, "model": 2})
    shapes = [jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 2
    plans = [
        autoshard(lambda w, x: x @ w, mesh, cost_model=name).plan(*shapes)
        for name in ("v5e:2x2", "v5e")
    ]
    assert all(plan.predicted.step_s < 1e-4 for plan in plans)
    with pytest.raises(InputError, match="has 16"):
        autoshard(lambda w, x: x @ w, mesh, cost_model="v5e:4x4").plan(*shapes)


def test_a_planned_device_says_where_it_is() -> None:
    device = Topology("2*v5e:4x4").mesh({"data": 32}).devices[17]
    assert isinstance(device, PlannedDevice)
    assert (device.slice_index, device.coords, device.platform) == (1, (0, 1, 0), "tpu")
    layout = Layout(device.topology, (LogicalAxis("a", (Ride("x", 4),)),))
    assert math.prod(layout.sizes.values()) == 4
