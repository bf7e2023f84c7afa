"""Compiled kernels: ready before the clock runs, and not compiled again for another problem."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from autoshard.problem import Problem
from autoshard.solvers import Progress, Solution
from autoshard.solvers.core import Record
from autoshard.solvers.exact import EXACT
from autoshard.solvers.solution import Deadline
from autoshard.solvers.watch import watch
from tests.solvers.problems import dense

ALL_SIGNATURES = """
import numba
import numpy as np
from autoshard.solvers import SOLVERS, forest, messages, sweeps, trade
from autoshard.solvers.dual import Dual
from autoshard.solvers.kernels import load_kernels
from autoshard.solvers.network import Network
from tests.solvers.problems import dense

def compiled():
    modules = (forest, messages, sweeps, trade)
    return {
        (m.__name__, name): len(f.signatures)
        for m in modules for name, f in vars(m).items()
        if isinstance(f, numba.core.dispatcher.Dispatcher)
    }

load_kernels()
before = compiled()
unused = {name for (_, name), count in before.items() if not count}
assert unused <= {"least", "shift"}, unused  # called from others alone
problem = dense(np.random.default_rng(0), nodes=14, states=6, limit=250)
SOLVERS["local"].solve(problem, time_limit_s=0.5)
SOLVERS["exact"].solve(problem, time_limit_s=2.0)
dual = Dual.of(Network.of(problem))
for _ in range(20):
    dual.sweep()
dual.decode()
assert compiled() == before, (before, compiled())
"""


def test_no_kernel_is_compiled_after_all_were_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_SIGNATURES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Slow:
    """Takes a while to get ready."""

    def prepare(self, problem: Problem) -> None:
        time.sleep(0.3)

    def solve(self, problem: Problem, *, time_limit_s: float, **rest: object) -> Solution:
        return EXACT.solve(problem, time_limit_s=time_limit_s)


def test_getting_ready_does_not_count_as_solving() -> None:
    problem = dense(np.random.default_rng(0), nodes=3, states=2, limit=None)
    watched = watch(Slow(), problem, name="slow", time_limit_s=5.0)
    assert watched.solution.choices
    assert watched.timeline[-1].seconds < 0.3


def test_loading_kernels_puts_the_deadline_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.solvers.core.load_kernels", lambda: time.sleep(0.2))
    problem = dense(np.random.default_rng(0), nodes=3, states=2, limit=None)
    record = Record(problem, Deadline.after(10.0), None)
    record.load_kernels()
    assert record.deadline.spent_s < 0.1
    assert record.deadline.left_s > 9.9


def test_a_first_choice_is_told_as_soon_as_it_is_found() -> None:
    problem = dense(np.random.default_rng(2), nodes=12, states=4, limit=250)
    told: list[Progress] = []
    record = Record(problem, Deadline.after(60.0), told.append)
    record.look_around(0.5, np.random.default_rng(0))
    assert told
    assert told[-1].cost == record.cost
    assert told[-1].choices == record.choices
    best = EXACT.solve(problem, time_limit_s=60.0)
    assert all(sign.lower_bound <= best.cost for sign in told)
