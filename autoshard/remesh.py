"""Results given back on the caller's mesh, where JAX cannot compile a program that does so itself.

A program is lowered on a mesh with automatic axes. JAX gives results back on a mesh with explicit
axes just as well, unless the program holds an op that needs to know its devices (a callback, a
custom partitioning): then it wants one mesh throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import NamedSharding


class Remeshed:
    """A compiled program whose results get other shardings that mean the same.

    Anything else is asked of the program itself.
    """

    def __init__(self, compiled: jax.stages.Compiled, results: Sequence[NamedSharding]) -> None:
        self._compiled, self._results = compiled, tuple(results)

    def __call__(self, *values: Any) -> list[Any]:
        """Run the program."""
        made = zip(self._compiled(*values), self._results, strict=True)
        return [jax.device_put(value, sharding) for value, sharding in made]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def on_mesh(compiled: jax.stages.Compiled, results: Sequence[NamedSharding]) -> jax.stages.Compiled:
    """The program, with its results on the mesh of ``results``."""
    made = jax.tree.leaves(compiled.output_shardings)
    if all(ours.mesh == theirs.mesh for ours, theirs in zip(made, results, strict=True)):
        return compiled
    return cast(jax.stages.Compiled, Remeshed(compiled, results))
