"""A state's best choice is the one that a solver finds when only that state is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS
from autoshard.solvers.marginals import marginals


def random_problem(rng: np.random.Generator, nodes: int, edges: int) -> Problem:
    sizes = rng.integers(1, 5, nodes)
    costs = [rng.integers(0, 20, size) for size in sizes]
    pairs, matrices = [], []
    for _ in range(edges):
        i, j = (int(n) for n in rng.integers(0, nodes, 2))
        matrix = rng.integers(0, 20, (sizes[i], sizes[j]))
        matrix[rng.random(matrix.shape) < 0.2] = FORBIDDEN
        pairs.append((i, j))
        matrices.append(matrix)
    return Problem(
        costs=tuple(costs),
        usages=tuple(np.zeros(size, np.int64) for size in sizes),
        intervals=np.zeros((nodes, 2), np.int64),
        edges=np.array(pairs, np.int64).reshape(-1, 2),
        edge_costs=tuple(matrices),
    )


@pytest.mark.parametrize("seed", range(40))
def test_each_state_has_its_cheapest_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 9)), int(rng.integers(0, 14)))
    node = int(rng.integers(0, len(problem.costs)))
    found = marginals(problem, node, time_limit_s=60)
    assert found is not None
    for state in range(len(problem.costs[node])):
        costs = list(problem.costs)
        costs[node] = np.where(np.arange(len(costs[node])) == state, costs[node], FORBIDDEN)
        only = Problem(
            tuple(costs),
            problem.usages,
            problem.intervals,
            problem.edges,
            problem.edge_costs,
        )
        best = SOLVERS["exact"].solve(only, time_limit_s=60)
        if not best.choices:
            assert state not in found
            continue
        assert found[state][node] == state
        assert evaluate(problem, found[state]).cost == best.cost


def test_no_time_gives_nothing() -> None:
    problem = random_problem(np.random.default_rng(0), 6, 12)
    assert marginals(problem, 0, time_limit_s=0) is None
