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


@st.composite
def structured(draw: st.DrawFn) -> Problem:
    """Problems with what reductions look for: ties, separable and equal tables, chains, layers."""
    count = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = 4 if count <= 6 else 3 if count <= 8 else 2
    same = draw(st.booleans())
    sizes = [most] * count if same else rng.integers(1, most + 1, count).tolist()
    shape = draw(st.sampled_from(["chain", "ring", "tree", "layers", "any"]))
    pairs = {
        "chain": [(i, i + 1) for i in range(count - 1)],
        "ring": [(i, (i + 1) % count) for i in range(count)],
        "tree": [(int(rng.integers(0, i)), i) for i in range(1, count)],
        "layers": [(i, j) for i in range(count) for j in (i + 1, i + 2) if j < count],
        "any": [tuple(rng.integers(0, count, 2).tolist()) for _ in range(2 * count)],
    }[shape]
    scale = draw(st.sampled_from([1, 10**6, 10**13]))
    kinds = draw(st.lists(st.sampled_from("trecf"), min_size=1, max_size=5, unique=True))
    made: dict[tuple[int, int, str], NDArray[np.int64]] = {}

    def table(rows: int, columns: int) -> NDArray[np.int64]:
        kind = str(rng.choice(kinds))
        if kind == "t":  # tied: equal positions only
            tie = np.arange(rows)[:, None] == np.arange(columns)[None]
            return np.where(tie, int(rng.integers(0, 3)) * scale, FORBIDDEN)
        if kind == "r":  # a sum of two vectors
            parts = rng.integers(-5, 9, rows)[:, None] + rng.integers(-5, 9, columns)[None]
            return parts * scale
        if kind == "e":  # one array for all edges of its shape
            key = (rows, columns, kind)
            return made.setdefault(key, rng.integers(0, 9, (rows, columns)) * scale)
        if kind == "c":
            return np.full((rows, columns), int(rng.integers(-3, 4)) * scale)
        values = rng.integers(-5, 12, (rows, columns)) * scale
        values[rng.random(values.shape) < 0.3] = FORBIDDEN
        return values

    heavy = draw(st.sampled_from([1, 1, 10**10, 2**54]))
    usages = [rng.integers(0, 4, s) * heavy for s in sizes]
    if draw(st.booleans()):  # some that no choice changes
        usages = [np.full_like(u, u[0]) if rng.random() < 0.5 else u for u in usages]
    starts = rng.integers(0, 6, count)
    return Problem(
        costs=tuple(rng.integers(-3, 9, s) * scale for s in sizes),
        usages=tuple(usages),
        intervals=np.stack([starts, starts + rng.integers(0, 5, count)], axis=1),
        edges=np.array(pairs, np.int64).reshape(-1, 2),
        edge_costs=tuple(table(sizes[i], sizes[j]) for i, j in pairs),
        usage_limit=draw(st.one_of(st.none(), st.integers(0, 2 * count).map(lambda n: n * heavy))),
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
