"""Running a module on the CPU, so that a pass can be held against what it was given."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.program import arrays, main_block, terminator
from autoshard.shardings import MeshShape
from autoshard.tracing import auto

Array = NDArray[Any]

MAX_BYTES = 2**30
"""Arguments and results of a module up to which it is run [bytes]."""

SMALL_INTEGERS = 4
"""Random integers are below this, so that they are indices of most dimensions."""

QUICK: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
"""Options of XLA for programs that run once: the code is slower, and made in half the time."""

_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (4, 8, 16, 32, 64)},
    **{"i1": "bool", "bf16": "bfloat16"},
    **{"complex<f32>": "complex64", "complex<f64>": "complex128"},
    **{"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"},
}


def structs(values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of MLIR values.

    Raises:
        InputError: One has a type that no array of JAX has.
    """
    found = []
    for value in values:
        kind = ir.RankedTensorType(value.type)
        name = str(kind.element_type)
        if name not in _DTYPES:
            raise InputError(
                f"the program has a {kind} at its boundary, which no array has",
                fix="check the numbers of a program without it",
            )
        found.append(jax.ShapeDtypeStruct(tuple(kind.shape), jnp.dtype(_DTYPES[name])))
    return tuple(found)


def boundary_structs(
    module: ir.Module,
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes and types of the arguments and results of ``main``."""
    block = main_block(module)
    return structs(arrays(block.arguments)), structs(arrays(terminator(block).operands))


def random_arguments(module: ir.Module, seed: int = 0) -> tuple[Array, ...]:
    """Small random values for the arguments of ``main``.

    Numbers are normal, scaled by the root of the last dimension so that products of matrices stay
    near 1; integers are 0 to 3, booleans true or false.

    Raises:
        InputError: They would need more than :data:`MAX_BYTES`.
    """
    arguments, results = boundary_structs(module)
    size = sum(math.prod(s.shape) * s.dtype.itemsize for s in (*arguments, *results))
    if size > MAX_BYTES:
        raise InputError(
            f"the program's arguments and results are {size:,} bytes; up to {MAX_BYTES:,} are run "
            "to check numbers",
            fix="check the numbers of the same program with smaller shapes",
        )
    rng = np.random.default_rng(seed)
    return tuple(_random(struct, rng) for struct in arguments)


def _random(struct: jax.ShapeDtypeStruct, rng: np.random.Generator) -> Array:
    if struct.dtype == np.bool_:
        return np.asarray(rng.integers(0, 2, struct.shape) == 1)
    if jnp.issubdtype(struct.dtype, jnp.integer):
        return np.asarray(rng.integers(0, SMALL_INTEGERS, struct.shape), struct.dtype)
    scale = 1.0 / math.sqrt(max(1, struct.shape[-1])) if struct.shape else 1.0
    values = rng.standard_normal(struct.shape) * scale
    if jnp.issubdtype(struct.dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(struct.shape) * scale
    return np.asarray(values).astype(struct.dtype)


def evaluate(
    module: ir.Module, arguments: Sequence[Array], mesh: MeshShape | None = None
) -> tuple[Array, ...]:
    """Run ``main`` on the CPU; the module is left as it is.

    Args:
        module: The program; shardings in it may be for ``mesh`` alone.
        arguments: One array per argument.
        mesh: The mesh, for which there must be so many CPU devices; None for one device.

    Raises:
        InputError: There are too few CPU devices, or XLA refuses the program.
    """
    inputs, outputs = boundary_structs(module)
    compiled = _compiled(module, inputs, outputs, mesh)
    try:
        return tuple(np.asarray(r) for r in compiled(*map(jnp.asarray, arguments)))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise _refused(error) from error


def _compiled(
    module: ir.Module,
    inputs: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[jax.ShapeDtypeStruct],
    mesh: MeshShape | None,
) -> Any:
    """A program of JAX's with the same arguments and results, whose body is the module's."""

    def stub(*_: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in outputs)

    options: dict[str, Any] = {}
    if mesh is not None:
        whole = NamedSharding(_cpu_mesh(mesh), PartitionSpec())
        options = {"in_shardings": whole, "out_shardings": whole}
    lowered = jax.jit(stub, keep_unused=True, **options).lower(*inputs)
    target = lowered.compiler_ir("stablehlo")
    assert target is not None
    held = io.BytesIO()
    module.operation.write_bytecode(held)
    with target.context:
        copy = ir.Module.parse(held.getvalue())
    _put(copy, target)
    try:
        return lowered.compile(compiler_options=QUICK)
    except jax.errors.JaxRuntimeError as error:
        raise _refused(error) from error


def _put(source: ir.Module, target: ir.Module) -> None:
    """Give ``target`` the functions, meshes and body of ``main`` of ``source``.

    Its own ``main`` stays, and with it the shardings of arguments and results that JAX expects.
    """
    kept, body = main_block(target), main_block(source)
    for op in reversed(list(kept.operations)):
        op.operation.erase()
    for argument, new in zip(body.arguments, kept.arguments, strict=True):
        argument.replace_all_uses_with(new)
    for op in list(body.operations):
        op.operation.detach_from_parent()
        kept.append(op.operation)
    main = body.owner.operation
    meshes = {_symbol(op.operation) for op in target.body.operations}
    for op in list(source.body.operations):
        operation = op.operation
        if operation != main and _symbol(operation) not in meshes:
            operation.detach_from_parent()
            target.body.append(operation)


def _symbol(operation: ir.Operation) -> str:
    return str(ir.StringAttr(operation.attributes["sym_name"]).value)


def _cpu_mesh(shape: MeshShape) -> Mesh:
    devices = jax.devices("cpu")
    if len(devices) < shape.devices:
        raise InputError(
            f"the mesh {shape} needs {shape.devices} CPU devices; there are {len(devices)}",
            fix=f"start with jax.config.update('jax_num_cpu_devices', {shape.devices})",
        )
    return auto(Mesh(np.array(devices[: shape.devices]).reshape(shape.sizes), shape.names))


def _refused(error: Exception) -> InputError:
    return InputError(
        f"XLA refuses the program: {str(error)[:500]}", fix="see what the pass before made of it"
    )
