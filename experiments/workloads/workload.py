"""The record that every workload is: a plain JAX function, its arguments, its experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from autoshard.errors import InputError, UnknownNameError
from autoshard.experiments.arrays import PyTree, fill, structs
from autoshard.experiments.experts import Expert

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 3e-2, "int32": 0.0}
"""Per dtype of a result: how far a sharded run may be from the unsharded one.

The figure bounds ``max|a - b| / max|b|`` of each array. Sums are taken in another order on a mesh,
so float32 differs by some units in the last of its 24 bits after each of several hundred additions,
bfloat16 in the last of its 8 bits."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A program to shard, with everything that an experiment needs to run it.

    Attributes:
        name: Its row in the table of workloads.
        size: The name of the size it was made in, e.g. ``tiny``.
        config: Its frozen configuration.
        fn: A plain function of pytrees, without any sharding.
        arguments: Its arguments as a tuple of trees of :class:`~autoshard.experiments.arrays.\
ArraySpec`.
        results: Its result, likewise.
        donate_argnums: Arguments that ``fn`` consumes: the first of them is replaced by the first
            result, and so on.
        experts: Hand-made plans by name.
        description: What it is, in one sentence.
        source: Where the figures of its size come from.
        tolerance: Per dtype, how far sharded values may be from unsharded ones; see
            :data:`TOLERANCE`.
        make_arguments: From a seed to concrete arguments; ``None`` fills each array by its spec.
    """

    name: str
    size: str
    config: Any
    fn: Callable[..., Any]
    arguments: tuple[PyTree, ...]
    results: PyTree
    donate_argnums: tuple[int, ...]
    experts: Mapping[str, Expert]
    description: str
    source: str
    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)
    make_arguments: Callable[[int], tuple[PyTree, ...]] | None = None

    @property
    def args(self) -> tuple[PyTree, ...]:
        """The arguments as trees of ``jax.ShapeDtypeStruct``."""
        abstract: tuple[PyTree, ...] = structs(self.arguments)
        return abstract

    @property
    def logical_axes(self) -> tuple[PyTree, ...]:
        """The arguments as trees whose leaves are the logical names of their dimensions."""
        axes: tuple[PyTree, ...] = jax.tree.map(lambda spec: spec.axes, self.arguments)
        return axes

    def init(self, seed: int = 0) -> tuple[PyTree, ...]:
        """Concrete arguments on the default device; the same for the same seed."""
        if self.make_arguments is not None:
            return self.make_arguments(seed)
        concrete: tuple[PyTree, ...] = fill(self.arguments, seed)
        return concrete


def configured(workload: str, sizes: Mapping[str, C], size: str, overrides: Mapping[str, Any]) -> C:
    """The configuration called ``size`` with some of its fields changed.

    Args:
        workload: Its name, for messages.
        sizes: Known configurations.
        size: One of them.
        overrides: Field name to new value.

    Raises:
        UnknownNameError: There is no such size or field.
    """
    if size not in sizes:
        raise UnknownNameError(
            f"workload {workload!r} has no size {size!r}", fix=f"known: {', '.join(sizes)}"
        )
    known = [f.name for f in fields(sizes[size])]
    for name in overrides:
        if name not in known:
            raise UnknownNameError(
                f"workload {workload!r} has no option {name!r}", fix=f"known: {', '.join(known)}"
            )
    return replace(sizes[size], **overrides)


def missing(workload: str, extra: str, error: ImportError) -> InputError:
    """What to say when a workload's library is not installed.

    Args:
        workload: Its name.
        extra: The optional extra of this distribution that brings the library.
        error: What the import raised.
    """
    return InputError(
        f"workload {workload!r} needs a package that is not installed: {error.name}",
        fix=f"pip install 'autoshard[{extra}]'",
    )
