"""Times as linear functions of work, fitted so that small and large ones count alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost_models.calibration import LinearFit


def fit_linear(
    work: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    units: Sequence[str],
    doubt_s: Sequence[float] | None = None,
) -> LinearFit:
    """Fit ``seconds = fixed + sum(work[unit] * per_unit)`` with no constant below zero.

    The sum of squared *relative* errors is minimised, exactly: the best solution has some of the
    constants at zero and is the ordinary least-squares solution in the others, so each choice of
    those is solved and the best feasible one kept (the units are few).

    Args:
        work: Per observation, how much of each unit was done.
        seconds: Per observation, its time [s], above zero.
        units: The units to fit; one that is missing in an observation counts as none.
        doubt_s: Per observation, an error that its time has whatever its size [s]; errors are
            taken relative to the time and the doubt together. None: no such error.

    Examples:
        >>> fit = fit_linear([{"bytes": 10.0}, {"bytes": 20.0}], [3.0, 5.0], ["bytes"])
        >>> round(fit.fixed_s, 9), round(fit.per_unit_s["bytes"], 9)
        (1.0, 0.2)
    """
    times = np.asarray(seconds, dtype=np.float64)
    weight = 1 / (times + (0.0 if doubt_s is None else np.asarray(doubt_s)))
    rows = np.asarray([[1.0, *(w.get(u, 0.0) for u in units)] for w in work]) * weight[:, None]
    target = times * weight
    # Columns differ by many orders of magnitude (1 and 1e9 FLOP): scale them for the solver.
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best, best_loss = np.zeros(rows.shape[1]), np.inf
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
    errors = np.abs(rows @ best - target)
    return LinearFit(
        fixed_s=float(best[0]),
        per_unit_s={unit: float(c) for unit, c in zip(units, best[1:], strict=True)},
        error=float(np.median(errors)),
        observations=len(times),
    )
