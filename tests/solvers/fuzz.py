"""Random small problems against an oracle of its own: ``python -m tests.solvers.fuzz``.

Ten thousand take some minutes; the suite runs a few hundred of the same. A failure is shrunk by
hypothesis, and the smallest problem it finds is written as JSON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from autoshard.problem import FORBIDDEN, Problem, save_problem
from autoshard.solvers import SOLVERS, Solver, Status
from autoshard.solvers.check import check
from autoshard.solvers.watch import watch
from tests.solvers.problems import problems, structured


def best_cost(problem: Problem) -> int | None:
    """The least cost of a feasible choice, from a table of all choices; None if there is none.

    Counted without any part of the product: columns of a table, one row per choice.
    """
    sizes = [len(cost) for cost in problem.costs]
    table = np.array(list(itertools.product(*map(range, sizes))), np.int64)
    total, bad = np.zeros(len(table), np.int64), np.zeros(len(table), bool)

    def pay(entries: np.ndarray) -> None:
        nonlocal total, bad
        bad |= entries >= FORBIDDEN
        total = total + np.where(entries >= FORBIDDEN, 0, entries)

    for node, cost in enumerate(problem.costs):
        pay(cost[table[:, node]])
    for (i, j), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
        pay(matrix[table[:, i], table[:, j]])
    if problem.usage_limit is not None:
        for time in range(int(problem.intervals.min()), int(problem.intervals.max()) + 1):
            used = np.zeros(len(table), np.int64)
            for node, (start, end) in enumerate(problem.intervals.tolist()):
                if start <= time < end:
                    used = used + problem.usages[node][table[:, node]]
            bad |= used > problem.usage_limit
    return None if bad.all() else int(total[~bad].min())


def holds(problem: Problem, solver: Solver, name: str, *, complete: bool, seed: int = 0) -> None:
    """What is true of every answer of a solver; ``complete``: it solves what is small."""
    want = best_cost(problem)
    got = watch(solver, problem, name=name, time_limit_s=30.0 if complete else 0.5, seed=seed)
    answer = got.solution
    if complete:
        assert answer.status is (Status.INFEASIBLE if want is None else Status.OPTIMAL)
    if want is None:
        assert answer.choices == ()
        assert answer.status in (Status.INFEASIBLE, Status.UNKNOWN)
        assert all(moment.cost is None for moment in got.timeline)
        return
    assert answer.status is not Status.INFEASIBLE
    assert answer.lower_bound <= want <= answer.cost
    for moment in got.timeline:
        assert moment.cost is None or moment.cost >= want
        assert moment.lower_bound is None or moment.lower_bound <= want
    if answer.status is Status.OPTIMAL:
        assert answer.cost == want == answer.lower_bound
    if answer.choices:
        counted = check(problem, answer.choices)
        assert counted.feasible
        assert (counted.cost, counted.peak_usage) == (answer.cost, answer.peak_usage)


def search(name: str, examples: int, start: int, found: Callable[[Problem], None]) -> None:
    """Try a solver on random problems; ``found`` is given each one that fails."""
    complete = name != "local"

    @seed(start)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(problem=st.one_of(problems(), structured()))
    def law(problem: Problem) -> None:
        try:
            holds(problem, SOLVERS[name], name, complete=complete)
        except BaseException:
            found(problem)
            raise

    law()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solver", default="exact", help="default: exact")
    parser.add_argument("--examples", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--failure", type=Path, default=Path("failure.json"), help="default: failure.json"
    )
    options = parser.parse_args()
    search(
        options.solver,
        options.examples,
        options.seed,
        lambda problem: save_problem(problem, options.failure),
    )
    print(f"{options.examples} problems, no failure of {options.solver}")


if __name__ == "__main__":
    main()
