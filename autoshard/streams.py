"""When tasks run that need the same things: list scheduling on streams.

A stream does one task at a time: the arithmetic of a device is one, the links along a mesh axis are
another. A task starts as soon as all it waits for is done and all its streams are free; of several
that could, the one that comes first in the program.

Source:
    R. L. Graham 1966, "Bounds for certain multiprocessing anomalies" (list scheduling).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"
"""The stream of arithmetic and memory traffic."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time.

    Attributes:
        seconds: How long [s].
        streams: What it needs all the while; none: nothing that others need.
        after: Positions of the earlier tasks that it waits for.
    """

    seconds: float
    streams: tuple[str, ...]
    after: tuple[int, ...] = ()


def schedule(tasks: Sequence[Task]) -> tuple[float, ...]:
    """When each task starts [s], in the order of the tasks.

    Something runs at all times until all is done, so the whole takes no longer than the sum of the
    tasks; and no less than the longest chain of them, or the busiest stream.

    Args:
        tasks: In program order: a task waits for earlier ones only.

    Examples:
        >>> schedule([Task(2.0, ("x",)), Task(3.0, ("compute",)), Task(1.0, ("compute",), (0,))])
        (0.0, 0.0, 3.0)
    """
    waiting = [len(task.after) for task in tasks]
    readers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            readers[earlier].append(number)
    starts = [0.0] * len(tasks)
    ready: dict[tuple[str, ...], list[int]] = {}  # by what they need, the first in front
    running: list[tuple[float, int]] = []
    busy: set[str] = set()

    def make_ready(number: int) -> None:
        heapq.heappush(ready.setdefault(tasks[number].streams, []), number)

    for number, count in enumerate(waiting):
        if not count:
            make_ready(number)
    now = 0.0
    while True:
        while free := [line[0] for need, line in ready.items() if line and not busy & {*need}]:
            number = min(free)
            task = tasks[number]
            heapq.heappop(ready[task.streams])
            starts[number] = now
            busy.update(task.streams)
            heapq.heappush(running, (now + task.seconds, number))
        if not running:
            return tuple(starts)
        now, number = heapq.heappop(running)
        busy.difference_update(tasks[number].streams)
        for reader in readers[number]:
            waiting[reader] -= 1
            if not waiting[reader]:
                make_ready(reader)


def end_s(tasks: Sequence[Task], starts: Sequence[float]) -> float:
    """When the last task is done [s]."""
    return max((s + task.seconds for s, task in zip(starts, tasks, strict=True)), default=0.0)
