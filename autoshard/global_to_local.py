"""From a module with Shardy's collectives to the program of one device, in place.

Every value gets the type of the piece that a device holds. Most ops stay as they are, because a
strategy splits only dimensions along which elements do not meet; the few whose attributes or
values speak of the whole are adapted: constants, iotas, slices, gathers and scatters. Collectives
become StableHLO's (:mod:`autoshard.collectives_lowering`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo

from autoshard.child import UnsupportedError
from autoshard.collectives_lowering import KINDS, Emitter
from autoshard.counting import combiner_of
from autoshard.program import REGION_OPS, TERMINATORS, main_block, source_of, terminator
from autoshard.shardings import MeshShape, Sharding, local_shape, replicated, splitting

Value: TypeAlias = "ir.Value[Any]"


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the partial results of one op are combined, as the plan has it.

    Attributes:
        groups: Mesh axes, one group after another.
        scattered: Dimension over which the result is spread at the end; -1 if it is not.
    """

    groups: tuple[tuple[str, ...], ...]
    scattered: int = -1


def global_to_local(module: ir.Module, mesh: MeshShape, reductions: Sequence[Reduction]) -> None:
    """Turn ``main`` into the program of one device.

    Args:
        module: With a sharding on every value that has one, and all collectives as Shardy's.
        mesh: The mesh.
        reductions: How partial results are combined, in the order of the program.

    Raises:
        UnsupportedError: Something in it cannot be run per device, or is not as the plan has it.
    """
    with module.context, ir.Location.unknown():
        localizer = _Localizer(module, mesh, reductions)
        localizer.program()


def read_sharding(attribute: ir.Attribute, mesh: MeshShape) -> Sharding:
    """The sharding that an attribute states, without axes that split nothing."""
    dims = []
    for dimension in map(
        sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attribute).dimension_shardings
    ):
        axes = [sdy.AxisRefAttr(a) for a in dimension.axes]
        if any(a.sub_axis_info is not None for a in axes):
            raise UnsupportedError("a sharding over part of a mesh axis")
        dims.append(tuple(a.name for a in axes))
    return splitting(tuple(dims), mesh)


_CHANNEL = re.compile(r"handle = (\d+)")
_AXIS = re.compile(r'"([^"]+)"(:?)')
_COLLECTIVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute"),
        *("infeed", "outfeed", "recv", "reduce_scatter", "rng", "send", "partition_id"),
    )
)
"""Ops that only a program written for single devices contains, or that differ between devices."""


