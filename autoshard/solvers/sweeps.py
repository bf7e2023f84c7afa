"""Kernels of the rising lower bound, compiled on first use: one node after another, in integers.

The names of arrays are those of ``Layout``.
"""

from __future__ import annotations

from autoshard.solvers.forest import compiled
from autoshard.solvers.network import INF

FORBIDDEN_FROM = INF >> 1
"""Sums of a forbidden entry and messages are at least this, all others less."""


@compiled
def least(  # type: ignore[no-untyped-def]
    k, size, width, back, message_at, matrix, core_at, row_at, column_at, rows, columns,
    cores, kinds, messages, theirs, mine, lows,
):  # fmt: skip
    """Per state of a node, the least that one of its links charges; written to ``lows``.

    ``theirs`` and ``mine`` are room for one number per kind of column and of row.
    """
    m = message_at[k]
    o = message_at[back[k]]
    x = matrix[k]
    count = columns[x]
    for c in range(count):
        theirs[c] = INF + INF
    first = column_at[x]
    for t in range(width):
        c = kinds[first + t]
        theirs[c] = min(theirs[c], messages[o + t])
    core = core_at[x]
    for r in range(rows[x]):
        best = INF + INF
        row = core + r * count
        for c in range(count):
            best = min(best, cores[row + c] + theirs[c])
        mine[r] = best
    first = row_at[x]
    for s in range(size):
        low = mine[kinds[first + s]] + messages[m + s]
        lows[m + s] = INF if low >= FORBIDDEN_FROM else low


@compiled
def visit(  # type: ignore[no-untyped-def]
    forward, proved, offset, at, link_at, near, back, message_at, matrix, core_at, row_at,
    column_at, rows, columns, cores, kinds, costs, floors, messages, lows, total, theirs, mine,
):  # fmt: skip
    """Visit every node once: gather what its links charge, share it out, move the rest.

    ``forward``: in order, else against it. ``proved``: floors may be raised. ``offset``: the bound
    so far. ``costs``, ``floors`` and ``messages`` are those of ``Dual``, changed; ``lows`` is
    room for one number per message, the rest for one per state of a node. Returns the new bound,
    and whether some node has no allowed state.
    """
    count = len(at) - 1
    for step in range(count):
        g = step if forward else count - 1 - step
        a = at[g]
        size = at[g + 1] - a
        for s in range(size):
            total[s] = costs[a + s]
        ahead = 0
        for k in range(link_at[g], link_at[g + 1]):
            u = near[k]
            if u > g:
                ahead += 1
            least(
                k, size, at[u + 1] - at[u], back, message_at, matrix, core_at, row_at, column_at,
                rows, columns, cores, kinds, messages, theirs, mine, lows,
            )  # fmt: skip
            m = message_at[k]
            for s in range(size):
                total[s] = min(total[s] + lows[m + s], INF)
        low = INF
        for s in range(size):
            low = min(low, total[s])
        if low >= INF:
            return offset, True
        offset += low
        behind = link_at[g + 1] - link_at[g] - ahead
        parts = max(1, max(ahead, behind))
        gives = ahead if forward else behind
        for s in range(size):
            if total[s] >= INF:
                floors[a + s] = max(floors[a + s], INF) if proved else floors[a + s]
                costs[a + s] = INF
                total[s] = -1
                continue
            total[s] -= low
            if proved:
                floors[a + s] = max(floors[a + s], total[s] + offset)
            share = total[s] // parts
            costs[a + s] = total[s] - share * gives
            total[s] = share
        for k in range(link_at[g], link_at[g + 1]):
            m = message_at[k]
            gets = (near[k] > g) == forward
            for s in range(size):
                if total[s] < 0:
                    messages[m + s] = INF
                else:
                    messages[m + s] += (total[s] if gets else 0) - lows[m + s]
    return offset, False


@compiled
def decode(  # type: ignore[no-untyped-def]
    at, link_at, near, back, message_at, matrix, core_at, row_at, column_at, rows, columns,
    cores, kinds, costs, messages, lows, total, theirs, mine, states,
):  # fmt: skip
    """Choose a state of each node in order, the cheapest given those before; into ``states``."""
    for g in range(len(at) - 1):
        a = at[g]
        size = at[g + 1] - a
        for s in range(size):
            total[s] = costs[a + s]
        for k in range(link_at[g], link_at[g + 1]):
            u = near[k]
            m = message_at[k]
            if u > g:
                least(
                    k, size, at[u + 1] - at[u], back, message_at, matrix, core_at, row_at,
                    column_at, rows, columns, cores, kinds, messages, theirs, mine, lows,
                )  # fmt: skip
                for s in range(size):
                    total[s] = min(total[s] + lows[m + s], INF)
                continue
            x = matrix[k]
            c = kinds[column_at[x] + states[u]]
            known = messages[message_at[back[k]] + states[u]]
            for s in range(size):
                entry = cores[core_at[x] + kinds[row_at[x] + s] * columns[x] + c]
                entry += messages[m + s] + known
                total[s] = min(total[s] + (INF if entry >= FORBIDDEN_FROM else entry), INF)
        best = 0
        for s in range(size):
            if total[s] < total[best]:
                best = s
        states[g] = best


@compiled
def level(at, link_at, near, back, message_at, messages):  # type: ignore[no-untyped-def]
    """Move what all messages at the first end of an edge have in common to its other end."""
    for g in range(len(at) - 1):
        size = at[g + 1] - at[g]
        for k in range(link_at[g], link_at[g + 1]):
            u = near[k]
            if u < g:
                continue
            m = message_at[k]
            o = message_at[back[k]]
            low = INF
            for s in range(size):
                if messages[m + s] < FORBIDDEN_FROM:
                    low = min(low, messages[m + s])
            if low >= FORBIDDEN_FROM:
                continue
            for s in range(size):
                if messages[m + s] < FORBIDDEN_FROM:
                    messages[m + s] -= low
            for t in range(at[u + 1] - at[u]):
                if messages[o + t] < FORBIDDEN_FROM:
                    messages[o + t] += low


@compiled
def charge(at, who, first, end, use_at, uses, change, costs):  # type: ignore[no-untyped-def]
    """Add to each node's costs what a change of prices charges for its memory.

    ``change`` is, per row, the sum of the changes of price in the rows before it. Costs may become
    negative.
    """
    for k in range(len(who)):
        price = change[end[k]] - change[first[k]]
        a = at[who[k]]
        for s in range(at[who[k] + 1] - a):
            if costs[a + s] < INF:
                costs[a + s] += price * uses[use_at[k] + s]
