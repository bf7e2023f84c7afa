"""Plans that use some axes as one: plans of the whole problem, from which its search starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.coarse import Coarse, coarse, merges
from autoshard.planner import plan_module
from autoshard.pricing import Priced, price
from autoshard.problem import Problem, evaluate
from autoshard.reshard import layouts
from autoshard.solvers import SOLVERS, Progress, Solution
from tests.lowering import MESH, Simple, boundaries, graph_of, lowered, module_of, shape_of

CUBE = shape_of(2, 2, 2)
X = np.ones((8, 64), np.float32)
W = np.ones((64, 64), np.float32)


def two_products(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w + x @ w


def merged(**pins: Any) -> tuple[Priced, Coarse]:
    graph = graph_of(two_products, X, W, mesh=CUBE, **pins)
    priced = price(graph, CUBE, Simple())
    return priced, coarse(graph, priced, priced.problem, merges(CUBE))


def test_a_choice_costs_and_holds_the_same_in_both_problems() -> None:
    priced, smaller = merged()
    assert sum(map(len, smaller.problem.costs)) < 0.6 * sum(map(len, priced.problem.costs))
    rng = np.random.default_rng(0)
    for _ in range(20):
        choices = [int(rng.integers(len(cost))) for cost in smaller.problem.costs]
        here = evaluate(smaller.problem, choices)
        there = evaluate(priced.problem, smaller.whole(choices))
        assert (here.cost, here.peak_usage) == (there.cost, there.peak_usage)


def test_merged_axes_stand_together_wherever_they_stand() -> None:
    priced, smaller = merged()
    for node, kept in zip(priced.nodes, smaller.kept, strict=True):
        if node.kind == "hub":
            continue
        for ids in node.layouts:
            for sharding in (layouts(2, CUBE).shardings[i] for i in ids[kept].tolist()):
                assert all(("a" in dim) == ("b" in dim) for dim in sharding)


def test_what_is_pinned_to_a_single_axis_stays_as_pinned() -> None:
    priced, smaller = merged(pins={0: (("a",), ())})
    pinned = next(n for n, node in enumerate(priced.nodes) if node.kind == "argument")
    assert len(priced.problem.costs[pinned]) == len(smaller.kept[pinned]) == 1


class Watched:
    """The exact solver, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Problem, tuple[int, ...] | None]] = []

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        hint: Sequence[int] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        self.asked.append((problem, None if hint is None else tuple(hint)))
        return SOLVERS["exact"].solve(
            problem, time_limit_s=time_limit_s, seed=seed, hint=hint, progress=progress
        )


@pytest.mark.parametrize("mesh", [MESH, CUBE], ids=str)
def test_the_search_on_three_axes_starts_from_the_best_choice_on_two(mesh: Any) -> None:
    given = boundaries(two_products, X, W)
    module = module_of(lowered(two_products, X, W))
    solver = Watched()
    plan = plan_module(module, *given, mesh, cost_model=Simple(), solver=solver)
    last, hint = solver.asked[-1]
    if mesh is MESH:
        assert len(solver.asked) == 1
        assert hint is None
    else:
        assert len(solver.asked) == 2
        assert hint is not None
        assert evaluate(last, hint).feasible
        cost = plan.solver.objective_s * 1e12
        assert cost <= evaluate(last, hint).cost