class _Localizer:
    def __init__(self, module: ir.Module, mesh: MeshShape, reductions: Sequence[Reduction]) -> None:
        self.block = main_block(module)
        self.mesh = mesh
        self.reductions = list(reductions)
        channels = [int(n) for n in _CHANNEL.findall(str(module))]
        self.emit = Emitter(mesh, max(channels, default=0) + 1)
        self.shardings: dict[Value, Sharding] = {}
        self.shapes: dict[Value, tuple[int, ...]] = {}  # of the whole
        self.after = self.block.operations[0].operation  # the op that follows the one adapted

    def program(self) -> None:
        function = cast(ir.Operation, self.block.owner).operation
        if "arg_attrs" in function.attributes:
            listed = ir.ArrayAttr(function.attributes["arg_attrs"])
            stated = [_sharding_in(ir.DictAttr(a), self.mesh) for a in listed]
        else:
            stated = [None] * len(self.block.arguments)
        for argument, sharding in zip(self.block.arguments, stated, strict=True):
            self._place(argument, sharding)
        self._block(self.block)
        if self.reductions:
            raise UnsupportedError(
                f"Shardy combines {len(self.reductions)} partial results fewer than the plan"
            )
        inputs = [a.type for a in self.block.arguments]
        results = [v.type for v in terminator(self.block).operands]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))

    def _place(self, value: Value, sharding: Sharding | None) -> None:
        """Give a value the type of a device's piece of it."""
        if not isinstance(value.type, ir.RankedTensorType):
            raise UnsupportedError(f"a value of type {value.type}")
        type_ = ir.RankedTensorType(value.type)
        shape = tuple(type_.shape)
        self.shapes[value] = shape
        self.shardings[value] = sharding if sharding is not None else replicated(len(shape))
        if any(self.shardings[value]):
            piece = local_shape(shape, self.shardings[value], self.mesh)
            value.set_type(ir.RankedTensorType.get(list(piece), type_.element_type))

    def _block(self, block: ir.Block) -> None:
        operations = [op.operation for op in block.operations]
        for operation, after in itertools.pairwise(operations):
            self.after = after
            try:
                self._op(operation)
            except UnsupportedError as error:
                source = source_of(operation)
                place = f"{operation.name}{f' at {source}' if source else ''}"
                raise UnsupportedError(f"{place}: {error}") from None

    def _op(self, operation: ir.Operation) -> None:
        name = operation.name
        if name in KINDS:
            self._step(operation)
        elif name in ("sdy.all_reduce", "sdy.reduce_scatter"):
            self._reduce(operation)
        elif name == "sdy.manual_computation":
            self._inline(operation)
        elif not name.startswith(("stablehlo.", "chlo.")) or name in _COLLECTIVES:
            raise UnsupportedError("no per-device form is known of it")
        else:
            stated = self._stated(operation)
            _check_effects(operation)
            if name in REGION_OPS:
                self._regions(operation, stated)
                return
            for value, sharding in zip(operation.results, stated, strict=True):
                self._place(value, sharding)
            self._adapt(operation)

    def _stated(self, operation: ir.Operation) -> list[Sharding | None]:
        """The shardings that an op states of its results; the attribute is taken off."""
        if "sdy.sharding" not in operation.attributes:
            return [None] * len(operation.results)
        per_value = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"])
        read = [read_sharding(s, self.mesh) for s in per_value.shardings]
        del operation.attributes["sdy.sharding"]
        return [*read]

    def _regions(self, operation: ir.Operation, stated: list[Sharding | None]) -> None:
        for value, sharding in zip(operation.results, stated, strict=True):
            self._place(value, sharding)
        for region in operation.regions:
            block = region.blocks[0]
            if operation.name == "stablehlo.while":
                for argument, sharding in zip(block.arguments, stated, strict=True):
                    self._place(argument, sharding)
            self._block(block)

    def _step(self, operation: ir.Operation) -> None:
        value, result = operation.operands[0], operation.results[0]
        target = read_sharding(operation.attributes["out_sharding"], self.mesh)
        source = self.shardings[value]
        made = value
        if source != target:  # equal where a reduction has scattered its result already
            kind, whole = KINDS[operation.name], self.shapes[value]
            made = self.emit.step(operation, value, kind, source, target, whole)
        self._replace(operation, result, made, target)

    def _replace(
        self, operation: ir.Operation, result: Value, made: Value, sharding: Sharding
    ) -> None:
        self.shapes[made] = tuple(ir.RankedTensorType(result.type).shape)
        self.shardings[made] = sharding
        result.replace_all_uses_with(made)
        operation.erase()

    def _reduce(self, operation: ir.Operation) -> None:
        value, result = operation.operands[0], operation.results[0]
        if operation.name != "sdy.all_reduce":
            raise UnsupportedError("Shardy scatters a result that the plan wants whole")
        named = _AXIS.findall(str(operation.attributes["reduction_axes"]))
        axes = tuple(n for n, _ in named)
        plan = self.reductions.pop(0) if self.reductions else Reduction(())
        if sorted(axes) != sorted(a for group in plan.groups for a in group) or any(
            part for _, part in named
        ):
            raise UnsupportedError(f"Shardy combines over {axes}, the plan over {plan.groups}")
        combiner = _combiner(value)
        made, sharding = value, self.shardings[value]
        if plan.scattered >= 0:
            (group,) = plan.groups
            made = self.emit.reduce(operation, made, group, combiner, plan.scattered)
            dims = range(len(sharding))
            sharding = tuple(
                (*sharding[d], *group) if d == plan.scattered else sharding[d] for d in dims
            )
            for use in result.uses:
                reader = use.owner.operation
                if reader.name != "sdy.all_slice" or sharding != read_sharding(
                    reader.attributes["out_sharding"], self.mesh
                ):
                    raise UnsupportedError("a scattered result is read whole")
        else:
            for group in plan.groups:
                made = self.emit.reduce(operation, made, group, combiner)
        self._replace(operation, result, made, sharding)

    def _inline(self, manual: ir.Operation) -> None:
        """The body of a ``shard_map`` is a device's program already."""
        listed = sdy.ManualAxesAttr(manual.attributes["manual_axes"])
        named = _AXIS.findall(str(listed))
        free = set(self.mesh.names) - {n for n, _ in named}
        sides = []
        for side in ("in_shardings", "out_shardings"):
            per_value = sdy.TensorShardingPerValueAttr(manual.attributes[side])
            sides.append([read_sharding(s, self.mesh) for s in per_value.shardings])
        if any(a in free for side in sides for s in side for dim in s for a in dim):
            raise UnsupportedError(f"a shard_map that leaves {sorted(free)} to the compiler")
        body = manual.regions[0].blocks[0]
        for operand, argument, wanted in zip(
            manual.operands, body.arguments, sides[0], strict=True
        ):
            if self.shardings[operand] != wanted:
                raise UnsupportedError("an operand in another sharding than it prescribes")
            argument.replace_all_uses_with(operand)
        for op in list(body.operations):
            operation = op.operation
            if operation.name in TERMINATORS:
                for result, value, sharding in zip(
                    manual.results, operation.operands, sides[1], strict=True
                ):
                    self.shapes[value] = tuple(ir.RankedTensorType(result.type).shape)
                    self.shardings[value] = sharding
                    result.replace_all_uses_with(value)
                continue
            _check_manual(operation)
            operation.move_before(manual)
        manual.erase()

    def _adapt(self, operation: ir.Operation) -> None:
        """What of an op speaks of the whole and must speak of the piece."""
        name = operation.name.partition(".")[2]
        tensors = (*operation.operands, *operation.results)
        if not any(any(self.shardings[v]) for v in tensors):
            return
        if operation.name == "stablehlo.composite":
            raise UnsupportedError("a composite op whose operands are split")
        results = operation.results
        split = self._split(operation)
        if name == "constant":
            self._constant(operation, results[0])
        elif name == "iota":
            self._iota(operation, results[0])
        elif name == "slice":
            self._whole_or(operation, split, "limit_indices")
        elif name == "dynamic_slice":
            self._whole_or(operation, split, "slice_sizes")
        elif name == "gather":
            self._gather(operation)
        elif name == "scatter":
            self._scatter(operation)
        elif name in ("dot_general", "reduce"):
            self._mask(operation)
        else:
            meeting = _meeting(operation, self.shapes) & split
            if meeting:
                raise UnsupportedError(
                    f"elements meet along dimension {min(meeting)}, which is split"
                )

    def _split(self, operation: ir.Operation) -> set[int]:
        """Dimensions along which an operand or result is split."""
        tensors = (*operation.operands, *operation.results)
        return {d for v in tensors for d, axes in enumerate(self.shardings[v]) if axes}

    def _constant(self, operation: ir.Operation, result: Value) -> None:
        value = ir.DenseElementsAttr(operation.attributes["value"])
        piece = ir.RankedTensorType(result.type)
        if value.is_splat:
            operation.attributes["value"] = ir.DenseElementsAttr.get_splat(
                piece, value.get_splat_value()
            )
            return
        sharding = self.shardings[result]
        result.set_type(ir.RankedTensorType.get(list(self.shapes[result]), piece.element_type))
        after, readers = self.after, _readers(result)
        split = {d: axes for d, axes in enumerate(sharding) if axes}
        padded = result
        for d, axes in split.items():
            padded = self.emit.padded(after, padded, d, piece.shape[d] * self.mesh.size(axes))
        made = self.emit.piece(after, padded, split)
        self._stand_in(readers, result, made)

    def _iota(self, operation: ir.Operation, result: Value) -> None:
        dim = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
        axes = self.shardings[result][dim]
        if not axes:
            return
        type_ = ir.RankedTensorType(result.type)
        shape = tuple(type_.shape)
        after, readers = self.after, _readers(result)
        start = self.emit.offset(after, axes, shape[dim])
        start = self.emit.create(after, "convert", [start], (), type_.element_type)
        start = self.emit.spread(after, start, shape, ())
        made = self.emit.create(after, "add", [result, start], shape)
        self._stand_in(readers, result, made)

    def _stand_in(
        self, readers: list[tuple[ir.Operation, int]], result: Value, made: Value
    ) -> None:
        """Have ``readers``, the operands that read an op's result so far, read ``made``."""
        for reader, position in readers:
            reader.operands[position] = made
        self.shapes[made], self.shardings[made] = self.shapes[result], self.shardings[result]

    def _whole_or(self, operation: ir.Operation, split: set[int], sizes: str) -> None:
        """Slices take all of a dimension that is split: on a device, all of its piece."""
        given = list(ir.DenseI64ArrayAttr(operation.attributes[sizes]))
        whole, out = (self.shapes[v] for v in (operation.operands[0], operation.results[0]))
        piece = ir.RankedTensorType(operation.results[0].type).shape
        for d in split:
            if whole[d] != out[d]:
                raise UnsupportedError(f"it takes a part of dimension {d}, which is split")
            given[d] = piece[d]
        operation.attributes[sizes] = ir.DenseI64ArrayAttr.get(given)

    def _mask(self, operation: ir.Operation) -> None:
        """Keep the padding of a dimension that is summed out of the sum."""
        if operation.name == "stablehlo.reduce":
            summed = set(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
            sides = [summed] * len(operation.results)
            starts = list(operation.operands)[len(sides) :]
        else:
            numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
            sides = [
                set(numbers.lhs_contracting_dimensions),
                set(numbers.rhs_contracting_dimensions),
            ]
            starts = []
        for k, dims in enumerate(sides):
            value = operation.operands[k]
            sharding, whole = self.shardings[value], self.shapes[value]
            for d in sorted(dims):
                if whole[d] % self.mesh.size(sharding[d]):
                    element = ir.RankedTensorType(value.type).element_type
                    start = starts[k] if starts else self.emit.constant(operation, element, 0)
                    value = self.emit.masked(operation, value, start, d, sharding[d], whole[d])
                    operation.operands[k] = value

    def _gather(self, operation: ir.Operation) -> None:
        source, indices = operation.operands
        result = operation.results[0]
        numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        sizes = list(ir.DenseI64ArrayAttr(operation.attributes["slice_sizes"]))
        batching = set(numbers.operand_batching_dims)
        piece = ir.RankedTensorType(source.type).shape
        indexed = []
        for d, axes in enumerate(self.shardings[source]):
            if not axes or d in batching:
                continue
            if d not in numbers.start_index_map or sizes[d] == self.shapes[source][d]:
                if sizes[d] != self.shapes[source][d]:
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
        highest = {columns.index(d): self.shapes[source][d] - 1 for d in indexed}
        places, inside = self._shifted(
            operation, indices, vector, {columns.index(d): d for d in indexed}, source, highest
        )
        operation.operands[1] = places
        shape = tuple(ir.RankedTensorType(result.type).shape)
        after, readers = self.after, _readers(result)
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        mask = self.emit.spread(after, inside, shape, batch)
        element = ir.RankedTensorType(result.type).element_type
        zero = self.emit.constant(after, element, 0, shape)
        made = self.emit.create(after, "select", [mask, result, zero], shape, element)
        self._stand_in(readers, result, made)

    def _scatter(self, operation: ir.Operation) -> None:
        if len(operation.results) != 1:
            raise UnsupportedError("it scatters into several arrays")
        target, indices, updates = operation.operands
        numbers = stablehlo.ScatterDimensionNumbers(
            operation.attributes["scatter_dimension_numbers"]
        )
        columns = list(numbers.scattered_dims_to_operand_dims)
        batching = set(numbers.input_batching_dims)
        inserted = set(numbers.inserted_window_dims)
        windows = [d for d in range(len(self.shapes[target])) if d not in inserted | batching]
        window = dict(zip(windows, numbers.update_window_dims, strict=True))
        moved = {}
        for d, axes in enumerate(self.shardings[target]):
            if not axes or d in batching:
                continue
            if d in inserted:
                moved[columns.index(d)] = d
            elif self.shapes[updates][window[d]] != self.shapes[target][d]:
                raise UnsupportedError(f"its windows may cross devices in dimension {d}")
        if moved:
            places, _ = self._shifted(
                operation, indices, numbers.index_vector_dim, moved, target, None
            )
            operation.operands[1] = places
            operation.attributes["indices_are_sorted"] = ir.BoolAttr.get(False)
        listed = [
            axes
            for d, axes in enumerate(self.shardings[updates])
            if d not in numbers.update_window_dims and axes
        ]
        used = {a for axes in self.shardings[target] for a in axes}
        summed = tuple(a for axes in listed for a in axes if a not in used)
        combiner = combiner_of(operation)
        if summed and combiner not in _MAY_START_OFTEN:
            operation.operands[0] = self._started_once(operation, target, summed, combiner)

    def _started_once(
        self, operation: ir.Operation, target: Value, axes: tuple[str, ...], combiner: str
    ) -> Value:
        """``target`` on the first device along ``axes``, and what adds nothing on the others."""
        if combiner not in _NEUTRAL:
            raise UnsupportedError(f"partial results of {combiner}")
        type_ = ir.RankedTensorType(target.type)
        shape = tuple(type_.shape)
        place = self.emit.offset(operation, axes, 1)
        first = self.emit.constant(operation, ir.IntegerType.get_signless(32), 0)
        here = self.emit.compare(operation, "EQ", place, first)
        mask = self.emit.spread(operation, here, shape, ())
        nothing = self.emit.constant(operation, type_.element_type, _NEUTRAL[combiner], shape)
        return self.emit.create(
            operation, "select", [mask, target, nothing], shape, type_.element_type
        )

    def _shifted(
        self,
        operation: ir.Operation,
        indices: Value,
        vector: int,
        columns: dict[int, int],
        source: Value,
        highest: dict[int, int] | None,
    ) -> tuple[Value, Value]:
        """Indices into a device's piece, and which of them fall into it.

        Args:
            operation: The gather or scatter.
            indices: Of the whole.
            vector: The dimension of ``indices`` that holds the components of one index.
            columns: Component -> dimension of ``source`` that is split.
            source: What is indexed.
            highest: Largest index of each component, to which it is clamped; None: no clamping.
        """
        emit = self.emit
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
                start = emit.offset(operation, self.shardings[source][dim], size)
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
            operation, "concatenate", parts, shape, attributes={"dimension": _i64(vector)}
        )
        return joined, inside if inside is not None else joined


