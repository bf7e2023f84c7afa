"""How large an array is in a TPU's memory, where the last two dimensions are padded to tiles."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

LANES = 128
"""Elements of a register along the last dimension.

Source: docs.jax.dev, Pallas "Writing TPU kernels with Pallas", on array layouts; the layouts
``T(8,128)`` in programs that libtpu 0.0.42 compiles.
"""

SUBLANES = 8
"""Rows of a register; arrays of 1, 2 or 4 rows have tiles of as many."""


@lru_cache(maxsize=65536)
def stored_elements(shape: tuple[int, ...]) -> int:
    """Elements that an array takes in memory, those that pad it included.

    XLA:TPU picks the two dimensions that are tiled so that the least is padded: one becomes a
    multiple of 128, the other of 8. Arrays of one dimension are padded to 128, 256, 512 or a
    multiple of 1024. Found from the sizes in buffer assignments of libtpu 0.0.42 (v5e, v6e).

    Args:
        shape: Sizes on one device.

    Examples:
        >>> stored_elements((4096, 288)), stored_elements((250, 288)), stored_elements((2, 288))
        (1179648, 73728, 768)
        >>> stored_elements(()), stored_elements((288,))
        (128, 512)
    """
    if math.prod(shape) == 0:
        return 0
    sizes = [size for size in shape if size > 1]
    if len(sizes) < 2:
        rows = _up(math.prod(sizes), LANES) // LANES
        return LANES * (1 << (rows - 1).bit_length() if rows < SUBLANES else _up(rows, SUBLANES))
    return min(
        math.prod(size for d, size in enumerate(sizes) if d not in (rows, lanes))
        * _up(sizes[lanes], LANES)
        * _up(sizes[rows], _row_tile(sizes[rows]))
        for rows, lanes in itertools.permutations(range(len(sizes)), 2)
    )


def _row_tile(rows: int) -> int:
    return min(SUBLANES, 1 << (rows - 1).bit_length())


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
