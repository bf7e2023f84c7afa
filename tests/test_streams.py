from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.streams import COMPUTE, Task, end_s, schedule


@st.composite
def programs(draw: st.DrawFn) -> tuple[Task, ...]:
    """Programs of tasks that wait for earlier ones and need up to three streams."""
    count = draw(st.integers(0, 25))
    streams = st.lists(st.sampled_from((COMPUTE, "x", "y")), max_size=3, unique=True)
    tasks = []
    for number in range(count):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        seconds = float(draw(st.integers(0, 20)))
        tasks.append(Task(seconds, tuple(sorted(draw(streams))), tuple(sorted(after))))
    return tuple(tasks)


def critical_path_s(tasks: tuple[Task, ...]) -> float:
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[a] for a in task.after), default=0.0))
    return max(ends, default=0.0)


@settings(max_examples=100)
@given(programs())
def test_a_schedule_is_no_shorter_than_its_bounds_and_no_longer_than_the_sum(
    tasks: tuple[Task, ...],
) -> None:
    took = end_s(tasks, schedule(tasks))
    assert took >= critical_path_s(tasks)
    for stream in (COMPUTE, "x", "y"):
        assert took >= sum(task.seconds for task in tasks if stream in task.streams)
    assert took <= sum(task.seconds for task in tasks)


@settings(max_examples=100)
@given(programs())
def test_no_task_starts_before_what_it_waits_for_is_done(tasks: tuple[Task, ...]) -> None:
    starts = schedule(tasks)
    for task, start in zip(tasks, starts, strict=True):
        assert all(start >= starts[a] + tasks[a].seconds for a in task.after)


@settings(max_examples=100)
@given(programs())
def test_a_stream_does_one_task_at_a_time(tasks: tuple[Task, ...]) -> None:
    starts = schedule(tasks)
    for stream in (COMPUTE, "x", "y"):
        spans = sorted(
            (start, start + task.seconds)
            for task, start in zip(tasks, starts, strict=True)
            if stream in task.streams and task.seconds
        )
        assert all(end <= later for (_, end), (later, _) in itertools.pairwise(spans))


@given(programs())
def test_one_stream_for_all_makes_the_schedule_the_sum(tasks: tuple[Task, ...]) -> None:
    alone = tuple(Task(task.seconds, (COMPUTE,), task.after) for task in tasks)
    assert math.isclose(end_s(alone, schedule(alone)), sum(task.seconds for task in tasks))


def test_a_collective_hides_behind_independent_work_and_not_behind_what_waits_for_it() -> None:
    gather, other = Task(2.0, ("links x",)), Task(3.0, (COMPUTE,))
    reader = Task(1.0, (COMPUTE,), (0,))
    assert end_s((gather, other, reader), schedule((gather, other, reader))) == 4.0
    assert end_s((gather, reader), schedule((gather, reader))) == 3.0


def test_of_two_that_could_run_the_earlier_in_the_program_goes_first() -> None:
    assert schedule((Task(1.0, (COMPUTE,)), Task(5.0, (COMPUTE,)))) == (0.0, 1.0)
