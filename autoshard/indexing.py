"""Gathers and scatters on one device's pieces.

Where a dimension that is indexed is split, each device looks up, or updates, what falls into its
piece: indices are counted from where the piece starts, and all others are out of bounds there.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.child import UnsupportedError
from autoshard.counting import combiner_of
from autoshard.emit import Emitter, i64
from autoshard.pieces import Pieces, readers_of

Value: TypeAlias = "ir.Value[Any]"

_MAY_START_OFTEN = frozenset(
    {"stablehlo.maximum", "stablehlo.minimum", "stablehlo.and", "stablehlo.or"}
)
_NEUTRAL = {"stablehlo.add": 0}
"""Combiners of which something is neutral that has to stand in for all devices but one."""


def adapt_gather(
    pieces: Pieces, emit: Emitter, operation: ir.Operation, after: ir.Operation
) -> None:
    """Have a gather look up what falls into the device's piece, and give zero for all else.

    Args:
        pieces: Its operands and result among them.
        emit: Writes further ops.
        operation: The gather.
        after: The op that follows it.

    Raises:
        UnsupportedError: A slice may reach into another device's piece.
    """
    source, indices = operation.operands
    result = operation.results[0]
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    sizes = list(ir.DenseI64ArrayAttr(operation.attributes["slice_sizes"]))
    batching = set(numbers.operand_batching_dims)
    piece = ir.RankedTensorType(source.type).shape
    indexed = []
    for d, axes in enumerate(pieces.shardings[source]):
        if not axes or d in batching:
            continue
        if d not in numbers.start_index_map or sizes[d] == pieces.shapes[source][d]:
            if sizes[d] != pieces.shapes[source][d]:
                raise UnsupportedError(f"it takes a part of dimension {d}, which is split")
            sizes[d] = piece[d]
        elif sizes[d] == 1 and d in numbers.collapsed_slice_dims:
            indexed.append(d)
        else:
            raise UnsupportedError(f"its slices may cross devices in dimension {d}")
    operation.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)
    if not indexed:
        return
    columns = list(numbers.start_index_map)
    vector = numbers.index_vector_dim
    highest = {columns.index(d): pieces.shapes[source][d] - 1 for d in indexed}
    places, inside = _shifted(
        pieces,
        emit,
        operation,
        indices,
        vector,
        {columns.index(d): d for d in indexed},
        source,
        highest,
    )
    operation.operands[1] = places
    shape = tuple(ir.RankedTensorType(result.type).shape)
    readers = readers_of(result)
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    mask = emit.spread(after, inside, shape, batch)
    element = ir.RankedTensorType(result.type).element_type
    zero = emit.constant(after, element, 0, shape)
    made = emit.create(after, "select", [mask, result, zero], shape, element)
    pieces.stand_in(readers, result, made)


def adapt_scatter(pieces: Pieces, emit: Emitter, operation: ir.Operation) -> None:
    """Have a scatter update what falls into the device's piece.

    Where devices hold parts of the updates, all but the first start from what changes no sum.

    Args:
        pieces: Its operands and result among them.
        emit: Writes further ops.
        operation: The scatter.

    Raises:
        UnsupportedError: A window may reach into another device's piece.
    """
    if len(operation.results) != 1:
        raise UnsupportedError("it scatters into several arrays")
    target, indices, updates = operation.operands
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    columns = list(numbers.scattered_dims_to_operand_dims)
    batching = set(numbers.input_batching_dims)
    inserted = set(numbers.inserted_window_dims)
    windows = [d for d in range(len(pieces.shapes[target])) if d not in inserted | batching]
    window = dict(zip(windows, numbers.update_window_dims, strict=True))
    moved = {}
    for d, axes in enumerate(pieces.shardings[target]):
        if not axes or d in batching:
            continue
        if d in inserted:
            moved[columns.index(d)] = d
        elif pieces.shapes[updates][window[d]] != pieces.shapes[target][d]:
            raise UnsupportedError(f"its windows may cross devices in dimension {d}")
    if moved:
        places, _ = _shifted(
            pieces, emit, operation, indices, numbers.index_vector_dim, moved, target, None
        )
        operation.operands[1] = places
        operation.attributes["indices_are_sorted"] = ir.BoolAttr.get(False)
    listed = [
        axes
        for d, axes in enumerate(pieces.shardings[updates])
        if d not in numbers.update_window_dims and axes
    ]
    used = {a for axes in pieces.shardings[target] for a in axes}
    summed = tuple(a for axes in listed for a in axes if a not in used)
    combiner = combiner_of(operation)
    if summed and combiner not in _MAY_START_OFTEN:
        operation.operands[0] = _started_once(emit, operation, target, summed, combiner)


def _started_once(
    emit: Emitter, operation: ir.Operation, target: Value, axes: tuple[str, ...], combiner: str
) -> Value:
    """``target`` on the first device along ``axes``, and what adds nothing on the others."""
    if combiner not in _NEUTRAL:
        raise UnsupportedError(f"partial results of {combiner}")
    type_ = ir.RankedTensorType(target.type)
    shape = tuple(type_.shape)
    place = emit.offset(operation, axes, 1)
    first = emit.constant(operation, ir.IntegerType.get_signless(32), 0)
    here = emit.compare(operation, "EQ", place, first)
    mask = emit.spread(operation, here, shape, ())
    nothing = emit.constant(operation, type_.element_type, _NEUTRAL[combiner], shape)
    return emit.create(operation, "select", [mask, target, nothing], shape, type_.element_type)


def _shifted(
    pieces: Pieces,
    emit: Emitter,
    operation: ir.Operation,
    indices: Value,
    vector: int,
    columns: dict[int, int],
    source: Value,
    highest: dict[int, int] | None,
) -> tuple[Value, Value]:
    """Indices into a device's piece, and which of them fall into it.

    Args:
        pieces: Its operands among them.
        emit: Writes further ops.
        operation: The gather or scatter.
        indices: Of the whole.
        vector: The dimension of ``indices`` that holds the components of one index.
        columns: Component -> dimension of ``source`` that is split.
        source: What is indexed.
        highest: Largest index of each component, to which it is clamped; None: no clamping.
    """
    element = ir.RankedTensorType(indices.type).element_type
    if ir.IntegerType(element).width < 32:  # an offset might not fit
        element = ir.IntegerType.get_signless(32)
        shape = ir.RankedTensorType(indices.type).shape
        indices = emit.create(operation, "convert", [indices], shape, element)
    shape = list(ir.RankedTensorType(indices.type).shape)
    if vector == len(shape):
        shape.append(1)
        indices = emit.create(operation, "reshape", [indices], shape)
    flat = [n for d, n in enumerate(shape) if d != vector]
    across = [d for d in range(len(shape)) if d != vector]
    parts, inside = [], None
    for k in range(shape[vector]):
        part = emit.section(operation, indices, vector, k, k + 1)
        part = emit.create(operation, "reshape", [part], flat)
        if k in columns:
            dim = columns[k]
            size = int(ir.RankedTensorType(source.type).shape[dim])
            if highest is not None:
                least, most = (emit.constant(operation, element, n) for n in (0, highest[k]))
                part = emit.create(operation, "clamp", [least, part, most], flat, element)
            start = emit.offset(operation, pieces.shardings[source][dim], size)
            start = emit.create(operation, "convert", [start], (), element)
            start = emit.spread(operation, start, flat, ())
            part = emit.create(operation, "subtract", [part, start], flat)
            if highest is not None:
                zero, end = (emit.constant(operation, element, n, flat) for n in (0, size))
                truth = ir.IntegerType.get_signless(1)
                for how, bound in (("GE", zero), ("LT", end)):
                    fits = emit.compare(operation, how, part, bound)
                    inside = (
                        fits
                        if inside is None
                        else emit.create(operation, "and", [inside, fits], flat, truth)
                    )
        column = [1 if d == vector else n for d, n in enumerate(shape)]
        parts.append(emit.spread(operation, part, column, across))
    joined = emit.create(
        operation, "concatenate", parts, shape, attributes={"dimension": i64(vector)}
    )
    return joined, inside if inside is not None else joined
