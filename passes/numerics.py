"""Whether a pass keeps the values of a program, found out by running it before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from autoshard.errors import PassError
from autoshard.passes.context import PassContext
from autoshard.passes.evaluate import Array, evaluate, random_arguments
from autoshard.passes.manager import Instrument, Step
from autoshard.passes.module_state import mesh_of, to_bytes
from autoshard.passes.pipeline import Pipeline

_ULPS = {"float64": 2**8, "float32": 2**8, "float16": 2**4, "bfloat16": 2**3}
"""Units in the last place, at a result's largest value, by which a pass may change it: sums in
another order, whose errors grow as the root of the number of terms (65,536 of them here), with
16-bit types added up in 32 bits. A step such as ``p - 0.001 * gradient`` hides errors of its
gradient that are a thousand times larger: a program that returns the gradient is the sharper test.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two results of a program are apart.

    Attributes:
        result: Position of the result with the largest share of its tolerance.
        error: Largest difference there, relative to the largest value.
        tolerance: What its type allows.
    """

    result: int
    error: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether it is within the tolerance."""
        return self.error <= self.tolerance


def tolerance(dtype: np.dtype[np.generic]) -> float:
    """Difference, relative to a result's largest value, that is put down to rounding.

    Examples:
        >>> tolerance(np.dtype("int32")), tolerance(np.dtype("float32"))
        (0.0, 3.0517578125e-05)
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = np.dtype("float32" if dtype.itemsize == 8 else "float64")
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return float(jnp.finfo(dtype).eps) * _ULPS.get(dtype.name, 2)


def difference(before: Sequence[Array], after: Sequence[Array]) -> Difference:
    """The worst difference between the results of two programs, each against its tolerance.

    A value that is not a number must be so in both.
    """
    worst = Difference(0, 0.0, 0.0)
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        found = Difference(position, _error(old, new), tolerance(old.dtype))
        if _share(found) > _share(worst):
            worst = found
    return worst


def _share(found: Difference) -> float:
    if not found.error:
        return 0.0
    return found.error / found.tolerance if found.tolerance else float("inf")


def _error(old: Array, new: Array) -> float:
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    if not old.size:
        return 0.0
    wide = "complex128" if jnp.issubdtype(old.dtype, jnp.complexfloating) else "float64"
    a, b = old.astype(wide), new.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not (np.isfinite(a) | same).all() or not (np.isfinite(b) | same).all():
        return float("inf")
    apart = np.abs(np.where(same, 0, a - b)).max()
    return float(apart / max(np.abs(np.where(np.isfinite(a), a, 0)).max(), np.finfo(float).tiny))


def results_of(module: ir.Module, arguments: Sequence[Array]) -> tuple[Array, ...]:
    """What a module gives on the CPU, on as many devices as its shardings name."""
    return evaluate(module, arguments, mesh_of(module))


class Numerics(Instrument):
    """Runs the program before the first pass and after every pass that changed it.

    The results of a program that computes gradients are gradients, so these are checked too. A pass
    that does not promise to keep the values (as one that rounds weights) is measured and not
    failed, and what it gives is what the passes behind it must keep.

    Attributes:
        passes: The difference that each pass made; None for a pass that changed nothing.
    """

    def __init__(self) -> None:
        self.passes: list[Difference | None] = []
        self._arguments: tuple[Array, ...] = ()
        self._expected: tuple[Array, ...] = ()
        self._last = b""

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Run what the pipeline is given, on random values made from the context's seed."""
        self._arguments = random_arguments(module, context.seed)
        self._expected = results_of(module, self._arguments)
        self._last = to_bytes(module)

    def after(self, step: Step, module: ir.Module, context: PassContext) -> None:
        """Run what the pass has made.

        Raises:
            PassError: Its values are others.
        """
        data = to_bytes(module)
        if data == self._last:
            self.passes.append(None)
            return
        self._last = data
        found = results_of(module, self._arguments)
        change = difference(self._expected, found)
        self.passes.append(change)
        if "numerics" not in step.made.pass_info.preserves:
            self._expected = found
        elif not change.is_small:
            names = context.boundaries_of(module).results
            raise PassError(
                f"the pass {step.name} changes the values of the program: "
                f"{names[change.result].name} differs by {change.error:.2g} of its largest value, "
                f"{change.tolerance:.2g} is rounding",
                at=f"pass {step.index + 1} of {step.pipeline}",
                fix="find the rewrite with autoshard opt ... --bisect numerics",
            )
