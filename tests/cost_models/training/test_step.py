from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.topology import Topology
from autoshard.cost_models.training.accuracy import shipped_points
from autoshard.cost_models.training.fitting import fit, leave_one_out
from autoshard.cost_models.training.recipe import Recipe
from autoshard.cost_models.training.step import CONSTANTS, PRIORS, Steps, named
from autoshard.cost_models.training.work import step_work

POINTS = {recipe.name: recipe for recipe in shipped_points()}
names = st.sampled_from(sorted(POINTS))


def seconds(*recipes: Recipe) -> list[float]:
    return list(map(float, Steps(recipes).seconds(PRIORS)))


def test_useful_work_is_counted_as_the_publishers_count_it() -> None:
    for recipe in POINTS.values():
        if recipe.family == "diffusion":
            continue  # its cross-attention has no columns
        counted = step_work(replace(recipe, model_flops=None)).model_flops
        assert counted == pytest.approx(recipe.model_flops, rel=0.025), recipe.name


@given(names, st.sampled_from(["tokens", "d_ff", "vocab"]))
def test_more_work_takes_longer(name: str, field: str) -> None:
    recipe = POINTS[name]
    more = replace(recipe, **{field: getattr(recipe, field) * 2})
    one, two = seconds(recipe, more)
    assert two >= one


@given(names)
def test_what_is_computed_again_takes_longer(name: str) -> None:
    recipe = POINTS[name]
    everything = frozenset({"qkv", "attention", "out", "up"})
    kept, again = seconds(
        replace(recipe, recomputed=frozenset()), replace(recipe, recomputed=everything)
    )
    assert again > kept


@given(names)
def test_no_step_is_faster_than_the_peak_of_its_products(name: str) -> None:
    steps = Steps([POINTS[name]])
    faster = {"fp8": 2, "int8": 2}.get(POINTS[name].dtype, 1)
    assert steps.seconds(PRIORS)[0] > steps.useful_s()[0] / faster


def test_more_slices_take_longer_for_as_much_work_each() -> None:
    recipe = POINTS["mt-v5e-64b-1x256"]
    times = seconds(*(replace(recipe, topology=Topology(f"{n}*v5e:16x16")) for n in (1, 2, 4, 8)))
    assert times == sorted(times)
    assert times[0] < times[-1] < 1.5 * times[0]


def test_predictions_are_itemised() -> None:
    recipe = POINTS["tr-v6e-llama31-8b-256"]
    (found,) = Steps([recipe]).predictions({})
    assert found.step_s == pytest.approx(seconds(recipe)[0])
    assert found.products_s + found.attention_s + found.memory_s <= found.step_s
    assert found.mfu == pytest.approx(recipe.model_flops / found.step_s / 918e12)  # type: ignore[operator]


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    recipes = list(POINTS.values())
    truth = PRIORS + 0.05
    made = Steps(recipes).seconds(truth)
    again = Steps([replace(r, step_s=float(t)) for r, t in zip(recipes, made, strict=True)])
    found = fit(again, range(len(recipes)))
    before, after = (
        float(np.mean(np.abs(again.seconds(logs) / made - 1))) for logs in (PRIORS, found)
    )
    assert after < before / 5
    assert after < 0.01
    assert set(named(found)) == {constant.name for constant in CONSTANTS}


def test_a_program_is_predicted_as_if_its_own_times_were_not_known() -> None:
    recipes = list(POINTS.values())
    chosen = [i for i, recipe in enumerate(recipes) if recipe.program == "gpt3-175b"]
    known = leave_one_out(Steps(recipes), chosen)
    wrong = [
        replace(r, step_s=100.0 * (r.step_s or 1)) if r.program == "gpt3-175b" else r
        for r in recipes
    ]
    assert np.array_equal(leave_one_out(Steps(wrong), chosen)[chosen], known[chosen])


def test_nothing_measured_leaves_the_constants_at_what_is_known_beforehand() -> None:
    assert np.array_equal(fit(Steps(list(POINTS.values())), []), PRIORS)
