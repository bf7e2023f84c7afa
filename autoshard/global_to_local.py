"""From a module with Shardy's collectives to the program of one device, in place.

Every value gets the type of the piece that a device holds, the few ops that speak of the whole are
adapted (:mod:`autoshard.pieces`, :mod:`autoshard.indexing`), and collectives become StableHLO's
(:mod:`autoshard.collectives_lowering`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autoshard.child import UnsupportedError
from autoshard.collectives_lowering import KINDS, lower_reduction, lower_step
from autoshard.counting import combiner_of
from autoshard.emit import Emitter
from autoshard.indexing import adapt_gather, adapt_scatter
from autoshard.pieces import Pieces, adapt
from autoshard.program import REGION_OPS, TERMINATORS, main_block, shape_of, source_of, terminator
from autoshard.shardings import MeshShape, Sharding, splitting

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
        self.pieces = Pieces(mesh)
        self.reductions = list(reductions)
        channels = [int(n) for n in _CHANNEL.findall(str(module))]
        self.emit = Emitter(mesh, max(channels, default=0) + 1)

    def program(self) -> None:
        function = cast(ir.Operation, self.block.owner).operation
        if "arg_attrs" in function.attributes:
            listed = ir.ArrayAttr(function.attributes["arg_attrs"])
            stated = [_sharding_in(ir.DictAttr(a), self.mesh) for a in listed]
        else:
            stated = [None] * len(self.block.arguments)
        for argument, sharding in zip(self.block.arguments, stated, strict=True):
            self.pieces.place(argument, sharding)
        self._block(self.block)
        if self.reductions:
            raise UnsupportedError(
                f"Shardy combines {len(self.reductions)} partial results fewer than the plan"
            )
        inputs = [a.type for a in self.block.arguments]
        results = [v.type for v in terminator(self.block).operands]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))

    def _block(self, block: ir.Block) -> None:
        operations = [op.operation for op in block.operations]
        for operation, after in itertools.pairwise(operations):
            try:
                self._op(operation, after)
            except UnsupportedError as error:
                source = source_of(operation)
                place = f"{operation.name}{f' at {source}' if source else ''}"
                raise UnsupportedError(f"{place}: {error}") from None

    def _op(self, operation: ir.Operation, after: ir.Operation) -> None:
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
                self.pieces.place(value, sharding)
            if not self.pieces.split(operation):
                return
            if name == "stablehlo.gather":
                adapt_gather(self.pieces, self.emit, operation, after)
            elif name == "stablehlo.scatter":
                adapt_scatter(self.pieces, self.emit, operation)
            else:
                adapt(self.pieces, self.emit, operation, after)

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
            self.pieces.place(value, sharding)
        for region in operation.regions:
            block = region.blocks[0]
            if operation.name == "stablehlo.while":
                for argument, sharding in zip(block.arguments, stated, strict=True):
                    self.pieces.place(argument, sharding)
            self._block(block)

    def _step(self, operation: ir.Operation) -> None:
        value, result = operation.operands[0], operation.results[0]
        target = read_sharding(operation.attributes["out_sharding"], self.mesh)
        source = self.pieces.shardings[value]
        made = value
        if source != target:  # equal where a reduction has scattered its result already
            kind, whole = KINDS[operation.name], self.pieces.shapes[value]
            made = lower_step(self.emit, operation, value, kind, source, target, whole)
        self._replace(operation, result, made, target)

    def _replace(
        self, operation: ir.Operation, result: Value, made: Value, sharding: Sharding
    ) -> None:
        self.pieces.name(made, shape_of(result), sharding)
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
        made, sharding = value, self.pieces.shardings[value]
        if plan.scattered >= 0:
            (group,) = plan.groups
            made = lower_reduction(self.emit, operation, made, group, combiner, plan.scattered)
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
                made = lower_reduction(self.emit, operation, made, group, combiner)
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
            if self.pieces.shardings[operand] != wanted:
                raise UnsupportedError("an operand in another sharding than it prescribes")
            argument.replace_all_uses_with(operand)
        for op in list(body.operations):
            operation = op.operation
            if operation.name in TERMINATORS:
                for result, value, sharding in zip(
                    manual.results, operation.operands, sides[1], strict=True
                ):
                    made = value
                    if value in self.pieces.shapes:  # handed through, or given back twice
                        made = self.emit.create(manual, "reshape", [value], shape_of(value))
                    self.pieces.name(made, shape_of(result), sharding)
                    result.replace_all_uses_with(made)
                continue
            _check_manual(operation)
            operation.move_before(manual)
        manual.erase()


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
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _check_manual(inner.operation)
