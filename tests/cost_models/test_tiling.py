"""Sizes of arrays as XLA:TPU lays them out, against sizes read off its buffer assignments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_models.tiling import LANES, stored_elements

SIZES = [  # shape of f32, bytes in a buffer assignment of libtpu 0.0.42 for v6e
    ((28, 4, 72, 288), 12386304),
    ((28, 288, 6, 288), 74317824),
    ((28, 1152), 147456),
    ((288,), 2048),
    ((16, 288), 24576),
    ((288, 16), 24576),
    ((250, 288), 294912),
    ((28, 6, 288), 294912),
    ((2, 288), 3072),
    ((28, 1152, 288), 37158912),
    ((288, 288), 442368),
    ((28, 288), 49152),
    ((), 512),
]


@pytest.mark.parametrize(("shape", "nbytes"), SIZES)
def test_arrays_take_what_the_compiler_gives_them(shape: tuple[int, ...], nbytes: int) -> None:
    assert 4 * stored_elements(shape) == nbytes


@given(st.lists(st.integers(1, 300), max_size=4))
def test_padding_never_shrinks_an_array_and_fills_whole_lanes(sizes: list[int]) -> None:
    found = stored_elements(tuple(sizes))
    assert found >= math.prod(sizes)
    assert found % LANES == 0


def test_an_array_of_nothing_takes_nothing() -> None:
    assert stored_elements((3, 0)) == 0
