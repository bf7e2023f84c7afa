"""Tracing a function into a flat program, and lowering it.

The flat program takes the call's arrays one by one and gives the result's arrays one by one, so
that the order of arguments in the lowered module is the order of ``Signature.arguments``. The
user's function is traced once; each lowering wraps that trace in a fresh function object, because
``jax.jit`` caches lowerings by function and a lowered module is edited in place.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, tree_flatten_with_path, tree_unflatten

from autoshard.cost_models.planned import PlannedDevice
from autoshard.errors import InputError
from autoshard.shardings import Sharding, to_partition_spec
from autoshard.signature import (
    Leaf,
    Signature,
    array_type,
    result_leaves,
)


class NotClosedError(InputError):
    """A function that means something only inside the JAX transformation around it."""


@dataclass(frozen=True, eq=False, slots=True)
class ResultTree:
    """How a result hangs together.

    Attributes:
        tree: Tree of the whole result.
        paths: Key path of each array.
        positions: Where among all leaves the arrays are.
        fixed: The other leaves and where they are.
    """

    tree: PyTreeDef
    paths: tuple[Any, ...]
    positions: tuple[int, ...]
    fixed: tuple[tuple[int, Any], ...]

    @classmethod
    def of(cls, result: Any) -> tuple[ResultTree, tuple[Any, ...]]:
        """The tree of a result, and its arrays."""
        paths, arrays, positions, fixed = [], [], [], []
        leaves, tree = tree_flatten_with_path(result)
        for position, (path, leaf) in enumerate(leaves):
            if array_type(leaf) is None:
                fixed.append((position, leaf))
                continue
            paths.append(path)
            arrays.append(leaf)
            positions.append(position)
        return cls(tree, tuple(paths), tuple(positions), tuple(fixed)), tuple(arrays)

    def fill(self, values: Sequence[Any], fixed: Any = ...) -> Any:
        """One value per array, put where the arrays are; ``fixed``, if given, everywhere else."""
        if not self.fixed:
            return tree_unflatten(self.tree, values)
        leaves: list[Any] = [None] * self.tree.num_leaves
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        for position, value in self.fixed:
            leaves[position] = value if fixed is ... else fixed
        return tree_unflatten(self.tree, leaves)


@dataclass(frozen=True, eq=False, slots=True)
class Traced:
    """A function traced for one signature.

    Attributes:
        name: The function's name.
        signature: How it is called.
        results: The arrays of its result, in order.
        result_tree: How its result hangs together.
        flat: Arrays in, arrays out; traced once.
        mesh: The caller's mesh.
        auto_mesh: The same devices and names with all axes of type ``Auto``.
    """

    name: str
    signature: Signature
    results: tuple[Leaf, ...]
    result_tree: ResultTree
    flat: Callable[..., tuple[Any, ...]]
    mesh: Mesh
    auto_mesh: Mesh


def auto(mesh: Mesh) -> Mesh:
    """The same mesh with every axis of type ``Auto``, as lowering needs it."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def is_tracing(mesh: Mesh) -> bool:
    """Whether this thread is inside a JAX transformation, where no mesh may be set."""
    try:
        with jax.set_mesh(auto(mesh)):
            return False
    except ValueError:  # "can only be used outside of jax.jit"
        return True


