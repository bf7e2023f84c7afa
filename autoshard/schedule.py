"""In which order XLA:CPU runs kernels, and which all-reduces it makes one.

Found by comparing schedules that jaxlib 0.10.2 prints with the programs they are of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from autoshard.buffers import Kernel


def fifo_order(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The order in which XLA:CPU runs kernels: first ready, first run."""
    maker = {v: k for k, kernel in enumerate(kernels) for v in kernel.outputs}
    waiting: list[int] = []
    readers: list[list[int]] = [[] for _ in kernels]
    for k, kernel in enumerate(kernels):
        sources = {maker[v] for v in kernel.reads if v in maker}
        waiting.append(len(sources))
        for source in sources:
            readers[source].append(k)
    queue = deque(k for k, count in enumerate(waiting) if not count)
    order = []
    while queue:
        k = queue.popleft()
        order.append(kernels[k])
        for reader in readers[k]:
            waiting[reader] -= 1
            if not waiting[reader]:
                queue.append(reader)
    return tuple(order)


def combined(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """All-reduces over the same axes become one where none depends on another.

    The combined one stands where the last of them stood.
    """
    maker = {v: k for k, kernel in enumerate(kernels) for v in kernel.outputs}
    above: list[int] = []  # per kernel, the set of those it depends on, as bits
    for kernel in kernels:
        mask = 0
        for value in kernel.reads:
            if value in maker:
                mask |= above[maker[value]] | 1 << maker[value]
        above.append(mask)
    left = [k for k, kernel in enumerate(kernels) if kernel.kind == "all_reduce"]
    merged: dict[int, Kernel] = {}
    dropped: set[int] = set()
    while left:
        first, group, mask = left[0], [left[0]], 1 << left[0]
        for k in left[1:]:
            if (
                _axes(kernels[k]) == _axes(kernels[first])
                and not above[k] & mask
                and not any(above[g] >> k & 1 for g in group)
            ):
                group.append(k)
                mask |= 1 << k
        left = [k for k in left if k not in group]
        if len(group) == 1:
            continue
        over = 0
        for k in group:
            over |= above[k]
        for k in range(len(kernels)):
            if mask >> k & 1:
                above[k] = over
            elif above[k] & mask:
                above[k] |= over | mask
        last = kernels[group[-1]]
        merged[group[-1]] = replace(
            last,
            outputs=tuple(v for k in group for v in kernels[k].outputs),
            reads={v: False for k in group for v in kernels[k].reads},
        )
        dropped.update(group[:-1])
    return tuple(merged.get(k, kernel) for k, kernel in enumerate(kernels) if k not in dropped)


def _axes(kernel: Kernel) -> tuple[str, ...]:
    return kernel.op.axes if kernel.op is not None else ()
