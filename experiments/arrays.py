"""A workload's arrays: shape, meaning of each dimension, and how each one is filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

PyTree = Any
"""Any nesting of containers that JAX can flatten."""

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Makes an array of a shape; cast to the array's dtype afterwards."""


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All zero."""
    return np.zeros(shape)


def ones(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All one."""
    return np.ones(shape)


def normal(std: float) -> Fill:
    """Independent normal values of mean 0 and standard deviation ``std``."""
    return lambda rng, shape: std * rng.standard_normal(shape)


def constant(value: float) -> Fill:
    """``value`` everywhere."""
    return lambda rng, shape: np.full(shape, value)


def integers(high: int) -> Fill:
    """Independent whole numbers from 0, ``high`` not included."""
    return lambda rng, shape: rng.integers(high, size=shape)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a workload; a leaf of its argument and result trees.

    Attributes:
        shape: Sizes, major to minor.
        axes: The logical name of each dimension, e.g. ``("layers", "embed", "heads", "head_dim")``.
        dtype: A NumPy dtype name, ``bfloat16`` included.
        fill: How a concrete array is made; results have no use for it.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "float32"
    fill: Fill = zeros

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same array as JAX writes it without values."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def structs(specs: PyTree) -> PyTree:
    """The tree of ``specs`` with each leaf as a ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(lambda spec: spec.struct, specs)


def fill(specs: PyTree, seed: int) -> PyTree:
    """Concrete arrays on the default device.

    Each leaf has a generator of its own, seeded by ``seed`` and the leaf's position, so the same
    seed gives the same values and large arrays don't depend on one another.

    Args:
        specs: A tree of :class:`ArraySpec`.
        seed: Any number from 0.

    Returns:
        The same tree of ``jax.Array``.
    """
    leaves, tree = jax.tree.flatten(specs)
    arrays = [
        jax.numpy.asarray(spec.fill(np.random.default_rng([seed, i]), spec.shape), dtype=spec.dtype)
        for i, spec in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, arrays)
