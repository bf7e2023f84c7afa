"""Random small problems with everything awkward in them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autoshard.problem import FORBIDDEN, Problem


@st.composite
def problems(
    draw: st.DrawFn, *, most_nodes: int = 6, most_states: int = 4, limited: bool | None = None
) -> Problem:
    """Problems with forbidden and negative entries, parallel edges, loops, lone and dead nodes."""
    sizes = draw(st.lists(st.integers(1, most_states), min_size=1, max_size=most_nodes))
    count = len(sizes)
    node = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=2 * count + 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6]))
    scale = draw(st.sampled_from([1, 1, 10**12, 10**15]))

    def entries(*shape: int) -> NDArray[np.int64]:
        values = rng.integers(-5, 12, shape) * scale
        values[rng.random(shape) < forbidden] = FORBIDDEN
        return values

    intervals = np.sort(rng.integers(0, 8, (count, 2)), axis=1)
    with_limit = draw(st.booleans()) if limited is None else limited
    return Problem(
        costs=tuple(entries(s) for s in sizes),
        usages=tuple(rng.integers(0, 10, s) for s in sizes),
        intervals=intervals,
        edges=np.array(pairs, np.int64).reshape(-1, 2),
        edge_costs=tuple(entries(sizes[i], sizes[j]) for i, j in pairs),
        usage_limit=draw(st.integers(0, 35)) if with_limit else None,
    )


def dense(
    rng: np.random.Generator, *, nodes: int, states: int, limit: int | None = None
) -> Problem:
    """A complete graph, on which no reduction gets far."""
    pairs = [(i, j) for i in range(nodes) for j in range(i + 1, nodes)]
    return Problem(
        costs=tuple(rng.integers(0, 100, states) for _ in range(nodes)),
        usages=tuple(rng.integers(0, 50, states) for _ in range(nodes)),
        intervals=np.sort(rng.integers(0, 2 * nodes, (nodes, 2)), axis=1),
        edges=np.array(pairs, np.int64),
        edge_costs=tuple(rng.integers(0, 100, (states, states)) for _ in pairs),
        usage_limit=limit,
    )
