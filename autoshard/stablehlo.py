"""A StableHLO module from anywhere as a function of arrays, to be planned like any other.

The function is a primitive of its own whose lowering puts the module's ops into the program around
it. So ``jax.jit`` traces, lowers and runs it, and all that works for a JAX function works for it,
except differentiation: what is to be differentiated must be so before it is exported.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, PartitionSpec

from autoshard.errors import InputError
from autoshard.foreign import Port, read
from autoshard.program import main_block, operations
from autoshard.search import Options
from autoshard.shardings import to_partition_spec
from autoshard.signature import Argnames, Argnums, Convention, Leaf, array_type

if TYPE_CHECKING:
    from autoshard.api import Sharded

_PATH_LENGTH = 4096


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Program:
    """A StableHLO module, called with its arrays by position; the result is a tuple.

    Attributes:
        name: The module's name.
        arguments: Its arguments, named by their locations in the module or ``arg0``, ``arg1``, …
        results: Its results.
        mesh: Axes and sizes of the mesh that shardings inside the module are for; empty if there
            are none. On a mesh with the same axes they are kept, on any other they are left out.
        ignored: Annotations of the module that were left out, in words.
    """

    name: str
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    mesh: tuple[tuple[str, int], ...]
    ignored: tuple[str, ...]
    _pins: tuple[tuple[PartitionSpec | None, ...], tuple[PartitionSpec | None, ...]]
    _manual: bool
    _module: bytes
    __name__: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.name)

    @classmethod
    def from_stablehlo(
        cls, source: str | bytes | os.PathLike[str], *, entry: str | None = None
    ) -> Program:
        """Read a module: text, MLIR bytecode, or a portable artifact (as ``jax.export`` makes it).

        It is parsed in a process of its own, which costs a second or two.

        Args:
            source: A path, or the module itself as text or bytes.
            entry: The function to take; by default ``main``, or the only public one.

        Raises:
            InputError: It is no StableHLO module, or one with sizes that are not known.
        """
        data, where = _load(source)
        found = read(data, entry, where)
        if found.ignored:
            warnings.warn(
                f"{where}: left out of the module: {'; '.join(found.ignored)}", stacklevel=2
            )
        return cls(
            found.name,
            tuple(_leaf(i, port) for i, port in enumerate(found.arguments)),
            tuple(_leaf(i, port) for i, port in enumerate(found.results)),
            found.mesh,
            found.ignored,
            (_specs(found.arguments), _specs(found.results)),
            found.manual,
            found.module,
        )

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.arguments)} arguments, {len(self.results)} results"]
        lines += [f"  {leaf}{'  donated' * leaf.donated}" for leaf in self.arguments]
        return "\n".join([*lines, *(f"  -> {leaf}" for leaf in self.results)])

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the arguments, as JAX holds them under its present settings."""
        return tuple(_struct(leaf) for leaf in self.arguments)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run it, or trace it as part of a JAX program.

        Raises:
            InputError: Arrays of another number, shape or type.
        """
        if len(arrays) != len(self.arguments):
            raise InputError(
                f"{self.name} takes {len(self.arguments)} arrays, {len(arrays)} were given",
                at=f"{self.name}({', '.join(leaf.name for leaf in self.arguments)})",
                fix="give one array per argument, by position",
            )
        values = [_checked(a, leaf) for a, leaf in zip(arrays, self.arguments, strict=True)]
        return tuple(_program.bind(*values, program=self))

    def autoshard(self, mesh: Mesh, **options: Any) -> Sharded:
        """The same as ``autoshard(program, mesh, **options)``."""
        from autoshard.api import autoshard

        return autoshard(self, mesh, **options)

    def convention(self, donate_argnums: Argnums, donate_argnames: Argnames) -> Convention:
        """How it is called; the caller's word on donation goes before the module's."""
        names = tuple(leaf.name for leaf in self.arguments)
        if donate_argnums is None and donate_argnames is None:
            donated = tuple(i for i, leaf in enumerate(self.arguments) if leaf.donated)
        else:
            nums = np.atleast_1d(() if donate_argnums is None else donate_argnums)
            by_name = (donate_argnames,) if isinstance(donate_argnames, str) else donate_argnames
            unknown = [name for name in by_name or () if name not in names]
            beyond = [int(n) for n in nums if not -len(names) <= n < len(names)]
            if unknown or beyond:
                raise InputError(
                    f"{self.name} has no argument {(unknown or beyond)[0]!r} to donate",
                    fix=f"arguments: {', '.join(names)}",
                )
            chosen = {int(n) % len(names) for n in nums} | {names.index(n) for n in by_name or ()}
            donated = tuple(sorted(chosen))
        return Convention(parameters=names, donate_argnums=donated)

    def options(self, options: Options, mesh: Mesh) -> Options:
        """The options, with the shardings that the module prescribes where the caller has none."""
        if not self.mesh:
            return options
        if not self.fits(mesh.axis_names, mesh.devices.shape):
            self._check_manual(f"mesh {dict(mesh.shape)}")
            warnings.warn(
                f"{self.name}: its shardings are for the mesh {dict(self.mesh)} and are left out "
                f"on {dict(mesh.shape)}",
                stacklevel=4,
            )
            return options
        arguments, results = self._pins
        return replace(
            options,
            in_shardings=options.in_shardings if options.in_shardings is not None else arguments,
            out_shardings=options.out_shardings if options.out_shardings is not None else results,
        )

    def fits(self, names: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether a mesh is the one that shardings inside the module are for."""
        return self.mesh == tuple(zip(names, sizes, strict=True))

    def _check_manual(self, at: str) -> None:
        if self._manual:
            raise InputError(
                f"parts of {self.name} are written for one device of a mesh {dict(self.mesh)}",
                at=at,
                fix=f"use autoshard on a mesh with the axes {dict(self.mesh)}",
            )

    def open(self) -> ir.Module:
        """The module in the current MLIR context; its shardings stay on their own mesh alone."""
        module: ir.Module = ir.Module.parse(self._module)
        mesh = jax.sharding.get_abstract_mesh()
        if self.mesh and not self.fits(mesh.axis_names, mesh.axis_sizes):
            self._check_manual("a program without that mesh")
            for operation in list(operations(main_block(module))):
                if operation.name == "sdy.sharding_constraint":
                    operation.results[0].replace_all_uses_with(operation.operands[0])
                    operation.erase()
        return module


