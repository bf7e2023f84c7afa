"""Fair timing of several programs: interleaved trials, medians, and how sure they are.

What slows a machine for a while (another process, heat) should hit all programs alike. So each
round runs every program once, in an order drawn anew from a seed, and two programs are compared
round by round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.errors import InputError

CONFIDENCE = 0.95
"""Coverage that intervals aim at."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with a confidence interval.

    Attributes:
        median: The median of the sample.
        low: Lower end of the interval.
        high: Upper end.
        confidence: Probability that the interval covers the true median. Below
            :data:`CONFIDENCE` where the sample is too small for it.
    """

    median: float
    low: float
    high: float
    confidence: float


def median_interval(sample: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of independent values, between two of their order statistics.

    The true median lies between the k-th smallest and the k-th largest of n values unless fewer
    than k of them fall on one side of it, which are binomial tails; no distribution is assumed. The
    narrowest pair with at least ``confidence`` is taken, else the smallest and largest value.
    Source: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.

    Args:
        sample: At least one value.
        confidence: Wanted coverage, between 0 and 1.

    Returns:
        Median and interval, in the sample's unit.

    Raises:
        InputError: The sample is empty.

    Examples:
        >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
        Interval(median=3.5, low=1.0, high=6.0, confidence=0.96875)
    """
    if not sample:
        raise InputError("an empty sample has no median", fix="time at least one round")
    ordered = sorted(sample)
    n = len(ordered)
    rank, covered, tail = 1, 1.0 - 2.0**-n * 2, 2.0**-n
    for k in range(2, n // 2 + 1):
        tail += math.comb(n, k - 1) * 2.0**-n
        if 1.0 - 2.0 * tail < confidence:
            break
        rank, covered = k, 1.0 - 2.0 * tail
    return Interval(float(np.median(ordered)), ordered[rank - 1], ordered[n - rank], covered)


@dataclass(frozen=True, slots=True)
class Timing:
    """The trials of one program in a comparison.

    Attributes:
        name: The program.
        trials_s: Time of each trial, in order of rounds [s].
        warmup_s: Time of each run before the trials, the first of which may compile [s].
        step_s: Median of the trials with its interval [s].
    """

    name: str
    trials_s: tuple[float, ...]
    warmup_s: tuple[float, ...]
    step_s: Interval

    @property
    def noise(self) -> float:
        """Spread of the trials as a share of their median.

        It is the median absolute deviation, scaled to be the standard deviation for normal values
        (factor 1.4826).
        """
        deviation = np.median(np.abs(np.asarray(self.trials_s) - self.step_s.median))
        return float(1.4826 * deviation / self.step_s.median)

    def __str__(self) -> str:
        step = self.step_s
        return (
            f"{self.name}: {step.median * 1e3:.2f} ms [{step.low * 1e3:.2f}, {step.high * 1e3:.2f}]"
            f", {len(self.trials_s)} trials, noise {self.noise:.1%}"
        )


class Stepper:
    """A program that is called again and again on its own donated results.

    The first donated argument is replaced by the first result of the call, the second by the
    second, and so on; other arguments stay. The arguments given here are consumed.

    Args:
        fn: Compiled or jitted function.
        args: Arguments of the first call.
        donate_argnums: Arguments that ``fn`` consumes. If there is only one and ``fn`` returns no
            tuple, the whole result replaces it.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], donate_argnums: Sequence[int] = ()
    ) -> None:
        self._fn = fn
        self._args = list(args)
        self._donate_argnums = tuple(donate_argnums)

    def __call__(self) -> Any:
        """Run one step; its result, whose donated part is consumed by the next call."""
        result = self._fn(*self._args)
        parts = result if isinstance(result, tuple) else (result,)
        for number, part in zip(self._donate_argnums, parts, strict=False):
            self._args[number] = part
        return result


def interleaved(
    fns: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 20,
    budget_s: float = 60.0,
    warmup: int = 2,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, Timing]:
    """Time several programs against each other.

    A trial runs from the call until every array of the result is there.

    Args:
        fns: Programs by name; those that donate their state are to be :class:`Stepper` objects.
        repeats: Rounds to run; each runs every program once.
        budget_s: No round starts after this time, warm-up included, but one round always runs [s].
        warmup: Runs of each program before the first round.
        seed: Of the order within each round.
        clock: Gives the time [s].

    Returns:
        A timing for each program, in the order of ``fns``, with equally many trials.

    Raises:
        InputError: There is nothing to run, or no round is asked for.
    """
    if not fns or repeats < 1 or warmup < 0:
        raise InputError(
            f"{len(fns)} programs, {repeats} repeats and {warmup} warm-ups make no comparison",
            fix="give at least one program, repeats >= 1 and warmup >= 0",
        )
    begin = clock()
    warmups = {name: tuple(_trial(fn, clock) for _ in range(warmup)) for name, fn in fns.items()}
    trials: dict[str, list[float]] = {name: [] for name in fns}
    rng = np.random.default_rng(seed)
    names = list(fns)
    for done in range(repeats):
        if done and clock() - begin > budget_s:
            break
        for index in rng.permutation(len(names)):
            trials[names[index]].append(_trial(fns[names[index]], clock))
    return {
        name: Timing(name, tuple(times), warmups[name], median_interval(times))
        for name, times in trials.items()
    }


def ratio(numerator: Timing, denominator: Timing) -> Interval:
    """How many times longer one program takes than another of the same comparison.

    Each round gives one ratio, so what slowed a whole round cancels out.

    Args:
        numerator: A program.
        denominator: The one to compare it with.

    Returns:
        Median and interval of the rounds' ratios [1].

    Raises:
        InputError: The two do not have the same rounds.
    """
    if len(numerator.trials_s) != len(denominator.trials_s):
        raise InputError(
            f"{numerator.name} has {len(numerator.trials_s)} trials, {denominator.name} "
            f"{len(denominator.trials_s)}",
            fix="compare timings of one call of interleaved()",
        )
    pairs = zip(numerator.trials_s, denominator.trials_s, strict=True)
    return median_interval([a / b for a, b in pairs])


def _trial(fn: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    jax.block_until_ready(fn())
    return clock() - start
