"""How right predicted step times are: errors on programs that were left out, beside baselines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from autoshard.cost_models.protocol import Floats
from autoshard.cost_models.training.fitting import fit, half_and_half, leave_one_out
from autoshard.cost_models.training.recipe import Recipe, read_recipes
from autoshard.cost_models.training.step import PRIORS, Steps, named
from autoshard.cost_models.training.work import step_work
from autoshard.errors import AutoshardError

GROUPS: dict[str, Callable[[Recipe], bool]] = {
    "dense, bf16, high or medium confidence": lambda r: (
        r.dtype == "bf16" and r.family == "dense" and r.confidence in ("high", "medium")
    ),
    "bf16": lambda r: r.dtype == "bf16",
    "all": lambda r: True,
}
"""Rows that errors are averaged over."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run, predicted in several ways.

    Attributes:
        name: Its name in the table.
        program: The model.
        chip: The chip.
        measured_s: Measured time of a step [s]; None if not known.
        left_out_s: Predicted by constants fitted to rows of other programs [s].
        half_s: Predicted by constants fitted to the other half of the programs [s].
        fitted_s: Predicted by constants fitted to all rows, this one too [s].
        prior_s: Predicted by what constants are taken for beforehand [s].
        mfu: Of the prediction ``left_out_s``.
        groups: The groups it counts in.
    """

    name: str
    program: str
    chip: str
    measured_s: float | None
    left_out_s: float
    half_s: float
    fitted_s: float
    prior_s: float
    mfu: float
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Predictions of a table of runs, and how far they are off.

    Attributes:
        rows: Every run.
        refused: Rows that could not be read, with the reason.
        errors: Mean of abs(predicted / measured - 1), by group and way of prediction; baselines
            are the chip's median MFU and the roofline of its peak.
        counts: Measured rows in each group.
        rank_correlation: Spearman's, per chip, of step times and of MFU, left out.
        constants: Fitted to all rows.
    """

    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]
    errors: dict[str, dict[str, float]]
    counts: dict[str, int]
    rank_correlation: dict[str, dict[str, float]]
    constants: dict[str, float]


@cache
def shipped_points() -> tuple[Recipe, ...]:
    """The published runs that come along: public figures, each with its source in the file."""
    with resources.as_file(resources.files("autoshard.cost_models.training")) as folder:
        recipes, _ = read_recipes(folder / "points.csv")
    return recipes


def laid_out(
    recipes: Sequence[Recipe], refused: Sequence[tuple[str, str]]
) -> tuple[tuple[Recipe, ...], tuple[tuple[str, str], ...]]:
    """The recipes whose mesh can be laid onto their slices; the others join the refused."""
    kept, left = [], list(refused)
    for recipe in recipes:
        try:
            step_work(recipe)
        except AutoshardError as error:
            left.append((recipe.name, error.problem))
        else:
            kept.append(recipe)
    return tuple(kept), tuple(left)


def accuracy(points: str | Path | None = None) -> Accuracy:
    """Predict every run of a table, and measure how far off that is.

    Constants are fitted to the shipped runs and to those of the table, never to a run of the
    program that is predicted (a row that is in both tables counts once).

    Args:
        points: A CSV file with the columns of ``points.csv``; None for the shipped runs.

    Raises:
        InputError: The file cannot be read.
    """
    targets, refused = (shipped_points(), ()) if points is None else laid_out(*read_recipes(points))
    given = {recipe.name for recipe in targets}
    others = tuple(r for r in shipped_points() if points is not None and r.name not in given)
    steps = Steps([*targets, *others])
    wanted = range(len(targets))
    ways = {
        "left out": leave_one_out(steps, wanted),
        "half": half_and_half(steps, wanted),
        "fitted": steps.seconds(logs := fit(steps, range(len(steps.recipes)))),
        "priors": steps.seconds(PRIORS),
    }
    useful = steps.useful_s()
    rows = tuple(
        Row(
            name=r.name,
            program=r.program,
            chip=r.chip,
            measured_s=r.step_s,
            left_out_s=float(ways["left out"][i]),
            half_s=float(ways["half"][i]),
            fitted_s=float(ways["fitted"][i]),
            prior_s=float(ways["priors"][i]),
            mfu=float(useful[i] / ways["left out"][i]),
            groups=tuple(name for name, holds in GROUPS.items() if holds(r)),
        )
        for i, r in enumerate(targets)
    )
    measured = steps.measured_s[: len(targets)]
    errors, counts = {}, {}
    for group in GROUPS:
        inside = np.array([group in row.groups for row in rows]) & np.isfinite(measured)
        counts[group] = int(inside.sum())
        if inside.any():
            chips = [row.chip for row in rows]
            predicted = {way: times[: len(targets)] for way, times in ways.items()}
            predicted["median MFU of the chip"] = _median_s(useful, measured, chips, inside)
            predicted["roofline"] = useful[: len(targets)]
            errors[group] = {
                way: float(np.mean(np.abs(times[inside] / measured[inside] - 1)))
                for way, times in predicted.items()
            }
    return Accuracy(
        rows, refused, errors, counts, _correlations(rows, useful, measured), named(logs)
    )


def _median_s(useful: Floats, measured: Floats, chips: Sequence[str], inside: Floats) -> Floats:
    """Times by the median MFU of the rows of each chip, the predicted one too."""
    times = np.full(len(chips), math.nan)
    for chip in set(chips):
        of = [i for i, name in enumerate(chips) if name == chip and inside[i]]
        if of:
            times[of] = useful[of] / statistics.median(useful[i] / measured[i] for i in of)
    return times


def _correlations(
    rows: Sequence[Row], useful: Floats, measured: Floats
) -> dict[str, dict[str, float]]:
    found = {}
    for chip in sorted({row.chip for row in rows}):
        of = [i for i, r in enumerate(rows) if r.chip == chip and math.isfinite(measured[i])]
        times = np.array([rows[i].left_out_s for i in of])
        if len(of) > 2 and len(set(measured[of])) > 1:
            found[chip] = {
                "rows": float(len(of)),
                "step time": float(spearmanr(times, measured[of])[0]),
                "MFU": float(spearmanr(useful[of] / times, useful[of] / measured[of])[0]),
            }
    return found