def _load(source: Any) -> tuple[bytes, str]:
    """The bytes of a module and what to call it."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), "the module given"
    if isinstance(source, str) and ("\n" in source or len(source) > _PATH_LENGTH):
        return source.encode(), "the module given"
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"a {type(source).__name__} is no StableHLO module",
            fix="give a path, or the module as text or bytes",
        )
    try:
        return Path(source).read_bytes(), str(source)
    except OSError as error:
        raise InputError(
            f"cannot read a module: {error.strerror or error}",
            at=str(source),
            fix="give the path of a .mlir or .mlirbc file",
        ) from error


def _leaf(position: int, port: Port) -> Leaf:
    dtype = jnp.dtype(port.dtype)
    return Leaf(f"[{position}]", port.name, port.shape, dtype, donated=port.donated)


def _specs(ports: Sequence[Port]) -> tuple[PartitionSpec | None, ...]:
    return tuple(None if p.spec is None else to_partition_spec(p.spec) for p in ports)


def _struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _checked(value: Any, leaf: Leaf) -> Any:
    """The array, if it fits; a Python number takes the type that is wanted."""
    wanted, aval = _struct(leaf), array_type(value)
    if aval is None:
        raise InputError(
            f"{leaf.name} is a {type(value).__name__}, not an array",
            at=f"argument {leaf}",
            fix="pass an array",
        )
    if bool(aval.weak_type) and tuple(aval.shape) == wanted.shape:
        return jax.lax.convert_element_type(value, wanted.dtype)
    if tuple(aval.shape) != wanted.shape or aval.dtype != wanted.dtype:
        raise InputError(
            f"{leaf.name} is a {aval.dtype}{list(aval.shape)}, the module takes "
            f"{wanted.dtype}{list(wanted.shape)}",
            at=f"argument {leaf}",
            fix="give an array of this shape and type, or export the module for the other",
        )
    return value


_program = Primitive("stablehlo_program")
_program.multiple_results = True


@functools.partial(jax.jit, static_argnames="program")
def _run(*values: Any, program: Program) -> tuple[Any, ...]:
    return tuple(_program.bind(*values, program=program))


def _avals(*_: Any, program: Program) -> list[Any]:
    return [jax.core.ShapedArray(s.shape, s.dtype) for s in map(_struct, program.results)]


def _lower(ctx: Any, *operands: Any, program: Program) -> list[Any]:
    module = program.open()
    function = main_block(module).owner
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    inputs, outputs = list(kind.inputs), list(kind.results)
    around = ctx.module_context
    name = mlir.merge_mlir_modules(
        around.module, program.name, module, dst_symtab=around.symbol_table
    )
    call = ir.Operation.create(
        "func.call",
        results=outputs,
        operands=[_converted(v, t) for v, t in zip(operands, inputs, strict=True)],
        attributes={"callee": ir.FlatSymbolRefAttr.get(name)},
    )
    wanted = [
        ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        for aval in ctx.avals_out
    ]
    return [_converted(v, t) for v, t in zip(call.results, wanted, strict=True)]


def _converted(value: Any, type_: Any) -> Any:
    """64-bit types of a module are 32-bit ones in a JAX that has them switched off."""
    if value.type == type_:
        return value
    return ir.Operation.create("stablehlo.convert", results=[type_], operands=[value]).result


def _mapped(
    values: Sequence[Any], dims: Sequence[int | None], *, program: Program
) -> tuple[Any, Sequence[int]]:
    """One row after another: nothing is known of the module that would let it take all at once."""
    mapped = [jnp.moveaxis(v, d, 0) for v, d in zip(values, dims, strict=True) if d is not None]

    def one(rows: list[Any]) -> tuple[Any, ...]:
        left = iter(rows)
        inputs = [v if d is None else next(left) for v, d in zip(values, dims, strict=True)]
        return tuple(_program.bind(*inputs, program=program))

    outputs = jax.lax.map(one, mapped)
    return outputs, [0] * len(outputs)


_program.def_impl(_run)
_program.def_abstract_eval(_avals)
batching.primitive_batchers[_program] = _mapped
mlir.register_lowering(_program, _lower)
