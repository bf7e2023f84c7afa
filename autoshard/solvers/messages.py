"""Kernel of message passing on a flat problem.

Sequential and tree-reweighted, after Kolmogorov, "Convergent tree-reweighted message passing for
energy minimization" (2006).
"""

from __future__ import annotations

from autoshard.solvers.forest import compiled

_FORBIDDEN = 1e18
_MOST = 5e17  # sums from here on have a forbidden term


@compiled
def pass_messages(  # type: ignore[no-untyped-def]
    at, link_at, near, own, far, tables, charged, back, message_at, messages, total, low, states
):
    """Send messages along the order of groups and back, and choose a state of each group.

    Beside the arrays of ``Flat``:

        charged: What each state costs.
        back: Per link, the same link seen from the neighbour.
        message_at: Per link, where the message that arrives over it starts in ``messages``.
        messages: One number per link and state of its group; changed.
        total: Room for one number per state of one group.
        low: The same.
        states: Receives the choice.
    """
    groups = len(at) - 1
    for step in range(2 * groups):
        forward = step < groups
        g = step if forward else 2 * groups - 1 - step
        a = at[g]
        size = at[g + 1] - a
        for s in range(size):
            total[s] = charged[a + s]
            low[s] = charged[a + s]
        ahead = 0
        for k in range(link_at[g], link_at[g + 1]):
            m = message_at[k]
            u = near[k]
            if u > g:
                ahead += 1
            for s in range(size):
                total[s] += messages[m + s]
            if forward:
                if u > g:
                    for s in range(size):
                        low[s] += messages[m + s]
                else:
                    row = far[k] + states[u] * size
                    for s in range(size):
                        low[s] += tables[row + s]
        if forward:
            best = 0
            for s in range(size):
                if low[s] < low[best]:
                    best = s
            states[g] = best
        links = link_at[g + 1] - link_at[g]
        share = 1.0 / max(1, max(ahead, links - ahead))
        for k in range(link_at[g], link_at[g + 1]):
            u = near[k]
            if (u > g) != forward:
                continue
            m = message_at[k]
            out = message_at[back[k]]
            width = at[u + 1] - at[u]
            for q in range(width):
                messages[out + q] = _FORBIDDEN
            for s in range(size):
                if total[s] >= _MOST:
                    continue
                above = share * total[s] - messages[m + s]
                row = own[k] + s * width
                for q in range(width):
                    messages[out + q] = min(messages[out + q], above + tables[row + q])
            least = messages[out]
            for q in range(width):
                least = min(least, messages[out + q])
            if least < _MOST:
                for q in range(width):
                    if messages[out + q] < _MOST:
                        messages[out + q] -= least
                    else:
                        messages[out + q] = _FORBIDDEN
