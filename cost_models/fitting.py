"""Times as linear functions of work, fitted so that small and large ones count alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost_models.calibration import LinearFit
from autoshard.cost_models.protocol import Floats

KNEE_GAIN = 0.7
"""A second, steeper price per byte is kept if it takes the squared error below this share."""


FOLDS = 10
"""Parts into which observations are dealt to hold one out at a time."""


def fit_linear(
    work: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    units: Sequence[str],
    *,
    doubt_s: Sequence[float] | None = None,
    knees_bytes: Sequence[float] = (),
) -> LinearFit:
    """Fit ``seconds = fixed + sum(work[unit] * per_unit)`` with no constant below zero.

    The sum of squared *relative* errors is minimised, exactly: the best solution has some of the
    constants at zero and is the ordinary least-squares solution in the others, so each choice of
    those is solved and the best feasible one kept (the units are few).

    Args:
        work: Per observation, how much of each unit was done.
        seconds: Per observation, its time [s], above zero.
        units: The units to fit; one that is missing in an observation counts as none, one that is
            missing in all of them is left out.
        doubt_s: Per observation, an error that its time has whatever its size [s]; errors are
            taken relative to the time and the doubt together. None: no such error.
        knees_bytes: Amounts of ``bytes`` beyond which one more may cost extra, since it no longer
            fits a cache; the best is kept, and none unless it fits clearly better.

    Examples:
        >>> fit = fit_linear([{"bytes": 10.0}, {"bytes": 20.0}], [3.0, 5.0], ["bytes"])
        >>> round(fit.fixed_s, 9), round(fit.per_unit_s["bytes"], 9)
        (1.0, 0.2)
    """
    seen = [u for u in units if any(w.get(u, 0.0) > 0 for w in work)]
    table = np.asarray([[1.0, *(w.get(u, 0.0) for u in seen)] for w in work], dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    weight = 1 / (times + (0.0 if doubt_s is None else np.asarray(doubt_s)))
    constants, loss = least_squares(table * weight[:, None], times * weight)
    knee: float | None = None
    columns = table
    if "bytes" in seen and len(times) > len(seen) + 2:
        nbytes = table[:, 1 + seen.index("bytes")]
        for candidate in knees_bytes:
            wider = np.column_stack([table, np.maximum(0.0, nbytes - candidate)])
            tried, tried_loss = least_squares(wider * weight[:, None], times * weight)
            priced = tried[1 + seen.index("bytes")] > 0 and tried[-1] > 0
            if priced and tried_loss < loss * (KNEE_GAIN if knee is None else 1.0):
                constants, loss, knee, columns = tried, tried_loss, candidate, wider
    errors = np.abs(columns @ constants - times) * weight
    return LinearFit(
        fixed_s=float(constants[0]),
        per_unit_s={u: float(c) for u, c in zip(seen, constants[1:], strict=False)},
        near_bytes=knee,
        per_far_byte_s=0.0 if knee is None else float(constants[-1]),
        error=float(np.median(errors)),
        observations=len(times),
    )


def held_out(
    work: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    units: Sequence[str],
    *,
    doubt_s: Sequence[float] | None = None,
    knees_bytes: Sequence[float] = (),
    folds: int = FOLDS,
) -> tuple[float | None, ...]:
    """How far off each observation is by a fit to others: predicted over observed, less one.

    The observations are dealt into folds by turns; each fold is predicted by a fit to all others.
    One whose work is of a unit that no other fold has cannot be predicted and gets None.

    Args:
        work: As in :func:`fit_linear`, like the others.
        seconds: Per observation, its time [s].
        units: The units to fit.
        doubt_s: Per observation, an error that its time has whatever its size [s].
        knees_bytes: Where a second price per byte may begin.
        folds: How many; no more than there are observations.
    """
    count = len(seconds)
    errors: list[float | None] = [None] * count
    for fold in range(min(folds, count)):
        rest = [i for i in range(count) if i % folds != fold]
        if not rest:
            continue
        fit = fit_linear(
            [work[i] for i in rest],
            [seconds[i] for i in rest],
            units,
            doubt_s=None if doubt_s is None else [doubt_s[i] for i in rest],
            knees_bytes=knees_bytes,
        )
        for i in range(fold, count, folds):
            if all(unit in fit.per_unit_s for unit, much in work[i].items() if much > 0):
                errors[i] = predicted_s(fit, work[i]) / seconds[i] - 1
    return tuple(errors)


def predicted_s(fit: LinearFit, work: Mapping[str, float]) -> float:
    """The time of some work by a fit [s]."""
    total = fit.fixed_s
    for unit, much in work.items():
        total += (
            float(fit.bytes_s(np.asarray(much)))
            if unit == "bytes"
            else (much * fit.per_unit_s[unit])
        )
    return total


def least_squares(rows: Floats, target: Floats) -> tuple[Floats, float]:
    """The constants at or above zero with the least squared error, and that error.

    Args:
        rows: One column per constant, ``[N, C]``.
        target: What the rows times the constants should be, ``[N]``.
    """
    # Columns differ by many orders of magnitude (1 and 1e9 FLOP): scale them for the solver.
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best, best_loss = np.zeros(rows.shape[1]), float(np.square(target).sum())
    for kept in itertools.product((False, True), repeat=rows.shape[1]):
        mask = np.asarray(kept)
        if not mask.any():
            continue
        some = np.linalg.lstsq(scaled[:, mask], target, rcond=None)[0]
        if (some < 0).any():
            continue
        constants = np.zeros(rows.shape[1])
        constants[mask] = some / scale[mask]
        loss = float(np.square(rows @ constants - target).sum())
        # A constant more must pay its way, or an unused unit gets an arbitrary one.
        if loss < best_loss * (1 - 1e-9):
            best, best_loss = constants, loss
    return best, best_loss