_MAY_START_OFTEN = frozenset(
    {"stablehlo.maximum", "stablehlo.minimum", "stablehlo.and", "stablehlo.or"}
)
_NEUTRAL = {"stablehlo.add": 0}
"""Combiners of which something is neutral that has to stand in for all devices but one."""


def _combiner(value: Value) -> str:
    """The op that combines the partial results ``value``."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return "stablehlo.add"
    if owner.name == "stablehlo.reduce" or owner.name == "stablehlo.scatter":
        return combiner_of(owner.operation)
    is_bool = str(ir.RankedTensorType(value.type).element_type) == "i1"
    return "stablehlo.or" if is_bool else "stablehlo.add"


def _sharding_in(attributes: ir.DictAttr, mesh: MeshShape) -> Sharding | None:
    return read_sharding(attributes["sdy.sharding"], mesh) if "sdy.sharding" in attributes else None


def _readers(value: Value) -> list[tuple[ir.Operation, int]]:
    return [(use.owner.operation, use.operand_number) for use in value.uses]


def _i64(number: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def _check_effects(operation: ir.Operation) -> None:
    """Refuse what would happen once per device instead of once."""
    if operation.name != "stablehlo.custom_call":
        return
    target = str(ir.StringAttr(operation.attributes["call_target_name"]).value)
    effect = "has_side_effect" in operation.attributes and bool(
        ir.BoolAttr(operation.attributes["has_side_effect"]).value
    )
    if effect or "callback" in target:
        raise UnsupportedError(f"the call of {target} would run once per device")


def _check_manual(operation: ir.Operation) -> None:
    """Refuse what a ``shard_map``'s body leaves to a partitioner."""
    if operation.name.startswith("sdy.") and operation.name not in TERMINATORS:
        raise UnsupportedError(f"{operation.name} inside a shard_map")
    _check_effects(operation)
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _check_manual(inner.operation)


