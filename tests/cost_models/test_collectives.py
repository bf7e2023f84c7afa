from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.collectives import (
    TORUS,
    SwitchLevel,
    TorusAxis,
    all_to_all_s,
    permute_s,
    switched_s,
)
from autoshard.cost_models.protocol import CollectiveKind
from autoshard.errors import InputError

KINDS = sorted(TORUS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 32)
rates = st.floats(1e8, 1e12)
amounts = st.floats(0, 1e12)


@st.composite
def torus_axes(draw: st.DrawFn) -> TorusAxis:
    wrapped = draw(st.booleans())
    return TorusAxis(
        draw(sizes),
        draw(rates),
        wrapped=wrapped,
        hop_s=draw(st.floats(0, 1e-5)),
        one_way=wrapped and draw(st.booleans()),
    )


groups = st.lists(torus_axes(), min_size=1, max_size=3).map(tuple)


@given(kinds, groups, amounts, st.floats(1, 100))
def test_a_faster_link_never_costs_more(
    kind: CollectiveKind, axes: tuple[TorusAxis, ...], nbytes: float, faster: float
) -> None:
    quick = tuple(replace(axis, bytes_per_s=axis.bytes_per_s * faster) for axis in axes)
    assert TORUS[kind](nbytes, quick) <= TORUS[kind](nbytes, axes)


@given(kinds, groups, amounts, amounts)
def test_more_bytes_never_cost_less(
    kind: CollectiveKind, axes: tuple[TorusAxis, ...], one: float, two: float
) -> None:
    few, many = sorted((one, two))
    assert TORUS[kind](few, axes) <= TORUS[kind](many, axes)


@given(kinds, amounts, rates)
def test_axes_of_one_chip_cost_nothing(kind: CollectiveKind, nbytes: float, rate: float) -> None:
    assert TORUS[kind](nbytes, (TorusAxis(1, rate, hop_s=1.0),) * 2) == 0
    assert switched_s(kind, nbytes, (SwitchLevel(1, rate),)) == 0


@given(kinds, torus_axes(), amounts, rates)
def test_an_axis_of_one_chip_changes_nothing(
    kind: CollectiveKind, axis: TorusAxis, nbytes: float, rate: float
) -> None:
    one = TorusAxis(1, rate, hop_s=1.0)
    assert TORUS[kind](nbytes, (axis, one)) == TORUS[kind](nbytes, (axis,))


@given(kinds, groups, amounts)
def test_the_order_of_the_axes_does_not_matter(
    kind: CollectiveKind, axes: tuple[TorusAxis, ...], nbytes: float
) -> None:
    times = [float(TORUS[kind](nbytes, order)) for order in itertools.permutations(axes)]
    assert times == pytest.approx([times[0]] * len(times), rel=1e-12)


@given(kinds, sizes, rates, amounts, st.floats(0, 1e-5))
def test_a_ring_never_costs_more_than_the_line_it_closes(
    kind: CollectiveKind, size: int, rate: float, nbytes: float, hop_s: float
) -> None:
    line = TorusAxis(size, rate, wrapped=False, hop_s=hop_s)
    closed = replace(line, wrapped=True)
    assert TORUS[kind](nbytes, (closed,)) <= TORUS[kind](nbytes, (line,))


@given(st.sampled_from([k for k in KINDS if k != "permute"]), groups, amounts)
def test_times_have_the_shape_of_the_bytes(
    kind: CollectiveKind, axes: tuple[TorusAxis, ...], nbytes: float
) -> None:
    array = np.full((2, 3), nbytes)
    times = TORUS[kind](array, axes)
    assert times.shape == (2, 3)
    assert np.all(times == TORUS[kind](nbytes, axes))


def route(axis: TorusAxis, start: int, end: int) -> list[list[tuple[int, int]]]:
    """The directed links of each shortest way from one chip to another."""
    size = axis.size
    ways = []
    for step in (1, -1):
        if axis.one_way and step < 0:
            continue
        at, links = start, []
        while at != end:
            following = at + step
            if axis.wrapped:
                following %= size
            elif not 0 <= following < size:
                break
            links.append((at, step))
            at = following
        if at == end:
            ways.append(links)
    shortest = min(map(len, ways))
    return [way for way in ways if len(way) == shortest]


def busiest(axis: TorusAxis, messages: list[tuple[int, int, float]]) -> float:
    """Bytes on the busiest link; equally short ways share a message."""
    load: dict[tuple[int, int], float] = {}
    for start, end, nbytes in messages:
        ways = route(axis, start, end)
        for way in ways:
            for link in way:
                load[link] = load.get(link, 0.0) + nbytes / len(ways)
    return max(load.values(), default=0.0)


@given(st.integers(2, 12), st.booleans(), st.booleans())
def test_an_all_to_all_takes_as_long_as_its_busiest_link(
    size: int, wrapped: bool, one_way: bool
) -> None:
    axis = TorusAxis(size, 1.0, wrapped=wrapped, one_way=wrapped and one_way)
    pairs = itertools.permutations(range(size), 2)
    counted = busiest(axis, [(a, b, 1.0 / size) for a, b in pairs])
    assert float(all_to_all_s(1.0, (axis,))) == pytest.approx(counted)


@given(st.integers(2, 12), st.integers(0, 12), st.booleans(), st.booleans())
def test_a_shift_takes_as_long_as_its_busiest_link(
    size: int, shift: int, wrapped: bool, one_way: bool
) -> None:
    axis = TorusAxis(size, 1.0, wrapped=wrapped, one_way=wrapped and one_way)
    if axis.both_ways and shift % size * 2 == size:
        return  # Both ways are equally short; the formula, like JAX's, uses one of them.
    counted = busiest(axis, [(a, (a + shift) % size, 1.0) for a in range(size)])
    assert float(permute_s(1.0, (axis,), shift=shift)) == pytest.approx(counted)


def test_an_all_to_all_out_of_a_node_shares_the_way_out() -> None:
    levels = (SwitchLevel(8, 4.5e11), SwitchLevel(4, 4e11, devices=8))
    out = 8 * 1e9 * (3 / 4) / 4e11
    assert float(switched_s("all_to_all", 1e9, levels)) == pytest.approx(out)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorusAxis(0, 1.0), "a torus axis of 0 chips"),
        (lambda: TorusAxis(4, 0.0), "at 0.0 bytes/s"),
        (lambda: TorusAxis(4, 1.0, wrapped=False, one_way=True), "a line cannot be used in one"),
    ],
)
def test_an_impossible_axis_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=message):
        make()
