"""Kernels that take over the parts of a proposed choice that fit the memory together.

What a proposal changes falls into parts that share no link, so that their costs add up; only
memory couples them. Parts that use memory are given up until every row fits, cheapest first; then
parts that only cost are given up and parts that gain are taken back, where they fit.
"""

from __future__ import annotations

import numpy as np

from autoshard.solvers.forest import compiled


@compiled
def split(at, costs, link_at, near, own, tables, old, new, changed, place, part, gain):  # type: ignore[no-untyped-def]
    """Sort the changed groups into parts, and sum up what each part costs more.

    Beside the arrays of ``Flat``:

        old: The state of each group.
        new: The proposed state of each group.
        changed: The groups in which they differ.
        place: Per group, -1; left so.
        part: Receives the part of each changed group.
        gain: Receives what each part costs more.

    Returns:
        The number of parts.
    """
    for i in range(len(changed)):
        place[changed[i]] = i
        part[i] = -1
    stack = np.empty(len(changed), np.int64)
    parts = 0
    for i in range(len(changed)):
        if part[i] >= 0:
            continue
        part[i] = parts
        stack[0] = i
        depth = 1
        cost = 0.0
        while depth > 0:
            depth -= 1
            g = changed[stack[depth]]
            cost += costs[at[g] + new[g]] - costs[at[g] + old[g]]
            for k in range(link_at[g], link_at[g + 1]):
                u = near[k]
                width = at[u + 1] - at[u]
                before = tables[own[k] + old[g] * width + old[u]]
                if place[u] < 0:
                    cost += tables[own[k] + new[g] * width + old[u]] - before
                    continue
                if g < u:
                    cost += tables[own[k] + new[g] * width + new[u]] - before
                if part[place[u]] < 0:
                    part[place[u]] = parts
                    stack[depth] = place[u]
                    depth += 1
        gain[parts] = cost
        parts += 1
    for g in changed:
        place[g] = -1
    return parts


@compiled
def shift(hold_at, first, end, use_at, uses, old, new, members, sign, over):  # type: ignore[no-untyped-def]
    """Add what some groups use more to the rows, times a sign; returns the worst row touched."""
    worst = -np.inf
    for g in members:
        for k in range(hold_at[g], hold_at[g + 1]):
            more = sign * (uses[use_at[k] + new[g]] - uses[use_at[k] + old[g]])
            if more != 0.0:
                for r in range(first[k], end[k]):
                    over[r] += more
    for g in members:
        for k in range(hold_at[g], hold_at[g + 1]):
            if uses[use_at[k] + new[g]] != uses[use_at[k] + old[g]]:
                for r in range(first[k], end[k]):
                    worst = max(worst, over[r])
    return worst


@compiled
def settle(  # type: ignore[no-untyped-def]
    hold_at, first, end, use_at, uses, old, new, changed, starts, gain, order, taken, over
):
    """Choose which parts of a proposal to take over.

    Beside the arrays of ``Flat``:

        old: The state of each group.
        new: The proposed state of each group.
        changed: The groups in which they differ, part by part.
        starts: Where each part starts in ``changed``, and the end.
        gain: What each part costs more.
        order: The parts by what they cost more.
        taken: Per part, whether it is taken over; filled in.
        over: Per row, usage above the room with all parts taken over; with those in ``taken`` at
            the end.

    Returns:
        Whether every row fits.
    """
    parts = len(gain)
    need = np.empty(parts)
    taken[:] = True
    while len(over) > 0:
        row = over.argmax()
        if over[row] <= 0.0:
            break
        best = -1
        least = np.inf
        for c in range(parts):
            if not taken[c]:
                continue
            need[c] = 0.0
            for i in range(starts[c], starts[c + 1]):
                g = changed[i]
                for k in range(hold_at[g], hold_at[g + 1]):
                    if first[k] > row:
                        break
                    if row < end[k]:
                        need[c] += uses[use_at[k] + new[g]] - uses[use_at[k] + old[g]]
            if need[c] > 0.0:
                loss = -gain[c] / min(need[c], over[row])
                if loss < least:
                    best = c
                    least = loss
        if best < 0:
            return False
        taken[best] = False
        members = changed[starts[best] : starts[best + 1]]
        shift(hold_at, first, end, use_at, uses, old, new, members, -1.0, over)
    for c in order[::-1]:
        if gain[c] <= 0.0:
            break
        if taken[c]:
            members = changed[starts[c] : starts[c + 1]]
            if shift(hold_at, first, end, use_at, uses, old, new, members, -1.0, over) > 0.0:
                shift(hold_at, first, end, use_at, uses, old, new, members, 1.0, over)
            else:
                taken[c] = False
    for c in order:
        if gain[c] >= 0.0:
            break
        if not taken[c]:
            members = changed[starts[c] : starts[c + 1]]
            if shift(hold_at, first, end, use_at, uses, old, new, members, 1.0, over) > 0.0:
                shift(hold_at, first, end, use_at, uses, old, new, members, -1.0, over)
            else:
                taken[c] = True
    return True
