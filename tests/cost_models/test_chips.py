from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.chips import CHIPS, find_chip, load_chips
from autoshard.cost_models.topology import Topology
from autoshard.errors import AutoshardError, InputError, UnknownNameError


def test_the_catalogue_holds_every_tpu_generation_and_common_gpus() -> None:
    assert {"v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x"} <= set(CHIPS)
    assert {"A100-80G", "H100", "H200", "B200", "GB200-NVL72"} <= set(CHIPS)


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_every_figure_has_a_value_above_zero_and_a_source(name: str) -> None:
    chip = CHIPS[name]
    for figure in chip.figures.values():
        assert figure.value > 0
        assert figure.sources
        assert all(figure.sources)


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_a_device_may_use_no_more_memory_than_its_chip_has(name: str) -> None:
    chip = CHIPS[name]
    # v5p: the document's 95 GiB is below what XLA:TPU allows (95.73 GiB): rounding of one of them.
    assert 0 < chip.memory_bytes * chip.devices <= chip.value("hbm_bytes") * 1.01


@pytest.mark.parametrize("name", [n for n in CHIPS if CHIPS[n].kind == "tpu"])
def test_the_bf16_peak_is_what_clock_and_matrix_units_can_do(name: str) -> None:
    chip = CHIPS[name]
    figures = chip.figures
    if "flops_per_cycle_bf16" in figures:
        per_cycle = chip.value("flops_per_cycle_bf16")
    elif "flops_per_cycle_bf16_per_core" in figures:
        per_cycle = chip.value("flops_per_cycle_bf16_per_core") * chip.value("cores_per_chip")
    else:
        units = chip.value("cores_per_chip") * chip.value("mxus_per_core")
        per_cycle = units * chip.value("mxu_dim") ** 2 * 2
    assert per_cycle * chip.value("clock_hz") == pytest.approx(chip.value("peak_bf16"), rel=0.02)


@pytest.mark.parametrize(
    ("name", "size", "wrapped"),
    [
        ("v5e", 16, True),
        ("v5e", 8, False),
        ("v6e", 4, False),
        ("v6e", 16, True),
        ("v5p", 4, True),
        ("v5p", 2, False),
        ("v4", 8, True),
        ("v3", 16, False),
    ],
)
def test_axes_are_rings_by_the_published_rules(name: str, size: int, wrapped: bool) -> None:
    assert CHIPS[name].wraps(size) is wrapped


def test_an_unknown_chip_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError) as error:
        CHIPS["v5ee"]
    assert "no chip is called 'v5ee'" in str(error.value)
    assert "did you mean 'v5e'" in str(error.value)
    assert "H100" in error.value.fix


def test_an_unknown_figure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="no figure called 'horsepower'") as error:
        CHIPS["v5e"].value("horsepower")
    assert "peak_bf16" in error.value.fix


def test_figures_keep_the_values_of_sources_that_disagree() -> None:
    bandwidth = CHIPS["v5p"].figures["hbm_bw"]
    assert bandwidth.value == 2.765e12
    assert 2.46e12 in [value for value, _ in bandwidth.alternatives]


OWN = """
[sources]
SHEET = "the data sheet, page 3"

[chips.bee]
kind = "tpu"
pod = [8, 8]
[chips.bee.figures]
peak_bf16 = { value = 1e14, src = "SHEET" }
hbm_bytes = 16e9
hbm_bw = 1e12
ici_oneway_effective = 4e10
mxu_dim = 128
wrap_multiple = 8
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "bee.toml"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_file_adds_a_chip(own: Path) -> None:
    chip = find_chip(str(own))
    assert chip.figures["peak_bf16"].sources == ("the data sheet, page 3",)
    assert chip.figures["hbm_bw"].sources == (str(own),)
    assert chip.figures["hop_s"].sources == ("assumed, as in the catalogue",)
    assert AnalyticModel(str(own)).peak_flops("bf16") == 1e14
    topology = Topology(f"{own}:4x8")
    assert [axis.wrapped for axis in topology.axes] == [False, True]
    assert Topology(topology.name) == topology
    mesh = topology.mesh({"data": 8, "model": 4})
    assert mesh.devices[0, 0].topology.chip == chip


def test_a_chip_of_several_in_a_file_is_named(own: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.toml"
    wasp = OWN[OWN.index("[chips.bee]") :].replace("bee", "wasp")
    both.write_text(OWN + wasp, encoding="utf-8")
    assert set(load_chips(both)) == {"bee", "wasp"}
    assert find_chip(f"{both}#wasp").name == "wasp"
    with pytest.raises(UnknownNameError, match="holds several chips"):
        find_chip(str(both))
    with pytest.raises(UnknownNameError, match="holds no chip 'fly'"):
        find_chip(f"{both}#fly")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "tpu"', "", "has no kind"),
        ("pod = [8, 8]", "", "has no pod"),
        ("hbm_bw = 1e12", "", "lacks hbm_bw"),
        ("hbm_bw = 1e12", "hbm_bw = -1", "has hbm_bw = -1"),
        ("hbm_bw = 1e12", 'hbm_bw = "fast"', "has hbm_bw = 'fast'"),
        ("[chips.bee.figures]", "[chips.bee.numbers]", "has no figures"),
        ("mxu_dim = 128", "mxu_dim = ", "cannot be read"),
        ("[chips.", "[parts.", "holds no chips"),
    ],
)
def test_what_a_chip_file_lacks_is_named(own: Path, old: str, new: str, message: str) -> None:
    own.write_text(OWN.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        find_chip(str(own))
    assert error.value.at == str(own)


def test_a_file_that_is_not_there_is_an_error_of_the_caller() -> None:
    with pytest.raises(AutoshardError, match="cannot be read"):
        find_chip("nowhere/chip.toml")


@pytest.mark.parametrize(
    ("alias", "name"),
    [("tpu7x", "v7x"), ("a100", "A100-80G"), ("H100", "H100"), ("gb200", "GB200-NVL72")],
)
def test_chips_go_by_other_names(alias: str, name: str) -> None:
    assert find_chip(alias) is CHIPS[name]
