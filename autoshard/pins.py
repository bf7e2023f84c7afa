"""Shardings that the caller fixes: given as a prefix of a tree, or by path, for single leaves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import InputError, UnknownNameError
from autoshard.shardings import MeshShape, Sharding, loosened
from autoshard.signature import Leaf

Pins = Any
"""A pytree prefix, or a path dictionary, of ``PartitionSpec``, ``NamedSharding`` or None (free)."""


_FREE = object()


def resolve(
    pins: Pins, leaves: Sequence[Leaf], whole: Any, mesh: Mesh, option: str
) -> tuple[Sharding | None, ...]:
    """The pin of each leaf; None where the planner is free.

    Args:
        pins: What the caller gave: one spec for all, a prefix of ``whole``, or a dictionary from
            paths to specs. A path is a leaf's ``path`` or ``name``, or the beginning of one, which
            pins all below it; the longest path counts.
        leaves: The arrays.
        whole: The tree that a prefix is for; its leaves are positions in ``leaves``.
        mesh: The mesh the pins are for.
        option: What the option is called, for messages.

    Raises:
        InputError: A pin that does not fit its array or the mesh.
        UnknownNameError: A path or mesh axis that does not exist.
    """
    if _is_pin(pins):
        given = [pins] * len(leaves)
    elif _is_paths(pins, whole):
        given = _by_path(pins, leaves, option)
    else:
        given = [None] * len(leaves)
        spread = jax.tree.leaves(_by_prefix(pins, whole, option))
        for position, pin in zip(jax.tree.leaves(whole), spread, strict=True):
            given[position] = None if pin is _FREE else pin
    return tuple(
        None if pin is None else _check(pin, leaf, mesh, option)
        for pin, leaf in zip(given, leaves, strict=True)
    )


def _is_pin(value: Any) -> bool:
    return value is None or isinstance(value, (PartitionSpec, jax.sharding.Sharding))


def _is_paths(pins: Pins, whole: Any) -> bool:
    if not (isinstance(pins, Mapping) and all(isinstance(key, str) for key in pins)):
        return False
    return not (isinstance(whole, Mapping) and set(pins) == set(whole))


def _by_prefix(pins: Pins, whole: Any, option: str) -> Any:
    if isinstance(pins, list) and isinstance(whole, tuple):
        pins = tuple(pins)
    marked = jax.tree.map(lambda pin: _FREE if pin is None else pin, pins, is_leaf=_is_pin)
    try:
        return jax.tree.broadcast(marked, whole)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{option} is no prefix of the tree it is for: {error}",
            at=option,
            fix="give one spec, a tree of specs shaped like the arguments, or {path: spec}",
        ) from error


def _by_path(pins: Mapping[str, Any], leaves: Sequence[Leaf], option: str) -> list[Any]:
    given: list[Any] = [None] * len(leaves)
    for path in sorted(pins, key=len):
        hits = [
            i for i, leaf in enumerate(leaves) if _below(leaf.path, path) or _below(leaf.name, path)
        ]
        if not hits:
            known = list(dict.fromkeys(n for leaf in leaves for n in (leaf.path, leaf.name)))
            near = difflib.get_close_matches(path, known, 3, 0.4) or known[:3]
            raise UnknownNameError(
                f"{option} names {path}, but there is no such array",
                at=option,
                fix=f"did you mean {' or '.join(near)}?",
            )
        for i in hits:
            given[i] = pins[path]
    return given


def _below(whole: str, path: str) -> bool:
    return whole == path or (whole.startswith(path) and whole[len(path)] in "[.")


def _check(pin: Any, leaf: Leaf, mesh: Mesh, option: str) -> Sharding:
    at = f"{option}, {leaf}"
    if isinstance(pin, NamedSharding):
        if dict(pin.mesh.shape) != dict(mesh.shape):
            raise InputError(
                f"the sharding given for {leaf.name} is on another mesh: {dict(pin.mesh.shape)}",
                at=at,
                fix=f"use the mesh given to autoshard ({dict(mesh.shape)}), or a PartitionSpec",
            )
        pin = pin.spec
    if not isinstance(pin, PartitionSpec):
        raise InputError(
            f"{leaf.name} is pinned to a {type(pin).__name__}",
            at=at,
            fix="pin with jax.sharding.PartitionSpec, NamedSharding, or None to leave it free",
        )
    if len(pin) > len(leaf.shape):
        raise InputError(
            f"{leaf.name} has {len(leaf.shape)} dimensions, its spec {pin} has {len(pin)}",
            at=at,
            fix="give at most one entry per dimension",
        )
    entries = [_axes(entry, leaf, at) for entry in pin]
    used: set[str] = set()
    for dimension, axes in enumerate(entries):
        for axis in axes:
            if axis not in mesh.shape:
                near = difflib.get_close_matches(axis, mesh.axis_names, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise UnknownNameError(
                    f"dimension {dimension} of {leaf.name} is pinned to {axis!r}, "
                    "which is no axis of the mesh",
                    at=at,
                    fix=f"{hint}axes: {', '.join(map(str, mesh.axis_names))}",
                )
            if axis in used:
                raise InputError(
                    f"{leaf.name} is split twice by mesh axis {axis!r}",
                    at=at,
                    fix="use each mesh axis for one dimension",
                )
            used.add(axis)
        ways = 1
        for axis in axes:
            ways *= mesh.shape[axis]
        if leaf.shape[dimension] % ways:
            size = leaf.shape[dimension]
            shape = MeshShape(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape))
            (fewer,) = loosened((size,), (axes,), shape)
            raise InputError(
                f"dimension {dimension} of {leaf.name}, of size {size}, cannot be split {ways} "
                "ways: jax.jit splits arguments and results evenly",
                at=at,
                fix=f"pad it to {-(-size // ways) * ways}, or split it by "
                f"{' and '.join(fewer) or 'no axis'}; values on the way may be padded all the same",
            )
    return tuple(entries) + ((),) * (leaf.module_rank - len(entries))


def _axes(entry: Any, leaf: Leaf, at: str) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise InputError(
            f"the spec of {leaf.name} leaves a dimension unconstrained",
            at=at,
            fix="pin every dimension, or leave the whole array free with None",
        )
    axes = tuple(entry) if isinstance(entry, tuple) else (entry,)
    odd = [axis for axis in axes if not isinstance(axis, str)]
    if odd:
        raise InputError(
            f"the spec of {leaf.name} has {odd[0]!r}, which is no name of a mesh axis",
            at=at,
            fix="name axes as strings, e.g. P('data', None)",
        )
    return axes
