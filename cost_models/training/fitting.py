"""Fitting the constants to measured steps, and predicting each program from all others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import numpy as np
from scipy.optimize import least_squares

from autoshard.cost_models.protocol import Floats
from autoshard.cost_models.training.recipe import Recipe
from autoshard.cost_models.training.step import PRIORS, SPREADS, Steps

NOISE = 0.06
"""Spread of repeated runs of one recipe, relative.

Source: AI-Hypercomputer/tpu-recipes PRs 34 and 39 against its READMEs: 4 to 7%.
"""

OUTLIER = 3.0
"""Residuals beyond about that many spreads pull no harder (arctangent loss)."""

LOW_CONFIDENCE = 0.6
"""Weight of a row of low confidence."""

REPEATS = 0.35
"""A program with n rows weighs n^(1 - 2 x 0.35) as much as one with a single row."""


def fit(steps: Steps, chosen: Collection[int]) -> Floats:
    """Logarithms of the constants that fit measured steps best.

    Least squares of the relative errors and, as a prior, of how far constants are from what they
    are taken for beforehand.

    Args:
        steps: The recipes.
        chosen: Which of them to fit to; those without a measured time are left out.
    """
    measured = steps.measured_s
    use = np.array([i for i in sorted(chosen) if math.isfinite(measured[i])], dtype=np.int64)
    if not len(use):
        return PRIORS.copy()
    weights = _weights([steps.recipes[i] for i in use])

    def residuals(logs: Floats) -> Floats:
        errors = np.log(steps.seconds(logs)[use] / measured[use]) * weights / NOISE
        return np.concatenate([OUTLIER * np.arctan(errors / OUTLIER), (logs - PRIORS) / SPREADS])

    return np.asarray(least_squares(residuals, PRIORS, max_nfev=60).x)


def _weights(recipes: list[Recipe]) -> Floats:
    rows = Counter(recipe.program for recipe in recipes)
    return np.array(
        [
            (LOW_CONFIDENCE if r.confidence == "low" else 1.0) / rows[r.program] ** REPEATS
            for r in recipes
        ]
    )


def leave_one_out(steps: Steps, targets: Collection[int]) -> Floats:
    """Each target's time, predicted by constants fitted to all rows of other programs [s].

    Args:
        steps: The recipes.
        targets: Rows to predict; NaN elsewhere.
    """
    found = np.full(len(steps.recipes), math.nan)
    for program in sorted({steps.recipes[i].program for i in targets}):
        inside = [i for i, recipe in enumerate(steps.recipes) if recipe.program == program]
        logs = fit(steps, set(range(len(steps.recipes))) - set(inside))
        wanted = [i for i in inside if i in targets]
        found[wanted] = steps.seconds(logs)[wanted]
    return found


def half_and_half(steps: Steps, targets: Collection[int]) -> Floats:
    """Each target's time, predicted by constants fitted to the other half of the programs [s].

    Programs in the order of their names belong to the halves in turn.
    """
    found = np.full(len(steps.recipes), math.nan)
    programs = sorted({recipe.program for recipe in steps.recipes})
    for half in (0, 1):
        inside = set(programs[half::2])
        held = [i for i, recipe in enumerate(steps.recipes) if recipe.program in inside]
        logs = fit(steps, set(range(len(steps.recipes))) - set(held))
        wanted = [i for i in held if i in targets]
        found[wanted] = steps.seconds(logs)[wanted]
    return found
