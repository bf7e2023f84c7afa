"""The sharding problem as numbers: pairwise costs over strategies, memory over live intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORBIDDEN = 10**18
"""Cost that marks a choice or a pair of choices as not allowed (contest convention)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one strategy per node; pay node and edge costs; stay under the usage limit.

    Attributes:
        costs: Per node, the cost of each strategy, int64 ``[S_i]``.
        usages: Per node, the memory each strategy uses while the node lives [bytes], int64 ``[S_i]``.
        intervals: Live interval ``[start, end)`` of each node, int64 ``[N, 2]``.
        edges: Node pairs, int64 ``[E, 2]``; parallel edges add up.
        edge_costs: Per edge (i, j), int64 ``[S_i, S_j]``.
        usage_limit: At every time point the usages of live nodes add up to at most this [bytes].
    """

    costs: tuple[NDArray[np.int64], ...]
    usages: tuple[NDArray[np.int64], ...]
    intervals: NDArray[np.int64]
    edges: NDArray[np.int64]
    edge_costs: tuple[NDArray[np.int64], ...]
    usage_limit: int | None = None
