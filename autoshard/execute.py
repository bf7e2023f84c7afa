"""Tracing a function into a flat program, lowering it, and running what was compiled.

The flat program takes the call's arrays one by one and gives the result's arrays one by one, so
that the order of arguments in the lowered module is the order of ``Signature.arguments``. The
user's function is traced once; each lowering wraps that trace in a fresh function object, because
``jax.jit`` caches lowerings by function and a lowered module is edited in place.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, tree_flatten_with_path, tree_unflatten

from autoshard.errors import InputError
from autoshard.shardings import Sharding, to_partition_spec
from autoshard.signature import (
    Call,
    Leaf,
    Signature,
    array_type,
    is_weak,
    result_leaves,
    settings,
    split,
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


@contextmanager
def mesh_set(mesh: Mesh) -> Iterator[None]:
    """The mesh that functions are traced and lowered under, also inside a transformation.

    ``jax.disable_jit`` is about running functions; what is only traced is traced whole.
    """
    with jax.disable_jit(False):
        if is_tracing(mesh):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                yield
        else:
            with jax.set_mesh(mesh):
                yield


def flatten(
    fn: Callable[..., Any], signature: Signature
) -> tuple[Callable[..., tuple[Any, ...]], list[ResultTree]]:
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
            avals = jax.eval_shape(flat, *(leaf.abstract for leaf in signature.arguments))
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
    constraint of its own on a key without.
    """
    platform = traced.mesh.devices.flat[0].platform
    whole = NamedSharding(traced.auto_mesh, PartitionSpec())
    jitted = jax.jit(
        _fresh(traced),
        keep_unused=True,
        in_shardings=tuple(whole if leaf.is_key else None for leaf in traced.signature.arguments),
        out_shardings=tuple(whole if leaf.is_key else None for leaf in traced.results),
    )
    with mesh_set(traced.auto_mesh):
        traced_again = jitted.trace(*_structs(traced))
        _check_closed(traced_again.jaxpr, traced)
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
    mesh: Mesh, traced: Traced, arguments: Sequence[Sharding], results: Sequence[Sharding]
) -> jax.stages.Lowered:
    """Lower with results on ``mesh``."""
    jitted = jax.jit(
        _fresh(traced),
        keep_unused=True,
        donate_argnums=traced.signature.donated,
        in_shardings=named(traced.signature.arguments, arguments, traced.auto_mesh),
        out_shardings=named(traced.results, results, mesh),
    )
    with mesh_set(traced.auto_mesh):
        return jitted.lower(*_structs(traced))


def module_of(lowered: jax.stages.Lowered) -> ir.Module:
    """The live StableHLO module: what is changed in it is what gets compiled."""
    module: ir.Module | None = lowered.compiler_ir("stablehlo")
    assert module is not None
    return module