def is_planned(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the mesh is of planned devices, which are nowhere, or of none."""
    return isinstance(mesh, AbstractMesh) or isinstance(mesh.devices.flat[0], PlannedDevice)


@contextmanager
def mesh_set(mesh: Mesh) -> Iterator[None]:
    """The mesh that functions are traced and lowered under, also inside a transformation.

    ``jax.disable_jit`` is about running functions; what is only traced is traced whole. A mesh of
    planned devices is named without them: JAX would ask them for a client.
    """
    with jax.disable_jit(False):
        if is_planned(mesh) or is_tracing(mesh):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                yield
        else:
            with jax.set_mesh(mesh):
                yield


def flatten(fn: Callable[..., Any], signature: Signature) -> tuple[Any, list[ResultTree]]:
    """``fn`` under ``jax.jit`` with arrays in and arrays out, and a list for its result's tree.

    The tree is there once the function has been traced.
    """
    seen: list[ResultTree] = []

    def flat(*arrays: Any) -> tuple[Any, ...]:
        args, kwargs = signature.arguments_of(arrays)
        tree, values = ResultTree.of(fn(*args, **kwargs))
        seen[:] = [tree]
        return values

    flat.__name__ = flat.__qualname__ = _name(fn)
    return jax.jit(flat), seen


_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,  # and what derives from it, as a bool of a tracer
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


"""Errors that say that Python asked for the value of a traced array."""


def trace(fn: Callable[..., Any], signature: Signature, mesh: Mesh) -> Traced:
    """Trace ``fn`` for a signature.

    Raises:
        InputError: ``fn`` needs the value of a traced array in Python.
    """
    flat, seen = flatten(fn, signature)
    auto_mesh = auto(mesh)
    try:
        with mesh_set(auto_mesh):
            avals = flat.trace(*(leaf.abstract for leaf in signature.arguments)).jaxpr.out_avals
    except _NEEDS_VALUE as error:
        raise InputError(
            f"{_name(fn)} cannot be traced: Python needs the value of an array that is only known "
            f"when the program runs ({type(error).__name__})",
            at=_user_line(error.__traceback__),
            fix="use jax.lax.cond, jax.lax.while_loop or jnp.where there, or make what decides "
            "static with static_argnames",
        ) from error
    results = result_leaves(zip(seen[0].paths, avals, strict=True))
    return Traced(_name(fn), signature, results, seen[0], flat, mesh, auto_mesh)


def lower_for_planning(traced: Traced) -> jax.stages.Lowered:
    """Lower the program with no shardings, for the platform of the mesh.

    Typed keys alone are given one (whole), as :func:`lower_with` gives them one: JAX writes a
    constraint of its own on a key without. So are the results of a program that moves arrays
    between memories: JAX then writes into which memory each result goes.
    """
    platform = traced.mesh.devices.flat[0].platform
    with mesh_set(traced.auto_mesh):
        traced_again = _whole(traced, every_result=False).trace(*_structs(traced))
        _check_closed(traced_again.jaxpr, traced)
        if _moves_memory(traced_again.jaxpr):
            traced_again = _whole(traced, every_result=True).trace(*_structs(traced))
        try:
            lowered: jax.stages.Lowered = traced_again.lower(lowering_platforms=(platform,))
        except ValueError as error:
            if "ordered effects are not supported" not in str(error):
                raise
            raise InputError(
                f"{traced.name} prints or calls back in order, which JAX does not do on "
                f"{traced.mesh.size} devices: {error}",
                at=_user_line(error.__traceback__),
                fix="say ordered=False, or use jax.experimental.io_callback(..., ordered=True)",
            ) from error
    return lowered


def _whole(traced: Traced, *, every_result: bool) -> Any:
    """The program under ``jax.jit``, its typed keys, and maybe all results, held whole."""
    planned = is_planned(traced.mesh)
    mesh = traced.auto_mesh.abstract_mesh if planned else traced.auto_mesh
    spec = PartitionSpec()
    return jax.jit(
        _fresh(traced),
        keep_unused=True,
        in_shardings=tuple(
            NamedSharding(mesh, spec) if leaf.is_key else None
            for leaf in traced.signature.arguments
        ),
        out_shardings=tuple(
            NamedSharding(mesh, spec, memory_kind=_kind(leaf))
            if leaf.is_key or every_result
            else None
            for leaf in traced.results
        ),
    )


def _moves_memory(jaxpr: Any) -> bool:
    """Whether a program puts an array anywhere."""
    waiting = [jaxpr]
    for each in waiting:  # grows as it goes
        for equation in getattr(each, "jaxpr", each).eqns:
            if equation.primitive.name == "device_put":
                return True
            waiting += jaxprs_in_params(equation.params)
    return False


def _check_closed(jaxpr: Any, traced: Traced) -> None:
    """Refuse a program that is no program without the transformation around it."""
    if len(jaxpr.in_avals) != len(traced.signature.arguments):
        raise NotClosedError(
            f"{traced.name} uses arrays of the JAX transformation around it that are not among its "
            "arguments",
            at=traced.name,
            fix="pass them as arguments, or make the plan outside of the transformation",
        )
    for effect in jaxpr.effects:
        if type(effect).__name__ == "NamedAxisEffect":
            raise NotClosedError(
                f"{traced.name} uses the axis {effect.name!r} of a transformation around it",
                at=traced.name,
                fix="plan the function that has jax.vmap or jax.shard_map in it",
            )


def lower_with(
    traced: Traced, arguments: Sequence[Sharding], results: Sequence[Sharding]
) -> jax.stages.Lowered:
    """Lower the program with shardings for its arguments and results.

    Args:
        traced: The program.
        arguments: One per argument of the lowered module.
        results: One per result of the lowered module.

    Returns:
        The program, with its results on the caller's mesh or on that with automatic axes (see
        :mod:`autoshard.remesh`).
    """
    try:
        return _lowered_onto(traced.mesh, traced, arguments, results)
    except ValueError as error:
        if "mesh should be the same" not in str(error):
            raise
        return _lowered_onto(traced.auto_mesh, traced, arguments, results)


def _lowered_onto(
    mesh: Mesh | AbstractMesh,
    traced: Traced,
    arguments: Sequence[Sharding],
    results: Sequence[Sharding],
) -> jax.stages.Lowered:
    """Lower with results on ``mesh``."""
    around: Mesh | AbstractMesh = traced.auto_mesh
    if is_planned(traced.mesh):
        mesh = around = traced.auto_mesh.abstract_mesh
    jitted = jax.jit(
        _fresh(traced),
        keep_unused=True,
        donate_argnums=traced.signature.donated,
        in_shardings=named(traced.signature.arguments, arguments, around),
        out_shardings=named(traced.results, results, mesh),
    )
    with mesh_set(traced.auto_mesh):
        platform = traced.mesh.devices.flat[0].platform
        lowered: jax.stages.Lowered = jitted.trace(*_structs(traced)).lower(
            lowering_platforms=(platform,)
        )
        return lowered


def module_of(lowered: jax.stages.Lowered) -> ir.Module:
    """The live StableHLO module: what is changed in it is what gets compiled."""
    module: ir.Module | None = lowered.compiler_ir("stablehlo")
    assert module is not None
    return module


def named(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding], mesh: Mesh | AbstractMesh
) -> tuple[NamedSharding, ...]:
    """The shardings of a lowered module's values as JAX takes them for the arrays."""
    nowhere = is_planned(mesh)
    return tuple(
        NamedSharding(
            mesh,
            to_partition_spec(sharding[: len(leaf.shape)]),
            memory_kind=None if nowhere else _kind(leaf),  # JAX would ask the devices for it
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def _kind(leaf: Leaf) -> str | None:
    """The kind of memory that holds an array; None for the device's own."""
    return "pinned_host" if leaf.on_host else None


def _structs(traced: Traced) -> list[jax.ShapeDtypeStruct]:
    return [leaf.abstract for leaf in traced.signature.arguments]


def _fresh(traced: Traced) -> Callable[..., tuple[Any, ...]]:
    def program(*arrays: Any) -> tuple[Any, ...]:
        return traced.flat(*arrays)

    program.__name__ = program.__qualname__ = traced.name
    return program


_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(__file__).parent))


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _user_line(traceback: TracebackType | None) -> str:
    """The deepest line that is neither JAX's nor ours."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            code = linecache.getline(file, traceback.tb_lineno).strip()
            place = f"{file}:{traceback.tb_lineno}: {code}"
        traceback = traceback.tb_next
    return place
