"""Timing is fair: interleaved, reproducible in its order, honest about how sure it is."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.errors import InputError
from autoshard.experiments.timing import Stepper, Timing, interleaved, median_interval, ratio


class Machine:
    """A clock that only a program's work moves, and a log of what ran."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def program(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now_s += seconds

        return run


def test_each_round_runs_every_program_once() -> None:
    machine = Machine()
    programs = {name: machine.program(name, 1.0) for name in "abc"}
    interleaved(programs, repeats=10, warmup=1, budget_s=1e9, clock=machine.clock)
    assert machine.log[:3] == ["a", "b", "c"]
    rounds = [tuple(machine.log[i : i + 3]) for i in range(3, 33, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1


def test_the_order_depends_on_the_seed_alone() -> None:
    logs = []
    for seed in (0, 0, 1):
        machine = Machine()
        programs = {name: machine.program(name, 1.0) for name in "abc"}
        interleaved(programs, repeats=10, seed=seed, budget_s=1e9, clock=machine.clock)
        logs.append(machine.log)
    assert logs[0] == logs[1] != logs[2]


def test_times_are_those_of_the_clock() -> None:
    machine = Machine()
    programs = {"fast": machine.program("fast", 0.5), "slow": machine.program("slow", 2.0)}
    timings = interleaved(programs, repeats=6, warmup=1, clock=machine.clock)
    assert list(timings) == ["fast", "slow"]
    assert timings["slow"].trials_s == (2.0,) * 6
    assert timings["slow"].warmup_s == (2.0,)
    assert timings["slow"].step_s.median == 2.0
    assert timings["slow"].noise == 0.0
    assert ratio(timings["slow"], timings["fast"]).median == 4.0
    assert str(timings["fast"]) == "fast: 500.00 ms [500.00, 500.00], 6 trials, noise 0.0%"


def test_no_round_starts_after_the_budget_but_one_always_runs() -> None:
    machine = Machine()
    programs = {"a": machine.program("a", 1.0), "b": machine.program("b", 1.0)}
    timings = interleaved(programs, repeats=50, budget_s=7.0, warmup=0, clock=machine.clock)
    assert [len(t.trials_s) for t in timings.values()] == [4, 4]
    timings = interleaved(programs, repeats=50, budget_s=0.0, clock=machine.clock)
    assert [len(t.trials_s) for t in timings.values()] == [1, 1]


def test_a_drift_of_the_machine_cancels_in_the_ratio() -> None:
    def drifting(name: str, factor: float) -> Timing:
        trials = tuple(factor * (1.0 + i) for i in range(20))
        return Timing(name, trials, (), median_interval(trials))

    slower = ratio(drifting("slow", 1.25), drifting("fast", 1.0))
    assert (slower.low, slower.median, slower.high) == (1.25, 1.25, 1.25)


@pytest.mark.parametrize("n", range(1, 13))
def test_the_interval_covers_the_median_as_often_as_it_says(n: int) -> None:
    interval = median_interval([float(i) for i in range(n)])
    below = round(interval.low)  # values in front of the interval's lower end
    assert interval.high == n - 1 - below
    covered = sum(
        below + 1 <= sum(signs) <= n - below - 1 for signs in itertools.product((0, 1), repeat=n)
    )
    assert interval.confidence == pytest.approx(covered / 2**n)
    assert interval.median == statistics.median(range(n))
    if n >= 6:
        assert interval.confidence >= 0.95


def test_a_wanted_coverage_is_not_exceeded_without_need() -> None:
    wide, narrow = (median_interval([float(i) for i in range(100)], c) for c in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.median < narrow.high < wide.high


def test_a_stepper_goes_on_from_its_own_donated_results() -> None:
    step = jax.jit(lambda scale, total, x: (total + scale * x, x.sum()), donate_argnums=1)
    stepper = Stepper(step, (jnp.float32(2.0), jnp.zeros(3), jnp.ones(3)), donate_argnums=(1,))
    totals = [float(stepper()[0][0]) for _ in range(3)]
    assert totals == [2.0, 4.0, 6.0]


def test_a_stepper_takes_a_lone_result_as_the_next_state() -> None:
    stepper = Stepper(lambda x: x + 1, (0,), donate_argnums=(0,))
    assert [stepper() for _ in range(3)] == [1, 2, 3]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="0 programs"):
        interleaved({})
    with pytest.raises(InputError, match="0 repeats"):
        interleaved({"a": lambda: None}, repeats=0)
    with pytest.raises(InputError, match="no median"):
        median_interval([])
    one, two = (
        Timing(n, (1.0,) * n_trials, (), median_interval([1.0]))
        for n, n_trials in (("one", 1), ("two", 2))
    )
    with pytest.raises(InputError, match="one has 1 trials, two 2"):
        ratio(one, two)
