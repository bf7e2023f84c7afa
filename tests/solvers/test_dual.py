"""What the rising bound rests on: matrices held once, and moves that change no cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.solvers import SOLVERS, Status
from autoshard.solvers.dual import Dual
from autoshard.solvers.layout import scaled
from autoshard.solvers.network import Network
from autoshard.solvers.sweeps import level
from tests.solvers.problems import dense


def repeated(layers: int, seed: int) -> Problem:
    """Equal layers in a row, each a ring of five nodes with a chord; matrices are shared."""
    rng = np.random.default_rng(seed)
    size, states = 5, 6
    inside = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3)]
    shared = [rng.integers(0, 50, (states, states)) for _ in range(len(inside) + 2)]
    costs = [rng.integers(0, 30, states) for _ in range(size)]
    edges, matrices = [], []
    for layer in range(layers):
        base = layer * size
        edges += [(base + i, base + j) for i, j in inside]
        matrices += shared[: len(inside)]
        if layer:
            edges += [(base - 1, base), (base - 3, base + 2)]
            matrices += shared[len(inside) :]
    count = layers * size
    return Problem(
        costs=tuple(costs * layers),
        usages=tuple(np.zeros(states, np.int64) for _ in range(count)),
        intervals=np.zeros((count, 2), np.int64),
        edges=np.array(edges, np.int64),
        edge_costs=tuple(matrices),
    )


@pytest.mark.parametrize("seed", range(6))
def test_shared_matrices_change_nothing(seed: int) -> None:
    shared = repeated(4, seed)
    apart = replace(shared, edge_costs=tuple(m.copy() for m in shared.edge_costs))
    ours, theirs = (SOLVERS["exact"].solve(p, time_limit_s=60.0) for p in (shared, apart))
    assert ours.status is theirs.status is Status.OPTIMAL
    assert ours.cost == theirs.cost == ours.lower_bound == theirs.lower_bound
    assert evaluate(apart, ours.choices).cost == ours.cost


def test_more_layers_bring_no_more_matrices() -> None:
    few, many = (Dual.of(Network.of(repeated(layers, 0))) for layers in (4, 12))
    assert len(many.layout.cores) == len(few.layout.cores)
    assert many.layout.nodes == tuple(range(12 * 5))


@pytest.mark.parametrize("seed", range(4))
def test_levelling_messages_moves_no_cost(seed: int) -> None:
    dual = Dual.of(Network.of(repeated(3, seed)))
    for _ in range(5):
        dual.sweep()
    flat, before = dual.layout, dual.messages.copy()
    level(flat.at, flat.link_at, flat.near, flat.back, flat.message_at, dual.messages)
    assert (dual.messages != before).any()
    moved = dual.messages - before
    for k, back in enumerate(flat.back.tolist()):
        mine = moved[flat.message_at[k] : flat.message_at[k + 1]]
        theirs = moved[flat.message_at[back] : flat.message_at[back + 1]]
        assert (mine[:, None] + theirs == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_sweeps_never_lower_the_bound(seed: int) -> None:
    dual = Dual.of(Network.of(dense(np.random.default_rng(seed), nodes=8, states=4)))
    bounds = [dual.bound]
    for _ in range(40):
        dual.sweep()
        bounds.append(dual.bound)
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_does_not_follow_the_offset_of_a_network_that_shrinks(seed: int) -> None:
    problem = dense(np.random.default_rng(seed), nodes=5, states=4)
    net = Network.of(problem)
    dual = Dual.of(net)
    for _ in range(20):
        dual.sweep()
    bound, offset = dual.bound, net.offset
    for node in range(4):  # states go one by one, as where floors are above the best known cost
        worst = int(dual.floor(node).argmax())
        net.restrict(node, np.arange(net.size(node)) != worst)
    net.add_cost(0, np.full(net.size(0), 7, np.int64))
    assert net.offset > offset
    assert dual.bound == bound
    for node, size in enumerate(len(cost) for cost in problem.costs):
        for state in range(size):
            fixed = list(problem.costs)
            fixed[node] = np.where(np.arange(size) == state, fixed[node], FORBIDDEN)
            best = SOLVERS["brute"].solve(replace(problem, costs=tuple(fixed)), time_limit_s=10.0)
            proved = dual.base + scaled(int(dual.floor(node)[state]), -dual.shift)
            assert proved <= best.cost
