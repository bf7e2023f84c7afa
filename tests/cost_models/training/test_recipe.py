from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cost_models.topology import Topology
from autoshard.cost_models.training.accuracy import shipped_points
from autoshard.cost_models.training.policies import recomputed
from autoshard.cost_models.training.recipe import (
    mesh_axes,
    read_recipes,
    recipe_of,
)
from autoshard.errors import AutoshardError, InputError

ROW = {
    "id": "a",
    "chip": "v5e",
    "topology": "4x4",
    "model": "tiny",
    "n_layers": "2",
    "d_model": "1024",
    "n_q_heads": "8",
    "head_dim": "128",
    "d_ff": "4096",
    "vocab": "32000",
    "seq_len": "2048",
    "tokens_per_device_per_step": "4096",
    "mesh": "ici: fsdp=16",
}


def test_a_row_with_the_least_columns_is_read() -> None:
    recipe = recipe_of(ROW)
    assert (recipe.kv_heads, recipe.dense_layers, recipe.step_s) == (8, 2, None)
    assert recipe.recomputed == {"qkv", "attention", "out", "up"}
    assert recipe.topology == Topology("v5e:4x4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chip": ""}, "chip is missing"),
        ({"chip": "v99"}, "no chip is called"),
        ({"chip": "h100", "topology": "8x2"}, "no slice of a TPU"),
        ({"topology": "5x5"}, "there is no slice"),
        ({"topology": "big"}, "which is no shape"),
        ({"n_layers": "many"}, "n_layers is 'many'"),
        ({"n_layers": ""}, "n_layers is missing"),
        ({"d_model": "-1"}, "d_model is '-1'"),
        ({"seq_len": "0"}, "seq_len is '0'"),
        ({"tokens_per_device_per_step": ""}, "tokens_per_device_per_step is missing"),
        ({"mesh": "ici: fsdp=32"}, "does not fit the 16 devices"),
        ({"attention_kind": "MLA"}, "lacks q_lora"),
        ({"n_experts": "8"}, "moe_d_ff is missing"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes: dict[str, str], message: str) -> None:
    with pytest.raises(AutoshardError, match=message):
        recipe_of({**ROW, **changes})


def test_a_bad_row_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    lines = [",".join(ROW), ",".join(ROW.values()), ",".join({**ROW, "chip": "v99"}.values())]
    path.write_text("\n".join(lines).replace("ici: fsdp=16", '"ici: fsdp=16"'), encoding="utf-8")
    recipes, refused = read_recipes(path)
    assert [recipe.name for recipe in recipes] == ["a"]
    assert refused == (("a", "no chip is called 'v99'"),)


@pytest.mark.parametrize("text", ["", "one,two\n1,2\n"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="is no table of runs"):
        read_recipes(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_recipes(tmp_path / "nowhere.csv")


def test_all_shipped_runs_are_read() -> None:
    recipes = shipped_points()
    assert len(recipes) == 81
    assert all(recipe.step_s and recipe.model_flops for recipe in recipes)


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("full", {"qkv", "attention", "out", "up"}),
        ("minimal", {"attention"}),
        ("save_dot_except_mlpwi", {"attention", "up"}),
        ("custom: save{decoder_layer_input,context,query,key,value}", {"out", "up"}),
        ("none", set()),
        ("", {"qkv", "attention", "out", "up"}),
    ],
)
def test_a_policy_says_what_is_computed_again(policy: str, parts: set[str]) -> None:
    assert recomputed(policy) == parts


def test_what_a_mesh_leaves_open_holds_copies() -> None:
    slices = Topology("2*v5e:4x4")
    assert mesh_axes("ici: fsdp=4; dcn: data=2", slices) == ({"fsdp": 4, "data": 4}, 1)
    assert mesh_axes("ici: expert=16 (x=3); dcn: stage=2", slices) == ({"expert": 16}, 2)
