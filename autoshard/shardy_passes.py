"""Shardy's passes on a planned module, in a process of their own.

A failed invariant in these passes aborts the process, so they run in a child
(:mod:`autoshard.partition`). It is given a planned module as bytecode and answers with the module
of one device, or with the reason why there is none.
"""

from __future__ import annotations

import io
import json
from typing import Any, TypeAlias, cast

import jax
from jax.extend.mlir import ir, passmanager

from autoshard.child import UnsupportedError, serve
from autoshard.collectives_lowering import KINDS
from autoshard.global_to_local import Reduction, global_to_local, read_sharding
from autoshard.program import MANUAL, REGION_OPS, main_block
from autoshard.shardings import MeshShape, replicated

Value: TypeAlias = "ir.Value[Any]"

_RESHARDS = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
_COLLECTIVES = "func.func(sdy-reshard-to-collectives)"


def partition_module(module: ir.Module, mesh: MeshShape, reductions: tuple[Reduction, ...]) -> None:
    """Turn a planned module into the program of one device, in place.

    Args:
        module: As :func:`autoshard.rewrite.rewrite` leaves it.
        mesh: The mesh.
        reductions: How the plan combines partial results, in the order of the program.

    Raises:
        UnsupportedError: It cannot be done, or not as planned.
    """
    with module.context, ir.Location.unknown():
        state_shardings(module, mesh)
        asked = _count(module, {"sdy.reshard"})
        _run(module, _RESHARDS)
        found = _count(module, {"sdy.reshard"})
        if found != asked:
            raise UnsupportedError(f"Shardy wants {found} reshards, the plan {asked}")
        _run(module, _COLLECTIVES)
        made = _count(module, set(KINDS))
        if made != asked:
            raise UnsupportedError(f"Shardy makes {made} collectives of {asked} single steps")
        global_to_local(module, mesh, reductions)
        if not module.operation.verify():
            raise UnsupportedError("the program of one device is not valid")


def state_shardings(module: ir.Module, mesh: MeshShape) -> None:
    """Turn constraints into what Shardy's passes read: attributes of results, and reshards.

    The first constraint of a value says what its op gives; any other is a step of a reshard.
    """
    constraints = [
        o for o in _operations(main_block(module)) if o.name == "sdy.sharding_constraint"
    ]
    stated: dict[ir.Operation, dict[int, ir.Attribute]] = {}
    known: dict[Value, ir.Attribute] = {}
    for constraint in constraints:
        value, result = constraint.operands[0], constraint.results[0]
        sharding = constraint.attributes["sharding"]
        place = _made_at(value) if value not in known else None
        carried = isinstance(value.owner, ir.Block)  # by a loop, which may also hand it on
        if place is not None and (carried or len(list(value.uses)) == 1):
            maker, position = place
            if maker.name != MANUAL:  # which states it itself
                stated.setdefault(maker, {})[position] = sharding
            result.replace_all_uses_with(value)
            known[value] = sharding
        elif value in known and _same(known[value], sharding, mesh):
            result.replace_all_uses_with(value)
        else:
            made = ir.Operation.create(
                "sdy.reshard",
                results=[value.type],
                operands=[value],
                attributes={"sharding": sharding},
                loc=constraint.location,
                ip=ir.InsertionPoint(constraint),
            )
            result.replace_all_uses_with(made.results[0])
            known[cast(Value, made.results[0])] = sharding
        constraint.erase()
    for maker, positions in stated.items():
        shown = [
            _text(positions[k]) if k in positions else f"<@{_symbol(positions)}, {_whole(value)}>"
            for k, value in enumerate(maker.results)
        ]
        maker.attributes["sdy.sharding"] = ir.Attribute.parse(
            f"#sdy.sharding_per_value<[{', '.join(shown)}]>"
        )


def _made_at(value: Value) -> tuple[ir.Operation, int] | None:
    """The op that states the sharding of a value, and the number of the result."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        around = cast(ir.Operation, owner.owner).operation
        if around.name != "stablehlo.while":
            return None
        return around, ir.BlockArgument(value).arg_number
    return owner.operation, ir.OpResult(value).result_number


def _same(one: ir.Attribute, other: ir.Attribute, mesh: MeshShape) -> bool:
    return read_sharding(one, mesh) == read_sharding(other, mesh)


def _text(sharding: ir.Attribute) -> str:
    return str(sharding).removeprefix("#sdy.sharding")


def _symbol(positions: dict[int, ir.Attribute]) -> str:
    """Name of the mesh that shardings refer to."""
    return _text(next(iter(positions.values()))).partition("@")[2].partition(",")[0]


def _whole(value: Value) -> str:
    rank = ir.RankedTensorType(value.type).rank
    return f"[{', '.join('{}' for _ in replicated(rank))}]"


def _operations(block: ir.Block) -> list[ir.Operation]:
    """The ops of a block and of the loops and conditionals in it, in order."""
    found = []
    for op in block.operations:
        found.append(op.operation)
        if op.operation.name in REGION_OPS:
            for region in op.operation.regions:
                found += _operations(region.blocks[0])
    return found


def _count(module: ir.Module, names: set[str]) -> int:
    return sum(o.name in names for o in _operations(main_block(module)))


def _run(module: ir.Module, pipeline: str) -> None:
    passmanager.PassManager.parse(f"builtin.module({pipeline})").run(module.operation)


def request(mesh: MeshShape, reductions: tuple[Reduction, ...], bytecode: bytes) -> bytes:
    """What the child is asked: a line of JSON, and the module."""
    listed = [(r.groups, r.scattered) for r in reductions]
    return json.dumps([mesh.names, mesh.sizes, listed]).encode() + b"\n" + bytecode


def _answer(message: bytes, context: ir.Context) -> bytes:
    line, _, bytecode = message.partition(b"\n")
    names, sizes, listed = json.loads(line)
    reductions = tuple(Reduction(tuple(map(tuple, groups)), d) for groups, d in listed)
    module = ir.Module.parse(bytecode, context)
    partition_module(module, MeshShape(tuple(names), tuple(sizes)), reductions)
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def _context() -> ir.Context:
    """A context that knows the dialects that JAX lowers to."""
    traced = jax.jit(lambda x: x).trace(jax.ShapeDtypeStruct((), "float32"))
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    assert module is not None
    context: ir.Context = module.context
    return context


def main() -> None:
    """Answer requests until there are no more."""
    shared = _context()
    serve(lambda message: _answer(message, shared))