def _meeting(operation: ir.Operation, shapes: dict[Value, tuple[int, ...]]) -> set[int]:
    """Dimensions along which an element of the result depends on several of an operand."""
    name = operation.name.partition(".")[2]
    rank = len(shapes[operation.operands[0]]) if len(operation.operands) else 0
    if name in ("sort", "concatenate"):
        return {ir.IntegerAttr(operation.attributes["dimension"]).value % rank}
    if name == "top_k":
        return {rank - 1}
    if name in ("cholesky", "triangular_solve"):
        return {rank - 2, rank - 1}
    if name == "reverse":
        return set(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))
    if name == "fft":
        count = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
        return set(range(rank - count, rank))
    if name in ("reduce_window", "select_and_scatter"):
        sizes = ir.DenseI64ArrayAttr(operation.attributes["window_dimensions"])
        return {d for d, size in enumerate(sizes) if size != 1} | _resized(operation, shapes)
    if name in ("pad", "dynamic_update_slice"):
        return _resized(operation, shapes)
    return set(range(rank)) if name in ("rng", "rng_bit_generator") else set()


def _resized(operation: ir.Operation, shapes: dict[Value, tuple[int, ...]]) -> set[int]:
    """Dimensions of another size in the result, or the update, than in the operand."""
    other = operation.operands[1] if "update" in operation.name else operation.results[0]
    pairs = zip(shapes[operation.operands[0]], shapes[other], strict=True)
    return {d for d, (one, two) in enumerate(pairs) if one != two}
