"""The program that ``autoshard opt`` works on: a StableHLO file, or a function with an example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh

from autoshard.cost_models import named_cost_model
from autoshard.errors import InputError
from autoshard.foreign import parse, read
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.module_state import mesh_of
from autoshard.passes.reproducer import Reproducer
from autoshard.program import Boundary
from autoshard.search import Options, pass_context
from autoshard.shardings import MeshShape
from autoshard.signature import Convention, Signature, split
from autoshard.tracing import lower_for_planning, module_of, trace


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A program to run passes on.

    Attributes:
        module: The module.
        context: What its passes are told.
        pipeline: The passes that a reproducer names; empty for other programs.
        holder: Keeps alive what the module lives in.
    """

    module: ir.Module
    context: PassContext
    pipeline: str = ""
    holder: Any = None


def read_file(path: Path, mesh: MeshShape | None, cost_model: str | None) -> Subject:
    """A program from StableHLO text, bytecode, or a reproducer.

    It is read in a process of its own first, which a bad file may end.

    Args:
        path: The file.
        mesh: The mesh to work for; None: the one that a reproducer or the module names.
        cost_model: Name of a cost model.

    Raises:
        InputError: It cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read a module: {error.strerror or error}",
            at=str(path),
            fix="give the path of a .mlir or .mlirbc file",
        ) from error
    found = read(data, None, str(path))
    told = Reproducer.of(data[: 2**16].decode(errors="replace"))
    context = mlir.make_ir_context()
    with context:
        module = parse(data)
    shape = mesh or (None if told is None else told.mesh) or mesh_of(module)
    sizes = {} if shape is None else dict(zip(shape.names, shape.sizes, strict=True))
    boundaries = Boundaries(
        tuple(Boundary(port.name, port.donated) for port in found.arguments),
        tuple(Boundary(f"result{k}") for k in range(len(found.results))),
    )
    made = PassContext(
        mesh=shape,
        cost_model=None if cost_model is None else named_cost_model(cost_model, sizes),
        boundaries=boundaries,
        seed=0 if told is None else told.seed,
    )
    return Subject(module, made, "" if told is None else told.pipeline, context)


def lower_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    cost_model: str | None,
    donate_argnums: tuple[int, ...] | None = None,
    static_argnums: tuple[int, ...] | None = None,
) -> Subject:
    """A program from a Python function, lowered as it is for planning."""
    convention = Convention.of(function, static_argnums, None, donate_argnums, None)
    traced = trace(function, Signature.of(convention, split(convention, args, kwargs)), mesh)
    lowered = lower_for_planning(traced)
    context = pass_context(traced, Options(cost_model=cost_model))
    if mesh.size == 1:
        context = replace(context, mesh=None)
    return Subject(module_of(lowered), context, "", lowered)
