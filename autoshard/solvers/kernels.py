"""Compiled kernels made ready before a clock runs.

On a machine's first run numba compiles for some ten seconds; later ones load the result from disk
in less than one. Neither is solving, so neither counts against the time that a solver is given.
"""

from __future__ import annotations

import functools

import numpy as np

from autoshard.problem import Problem
from autoshard.solvers.solution import Deadline

_MOST_S = 60.0  # of the search that calls each kernel once; it has three nodes


@functools.cache
def load_kernels() -> None:
    """Compile, or load from disk, every kernel; at once if that was done before."""
    from autoshard.solvers.dual import Dual
    from autoshard.solvers.local_search import LocalSearch
    from autoshard.solvers.network import Network
    from autoshard.solvers.rows import Timeline

    problem = _triangle()
    LocalSearch.of(problem).improve(
        None, Deadline.after(_MOST_S), np.random.default_rng(0), rounds=1
    )
    net = Network.of(problem)
    Timeline.of(problem).give(net, [0])
    dual = Dual.of(net)
    for _ in range(16):  # every so many sweeps messages are levelled
        dual.sweep()
    dual.set_prices(np.ones(len(net.capacity)))
    dual.decode()


def _triangle() -> Problem:
    """Three nodes, each cheaper in the state that uses more, of which the limit allows two."""
    return Problem(
        costs=(np.array([4, 0]), np.array([3, 0]), np.array([2, 0])),
        usages=(np.array([0, 5]),) * 3,
        intervals=np.array([[0, 2]] * 3),
        edges=np.array([[0, 1], [1, 2], [0, 2]]),
        edge_costs=(np.array([[0, 1], [1, 0]]),) * 3,
        usage_limit=10,
    )
