"""Kernels of the search over forests, compiled on first use; they release the interpreter's lock.

With the rest fixed, the best choice on an induced forest follows from one pass of dynamic
programming from the leaves to the roots and back. The names of arrays are those of ``Flat``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_NONE, _TAKEN, _SEEN = -1, -2, -3  # marks of a group: not in the forest, in it, in line


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel on first use, and keep the result on disk where a folder can be written."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # numba: "no locator available", neither here nor in the user's cache
        return numba.njit(nogil=True, error_model="numpy")(function)


@compiled
def charge(at, costs, hold_at, first, end, use_at, uses, groups, priced, heat, noise, out):  # type: ignore[no-untyped-def]
    """Per state of some groups, its cost, its memory at prices, and noise.

    ``priced[r]`` is the sum of the prices of all rows before r.
    """
    for g in groups:
        a = at[g]
        size = at[g + 1] - a
        mine = out[a : a + size]
        for s in range(size):
            mine[s] = costs[a + s] + heat * noise[a + s]
        for k in range(hold_at[g], hold_at[g + 1]):
            price = priced[end[k]] - priced[first[k]]
            if price > 0.0:
                use = uses[use_at[k] : use_at[k] + size]
                for s in range(size):
                    mine[s] += price * use[s]


@compiled
def grow(link_at, near, order, mark, root, line, up):  # type: ignore[no-untyped-def]
    """Choose an induced forest greedily and line it up, parents first.

    Args:
        link_at: See ``Flat``.
        near: See ``Flat``.
        order: Groups to be taken in this order, where they close no cycle.
        mark: Per group, -1; left so.
        root: Room for one number per group.
        line: Receives the groups of the forest.
        up: Receives the parent of each; -1 for roots.

    Returns:
        How many groups the forest has.
    """
    for g in order:
        fits = True
        for k in range(link_at[g], link_at[g + 1]):
            r = near[k]
            if mark[r] == _NONE:
                continue
            while root[r] != r:
                root[r] = root[root[r]]
                r = root[r]
            if mark[r] == g:  # a second link to the same tree
                fits = False
                break
            mark[r] = g
        if fits:
            mark[g] = _TAKEN
            root[g] = g
            for k in range(link_at[g], link_at[g + 1]):
                r = near[k]
                if mark[r] != _NONE:
                    while root[r] != r:
                        r = root[r]
                    root[r] = g
    count = 0
    for start in order:
        if mark[start] == _NONE or mark[start] == _SEEN:
            continue
        head = count
        line[count] = start
        count += 1
        up[start] = -1
        mark[start] = _SEEN
        while head < count:
            g = line[head]
            head += 1
            for k in range(link_at[g], link_at[g + 1]):
                u = near[k]
                if mark[u] != _NONE and mark[u] != _SEEN:
                    mark[u] = _SEEN
                    line[count] = u
                    count += 1
                    up[u] = g
    for k in range(count):
        mark[line[k]] = _NONE
    return count


@compiled
def minimise(at, link_at, near, own, far, tables, charged, line, up, mark, states, total, low):  # type: ignore[no-untyped-def]
    """Set the groups of a forest to the states that are cheapest together, all others as they are.

    Beside the arrays of ``Flat``:

        charged: From ``charge``.
        line: The groups of the forest, parents first.
        up: The parent of each group of the forest; -1 for roots.
        mark: Per group, -1; left so.
        states: The state of each group; changed.
        total: Room for one number per state.
        low: Room for one number per state of one group.
    """
    for g in line:
        mark[g] = 0
    for i in range(len(line) - 1, -1, -1):
        g = line[i]
        a = at[g]
        size = at[g + 1] - a
        mine = total[a : a + size]
        if mark[g] == 0:
            for s in range(size):
                mine[s] = 0.0
        for s in range(size):
            mine[s] += charged[a + s]
        parent = up[g]
        link = -1
        for k in range(link_at[g], link_at[g + 1]):
            u = near[k]
            if u == parent:
                link = k
            elif mark[u] == _NONE:
                row = tables[far[k] + states[u] * size : far[k] + (states[u] + 1) * size]
                for s in range(size):
                    mine[s] += row[s]
        if parent < 0:
            continue
        b = at[parent]
        width = at[parent + 1] - b
        for q in range(width):
            low[q] = np.inf
        for s in range(size):
            row = tables[own[link] + s * width : own[link] + (s + 1) * width]
            above = mine[s]
            for q in range(width):
                low[q] = min(low[q], above + row[q])
        theirs = total[b : b + width]
        if mark[parent] == 0:
            mark[parent] = 1
            for q in range(width):
                theirs[q] = low[q]
        else:
            for q in range(width):
                theirs[q] += low[q]
        mark[g] = 2 + link
    for g in line:
        a = at[g]
        size = at[g + 1] - a
        mine = total[a : a + size]
        parent = up[g]
        if parent >= 0:
            k = mark[g] - 2
            row = tables[far[k] + states[parent] * size : far[k] + (states[parent] + 1) * size]
            for s in range(size):
                mine[s] += row[s]
        best = states[g]
        for s in range(size):
            if mine[s] < mine[best]:
                best = s
        states[g] = best
    for g in line:
        mark[g] = _NONE
