"""A planned function inside a JAX transformation: the function between constraints.

There the caller's program is compiled as a whole, by the caller. What a plan can say to it is where
the function's arguments and results live: each is wrapped in a sharding constraint.

The constraint is a primitive of its own, because that of JAX refuses a ``vmap`` over a mesh axis
(``spmd_axis_name``) that it names. Its lowering, and the program it carries as a parameter, are
``jax.lax.with_sharding_constraint``; JAX reads from the latter on which devices the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.shardings import Sharding, to_partition_spec
from autoshard.signature import Leaf, array_type

Flat = Callable[..., tuple[Any, ...]]


def meshes_of(values: Sequence[Any], mesh: Mesh) -> list[AbstractMesh]:
    """The meshes that values of the program around are typed with, and the one that is set.

    Where arrays are computed right away there is no such program, and those on a mesh of other axes
    than ``mesh`` will be moved.
    """
    typed = [other for other in map(_mesh_of, values) if other is not None]
    if is_computing():
        typed = [other for other in typed if dict(other.shape) == dict(mesh.shape)]
    found = dict.fromkeys((jax.sharding.get_abstract_mesh(), *typed))
    return [other for other in found if not other.empty]


def is_computing() -> bool:
    """Whether arrays are computed right away, and not a program traced that its caller compiles.

    That holds under ``jax.grad`` and ``jax.vmap`` too, as long as there is no ``jax.jit`` around.
    """
    try:
        _probe.bind(np.float32(0))
    except _TracingError:
        return False
    return True


def can_constrain(mesh: Mesh, around: Sequence[AbstractMesh]) -> bool:
    """Whether shardings on ``mesh`` mean something in a program that uses the meshes ``around``.

    They do not in the body of a ``shard_map``, which sees one device's pieces, nor where the
    program is laid out on another mesh.
    """
    return all(
        dict(other.shape) == dict(mesh.shape) and AxisType.Manual not in other.axis_types
        for other in around
    )


def constrained(
    flat: Flat,
    values: Sequence[Any],
    arguments: tuple[Sequence[Leaf], Sequence[Sharding]],
    results: tuple[Sequence[Leaf], Sequence[Sharding]],
    mesh: Mesh,
    around: Sequence[AbstractMesh],
) -> tuple[Any, ...]:
    """The results of ``flat``, with arguments and results constrained to shardings.

    Args:
        flat: The function, arrays in and arrays out.
        values: Its arguments.
        arguments: The arrays among the arguments, and the sharding of each.
        results: The same of the results.
        mesh: The mesh of the shardings, all axes of type ``Auto``.
        around: Meshes of the program around; :func:`can_constrain` has accepted them.
    """

    def inside(*inputs: Any) -> tuple[Any, ...]:
        outputs = flat(*_constrain(inputs, *arguments, mesh))
        return tuple(_constrain(outputs, *results, mesh))

    typed = next((other for other in around if AxisType.Explicit in other.axis_types), None)
    if typed is None:
        return inside(*values)
    explicit = {
        name
        for name, kind in zip(typed.axis_names, typed.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    given, back = (
        [
            NamedSharding(typed, _only(_spec(leaf, sharding), explicit))
            for leaf, sharding in zip(*side, strict=True)
        ]
        for side in (arguments, results)
    )
    typed_values = [
        value if _mesh_of(value) == typed else jax.sharding.reshard(value, sharding)
        for value, sharding in zip(values, given, strict=True)
    ]
    outputs = jax.sharding.auto_axes(inside, out_sharding=tuple(back))(*typed_values)
    return cast(tuple[Any, ...], outputs)


def _mesh_of(value: Any) -> AbstractMesh | None:
    sharding = getattr(array_type(value), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return cast(AbstractMesh, sharding.mesh.abstract_mesh)


def _constrain(
    values: Sequence[Any], leaves: Sequence[Leaf], shardings: Sequence[Sharding], mesh: Mesh
) -> list[Any]:
    """Each value in its sharding; a Python number stays what it is."""
    return [
        _bind(value, NamedSharding(mesh, _spec(leaf, sharding)))
        if leaf.shape or isinstance(value, jax.Array)
        else value
        for value, leaf, sharding in zip(values, leaves, shardings, strict=True)
    ]


def _spec(leaf: Leaf, sharding: Sharding) -> PartitionSpec:
    return to_partition_spec(sharding[: len(leaf.shape)])


def _only(spec: PartitionSpec, names: set[str]) -> PartitionSpec:
    """The spec without the axes that are not among ``names``."""
    entries = ((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    kept = (tuple(axis for axis in entry if axis in names) for entry in entries)
    return PartitionSpec(*(entry or None for entry in kept))


_planned = Primitive("planned_sharding")


def _bind(value: Any, sharding: NamedSharding) -> Any:
    aval = array_type(value)
    jaxpr = _jaxpr(tuple(aval.shape), aval.dtype, bool(aval.weak_type), sharding)
    return _planned.bind(value, sharding=sharding, jaxpr=jaxpr)


@functools.lru_cache(maxsize=4096)
def _jaxpr(
    shape: tuple[int, ...], dtype: Any, weak_type: bool, sharding: NamedSharding
) -> ClosedJaxpr:
    struct = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return jax.make_jaxpr(functools.partial(_apply, sharding=sharding))(struct)


def _apply(value: Any, *, sharding: NamedSharding, jaxpr: Any = None) -> Any:
    del jaxpr
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.lax.with_sharding_constraint(value, sharding)


def _place(value: Any, *, sharding: NamedSharding, jaxpr: Any) -> Any:
    """An array constrained, and moved first if it is somewhere else than the mesh."""
    here = value.sharding if isinstance(value, jax.Array) else None
    devices = list(sharding.mesh.devices.flat)
    if isinstance(here, NamedSharding) and list(here.mesh.devices.flat) == devices:
        return _apply(value, sharding=sharding)
    entries = (None if e is PartitionSpec.UNCONSTRAINED else e for e in sharding.spec)
    return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec(*entries)))


def _batched(
    axis: Any, values: Sequence[Any], dims: Sequence[int | None], *, sharding: Any, jaxpr: Any
) -> tuple[Any, int | None]:
    """The mapped dimension is left free, or takes the axes that ``vmap`` says it is spread over."""
    (value,), (dim,) = values, dims
    if dim is None:
        return _planned.bind(value, sharding=sharding, jaxpr=jaxpr), None
    spread = tuple(axis.spmd_name or ())
    entries = [*sharding.spec, *[None] * (array_type(value).ndim - 1 - len(sharding.spec))]
    for position, entry in enumerate(entries):
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
            axes = (entry,) if isinstance(entry, str) else entry
            entries[position] = tuple(a for a in axes if a not in spread) or None
    entries.insert(dim, spread or PartitionSpec.UNCONSTRAINED)
    return _bind(value, NamedSharding(sharding.mesh, PartitionSpec(*entries))), dim


class _TracingError(Exception):
    """Says to :func:`is_computing` that a program is being traced."""


def _refuse(_: Any) -> Any:
    raise _TracingError


_probe = Primitive("is_computing")
_probe.def_impl(lambda value: value)
_probe.def_abstract_eval(_refuse)

_planned.def_impl(_place)
_planned.def_abstract_eval(lambda _, *, sharding, jaxpr: jaxpr.out_avals[0])
ad.deflinear2(_planned, lambda cotangent, _, **params: (_planned.bind(cotangent, **params),))
batching.fancy_primitive_batchers[_planned] = _batched
mlir.register_lowering(_planned, mlir.lower_fun(_apply, multiple_results=False))