def named(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding], mesh: Mesh
) -> tuple[NamedSharding, ...]:
    """The shardings of a lowered module's values as JAX takes them for the arrays."""
    return tuple(
        NamedSharding(mesh, to_partition_spec(sharding[: len(leaf.shape)]))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Where arguments and results live, in the caller's own trees.

    Attributes:
        in_shardings: Per positional argument that is not static, its tree of ``NamedSharding``:
            what ``jax.jit(fn, in_shardings=...)`` takes.
        keyword_shardings: The same for arguments given by keyword.
        out_shardings: The tree of the result's ``NamedSharding``.
        positions: Positions of the positional arguments that are not static.
    """

    in_shardings: tuple[Any, ...]
    keyword_shardings: dict[str, Any]
    out_shardings: Any
    positions: tuple[int, ...]

    @classmethod
    def of(
        cls, traced: Traced, arguments: Sequence[Sharding], results: Sequence[Sharding]
    ) -> Placement:
        """The placement that a plan's shardings mean on the caller's mesh."""
        signature = traced.signature
        given, keywords = signature.fill(
            named(signature.arguments, arguments, traced.mesh), fixed=None
        )
        out = traced.result_tree.fill(named(traced.results, results, traced.mesh), fixed=None)
        return cls(given, keywords, out, signature.positions)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Move arguments to where the program wants them.

        Give the arguments as for a call; later ones may be left out.

        Returns:
            One argument alone if one was given, else a tuple; with keywords, a pair of tuple and
            dictionary.
        """
        wanted = dict(zip(self.positions, self.in_shardings, strict=True))
        if len(args) > len(self.positions) and max(wanted, default=-1) < len(args) - 1:
            raise InputError(
                f"{len(args)} positional arguments to place, the plan is for {len(wanted)}",
                fix="give the arguments with which the plan was made",
            )
        placed = tuple(_put(arg, wanted[i]) if i in wanted else arg for i, arg in enumerate(args))
        if kwargs:
            unknown = next((k for k in kwargs if k not in self.keyword_shardings), None)
            if unknown is not None:
                raise InputError(
                    f"the plan has no keyword argument {unknown!r}",
                    fix=f"keywords: {', '.join(self.keyword_shardings) or 'none'}",
                )
            moved = {k: _put(v, self.keyword_shardings[k]) for k, v in kwargs.items()}
            return placed, moved
        return placed[0] if len(placed) == 1 else placed


def _put(argument: Any, shardings: Any) -> Any:
    try:
        return jax.tree.map(
            lambda leaf, sharding: leaf if sharding is None else put(leaf, sharding),
            argument,
            shardings,
            is_leaf=lambda leaf: leaf is None,
        )
    except ValueError as error:
        raise InputError(
            f"an argument of another structure than planned: {error}",
            fix=f"give one of structure {jax.tree.structure(shardings)}",
        ) from error


_AVAL = operator.attrgetter("aval")


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """An array where ``sharding`` says; the array itself if it is there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


@dataclass(frozen=True, eq=False, slots=True)
class Executable:
    """A compiled program that is called like the function it came from.

    Attributes:
        compiled: The executable as JAX made it, over flat arrays.
        traced: The program it was compiled from.
        in_shardings: One per array argument.
        partitioner: Who wrote the program of one device: ``"xla"`` or ``"shardy"``.
        fallback_reason: Why that is XLA although Shardy was asked for; else empty.
    """

    compiled: jax.stages.Compiled
    traced: Traced
    in_shardings: tuple[NamedSharding, ...]
    partitioner: str = "xla"
    fallback_reason: str = ""
    _settings: tuple[Any, ...] = field(default_factory=settings)
    _weak: list[bool] = field(init=False)
    _seen: list[list[Any]] = field(init=False, default_factory=list)
    _donated: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        weak = [leaf.weak_type for leaf in self.traced.signature.arguments]
        object.__setattr__(self, "_weak", weak)
        object.__setattr__(self, "_donated", self.traced.signature.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments of the planned structure, shapes and types; they are moved if need be.

        Raises:
            InputError: Arguments of another structure, or with other static parts.
        """
        values = self.match(split(self.traced.signature.convention, args, kwargs))
        if values is None:
            raise InputError(
                "the arguments differ from those the program was compiled for",
                at=f"{self.traced.name}({', '.join(map(str, self.traced.signature.arguments))})",
                fix="call the sharded function, which plans for new arguments, or compile again",
            )
        self.check_donated(values)
        return self.traced.result_tree.fill(self.compiled(*self.place(values)))

    def match(self, call: Call) -> list[Any] | None:
        """The call's arrays if all that JAX itself does not check fits; else None."""
        signature = self.traced.signature
        if call.tree != signature.tree or settings() != self._settings:
            return None
        values = call.leaves
        if signature.fixed:
            if not all(_same(values[i], fixed) for i, fixed in signature.fixed):
                return None
            values = [values[i] for i in signature.array_positions]
        if call.statics or signature.statics:
            same = len(call.statics) == len(signature.statics) and all(
                ours[0] == theirs[0] and _same(ours[1], theirs[1])
                for ours, theirs in zip(signature.statics, call.statics, strict=True)
            )
            if not same:
                return None
        try:
            avals = list(map(_AVAL, values))
        except AttributeError:  # numpy arrays and Python numbers among them
            return values if [is_weak(value) for value in values] == self._weak else None
        # In a training loop the abstract values are the very objects of the call before.
        if self._seen and avals == self._seen[0]:
            return values
        if [aval.weak_type for aval in avals] != self._weak:
            return None
        self._seen[:] = [avals]
        return values

    def is_alive(self, values: Sequence[Any]) -> bool:
        """Whether the first donated array still holds its buffer; cheap enough for every call.

        XLA:CPU runs on a deleted buffer until it crashes, so it must never get one.
        """
        donated = self._donated
        if not donated:
            return True
        value = values[donated[0]]
        return not (isinstance(value, jax.Array) and value.is_deleted())

    def check_donated(self, values: Sequence[Any]) -> None:
        """Refuse donated arrays that are gone or given twice.

        Raises:
            InputError: Names the argument.
        """
        seen: dict[int, str] = {}
        for number in self._donated:
            value, leaf = values[number], self.traced.signature.arguments[number]
            if not isinstance(value, jax.Array):
                continue
            if value.is_deleted():
                raise InputError(
                    f"{leaf.name} was donated to an earlier call and holds nothing any more",
                    at=f"argument {leaf}",
                    fix="pass the result that replaced it",
                )
            if id(value) in seen:
                raise InputError(
                    f"{leaf.name} and {seen[id(value)]} are one array, donated twice",
                    at=f"argument {leaf}",
                    fix="pass a copy for one of them, or do not donate both",
                )
            seen[id(value)] = leaf.name

    def place(self, values: Sequence[Any]) -> list[Any]:
        """The arrays where the program wants them."""
        return [put(v, s) for v, s in zip(values, self.in_shardings, strict=True)]

    @property
    def leaf_shardings(self) -> list[NamedSharding | None]:
        """One per leaf of ``(args, kwargs)`` without static arguments; None for fixed leaves."""
        signature = self.traced.signature
        leaves: list[NamedSharding | None] = [None] * signature.tree.num_leaves
        for position, sharding in zip(signature.array_positions, self.in_shardings, strict=True):
            leaves[position] = sharding
        return leaves

    def as_text(self) -> str:
        """The compiled per-device program."""
        return str(self.compiled.as_text())

    def cost_analysis(self) -> Any:
        """What XLA says the program costs, as ``jax.stages.Compiled.cost_analysis``."""
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """What XLA says the program occupies, as ``jax.stages.Compiled.memory_analysis``."""
        return self.compiled.memory_analysis()


def _same(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (type(ours) is type(theirs) and bool(ours == theirs))


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
