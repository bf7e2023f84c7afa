"""Write an op so that each device calls it on its own pieces: inside a manual computation.

XLA's partitioner gathers what it has no rule for. Inside a manual computation over all axes there
is nothing left to partition: the op has local shapes, and partial results are summed by an
all-reduce written after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jax.extend.mlir import ir

from autoshard.collectives_lowering import lower_reduction
from autoshard.emit import Emitter
from autoshard.errors import InputError
from autoshard.grouped import is_grouped, regroup
from autoshard.program import MANUAL, Value, shape_of, source_of, target_of
from autoshard.shardings import MeshShape, Sharding, local_shape

COLLECTIVE_CHANNEL = 1
"""As JAX numbers the first of the collectives of a ``shard_map``."""


def run_piecewise(
    operation: ir.Operation,
    symbol: str,
    mesh: MeshShape,
    operands: Sequence[Sharding],
    results: Sequence[Sharding],
    reduced: Sequence[tuple[str, ...]],
) -> ir.Operation:
    """Replace an op by a manual computation that applies it to each device's pieces.

    Args:
        operation: The op; its operands have the shardings given. It is erased.
        symbol: The name of the module's mesh.
        mesh: That mesh.
        operands: Sharding of each operand.
        results: Sharding of each result.
        reduced: Groups of axes over which the results are summed.

    Returns:
        The manual computation.

    Raises:
        InputError: The op cannot have such pieces.
    """
    axes = ", ".join(f'"{name}"' for name in mesh.names)
    manual = ir.Operation.create(
        MANUAL,
        results=[r.type for r in operation.results],
        operands=list(operation.operands),
        attributes={
            "in_shardings": _per_value(operands, symbol),
            "out_shardings": _per_value(results, symbol),
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
        },
        regions=1,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    inside = [_piece(v, s, mesh) for v, s in zip(operation.operands, operands, strict=True)]
    block = ir.Block.create_at_start(manual.regions[0], inside, [operation.location] * len(inside))
    local = operation.clone(ir.InsertionPoint(block)).operation
    if "sdy.sharding_rule" in local.attributes:
        del local.attributes["sdy.sharding_rule"]
    for position, argument in enumerate(block.arguments):
        local.operands[position] = argument
    for value, sharding in zip(local.results, results, strict=True):
        value.set_type(_piece(value, sharding, mesh))
    if is_grouped(operation):
        local = regroup(local, shape_of(operation.operands[0]))
    with ir.InsertionPoint(block), operation.location:
        end = ir.Operation.create("sdy.return", operands=list(local.results))
    emit = Emitter(mesh, COLLECTIVE_CHANNEL)
    for position, result in enumerate(local.results):
        piece = cast(Value, result)
        for group in reduced:
            piece = lower_reduction(emit, end, piece, group, "stablehlo.add")
        end.operands[position] = piece
    try:
        local.verify()
    except ir.MLIRError as error:
        raise InputError(
            f"{target_of(operation) or operation.name} cannot run on pieces: {error}",
            at=source_of(operation),
            fix="keep the dimensions that its attributes name whole in its rule: '; whole ...'",
        ) from error
    for old, new in zip(operation.results, manual.results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()
    return manual


def _piece(value: Value, sharding: Sharding, mesh: MeshShape) -> ir.Type:
    """The type of one device's piece of a value."""
    whole = ir.RankedTensorType(value.type)
    shape = local_shape(shape_of(value), sharding, mesh)
    return ir.RankedTensorType.get(shape, whole.element_type, whole.encoding)


def _per_value(shardings: Sequence[Sharding], symbol: str) -> ir.Attribute:
    texts = []
    for sharding in shardings:
        dims = ", ".join("{" + ", ".join(f'"{a}"' for a in d) + "}" for d in sharding)
        texts.append(f"<@{symbol}, [{dims}]>")
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(texts)}]>")
