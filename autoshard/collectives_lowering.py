"""From collectives between shardings to the collectives of one device's program.

Shardy writes a collective as the sharding that its result has (``sdy.all_gather`` ...). XLA takes
StableHLO collectives: lists of devices that exchange pieces. Devices are numbered as in the mesh,
row-major, which is how ``jit`` numbers partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.extend.mlir import ir

from autoshard.child import UnsupportedError
from autoshard.emit import Emitter, i64, position
from autoshard.local import step_of
from autoshard.program import shape_of
from autoshard.shardings import MeshShape, Sharding, local_shape

Value: TypeAlias = "ir.Value[Any]"

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_slice": "slice",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "permute",
}
"""Shardy's ops that move one tensor between shardings, and the step that each must be."""


def replica_groups(mesh: MeshShape, axes: Sequence[str]) -> list[list[int]]:
    """The groups of devices that differ along ``axes`` only, each in the order of ``axes``.

    Examples:
        >>> replica_groups(MeshShape(("x", "y"), (2, 2)), ("x",))
        [[0, 2], [1, 3]]
    """
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    moved = [mesh.names.index(a) for a in axes]
    rest = [d for d in range(len(mesh.sizes)) if d not in moved]
    groups: list[list[int]] = ids.transpose(*rest, *moved).reshape(-1, mesh.size(axes)).tolist()
    return groups


def permutation(mesh: MeshShape, source: Sharding, target: Sharding) -> list[tuple[int, int]]:
    """Pairs (sender, receiver) after which every device has its piece under ``target``.

    A device that has its piece already keeps it.

    Examples:
        >>> permutation(MeshShape(("x", "y"), (2, 2)), (("x",),), (("y",),))
        [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    have, want = _pieces(mesh, source), _pieces(mesh, target)
    pairs = {d: d for d in range(mesh.devices) if have[d] == want[d]}
    senders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, piece in enumerate(have):
        if device not in pairs:
            senders[piece].append(device)
    for device, piece in enumerate(want):
        if device not in pairs:
            pairs[device] = senders[piece].pop(0)
    return [(pairs[d], d) for d in range(mesh.devices)]


def _pieces(mesh: MeshShape, sharding: Sharding) -> list[tuple[int, ...]]:
    """Per device, which piece along each dimension it holds."""
    return [
        tuple(position(mesh, device, axes) for axes in sharding) for device in range(mesh.devices)
    ]


def lower_step(
    emit: Emitter,
    before: ir.Operation,
    value: Value,
    kind: str,
    source: Sharding,
    target: Sharding,
    whole: Sequence[int],
) -> Value:
    """One single step of a reshard; pieces that their axes do not divide are padded.

    Args:
        emit: Writes it.
        before: What it is written before.
        value: The device's piece under ``source``.
        kind: What Shardy makes of the step.
        source: Sharding before.
        target: Sharding after.
        whole: Shape of the whole tensor.

    Raises:
        UnsupportedError: The shardings are not one step of that kind apart.
    """
    step, axes, dim = step_of(source, target)
    if step != kind:
        raise UnsupportedError(f"Shardy makes a {kind} of the step {source} -> {target}")
    count = emit.mesh.size(axes)
    after = local_shape(tuple(whole), target, emit.mesh)
    if kind == "permute":
        pairs = permutation(emit.mesh, source, target)
        attributes = {"source_target_pairs": _integers(pairs)}
        return _collective(emit, before, "collective_permute", value, shape_of(value), attributes)
    if kind != "all_gather":  # ``dim`` grows more axes
        value = emit.padded(before, value, dim, after[dim] * count)
    if kind == "slice":
        return emit.piece(before, value, {dim: axes})
    shape = list(shape_of(value))
    attributes = {"replica_groups": _integers(replica_groups(emit.mesh, axes))}
    if kind == "all_gather":
        shape[dim] *= count
        attributes |= {"all_gather_dim": i64(dim), "use_global_device_ids": ir.UnitAttr.get()}
        made = _collective(emit, before, "all_gather", value, shape, attributes)
        return emit.cropped(before, made, dim, after[dim])
    (shrunk,) = (d for d, (s, t) in enumerate(zip(source, target, strict=True)) if len(t) < len(s))
    shape[shrunk] *= count
    shape[dim] //= count
    attributes |= {
        "split_dimension": i64(dim),
        "concat_dimension": i64(shrunk),
        "split_count": i64(count),
    }
    made = _collective(emit, before, "all_to_all", value, shape, attributes)
    return emit.cropped(before, made, shrunk, after[shrunk])


def lower_reduction(
    emit: Emitter,
    before: ir.Operation,
    value: Value,
    axes: Sequence[str],
    combiner: str,
    dim: int = -1,
) -> Value:
    """Combine partial results over ``axes``; with ``dim``, every device keeps its piece."""
    shape = list(shape_of(value))
    attributes: dict[str, ir.Attribute] = {
        "replica_groups": _integers(replica_groups(emit.mesh, axes)),
        "use_global_device_ids": ir.UnitAttr.get(),
    }
    name = "all_reduce"
    if dim >= 0:
        name = "reduce_scatter"
        shape[dim] //= emit.mesh.size(axes)
        attributes["scatter_dimension"] = i64(dim)
    made = _collective(emit, before, name, value, shape, attributes, regions=1)
    element = ir.RankedTensorType.get([], ir.RankedTensorType(value.type).element_type)
    location = before.location
    region = cast(ir.Operation, made.owner).regions[0]
    body = region.blocks.append(element, element, arg_locs=[location] * 2)
    with ir.InsertionPoint(body):
        combined = ir.Operation.create(
            combiner, results=[element], operands=list(body.arguments), loc=location
        )
        ir.Operation.create("stablehlo.return", operands=[combined.results[0]], loc=location)
    return made


def _collective(
    emit: Emitter,
    before: ir.Operation,
    name: str,
    value: Value,
    shape: Sequence[int],
    attributes: dict[str, ir.Attribute],
    regions: int = 0,
) -> Value:
    handle = f"#stablehlo.channel_handle<handle = {next(emit.channels)}, type = 1>"
    attributes["channel_handle"] = ir.Attribute.parse(handle)
    element = ir.RankedTensorType(value.type).element_type
    return emit.op(before, name, [value], shape, element, attributes, regions)


def _integers(rows: Sequence[Sequence[int]]) -> ir.Attribute:
    text = f"dense<{[list(row) for row in rows]}> : tensor<{len(rows)}x{len(rows[0])}xi64>"
    return ir.Attribute.parse(text)
