"""From a normalized module to a graph: MLIR values to ids, rules from Shardy, regions to reads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy

from autoshard.counting import combiner_of, flops_of, trip_count
from autoshard.errors import InputError
from autoshard.graph import ALIASES, FactorKind, Graph, Op, Rule, Tensor
from autoshard.grouped import is_grouped
from autoshard.program import (
    MANUAL,
    MATERIALS,
    MAX_FREE_DEPTH,
    REGION_OPS,
    Boundary,
    Value,
    arrays,
    is_token,
    main_block,
    shape_of,
    source_of,
    target_of,
    terminator,
    walk,
)
from autoshard.rules import rule_for
from autoshard.shardings import MeshShape, Sharding, loosened, splitting, to_partition_spec
from autoshard.traps import BEYOND_RULES, whole_factors
from autoshard.windows import window_of
from autoshard.written import collective_of

_BARRIER = "stablehlo.optimization_barrier"

_BITS = {"i1": 8, "complex<f32>": 64, "complex<f64>": 128, "tf32": 32, "index": 64}


def extract(
    module: ir.Module,
    mesh: MeshShape,
    arguments: Sequence[Boundary],
    results: Sequence[Boundary],
    ties: Sequence[tuple[int, int]] = (),
) -> Graph:
    """Read a normalized module into a graph; sharding rules are added to the module on the way.

    Args:
        module: As :func:`autoshard.program.normalize` leaves it.
        mesh: The mesh that shardings inside the program refer to.
        arguments: The caller's view of each argument of ``main``.
        results: The caller's view of each result of ``main``.
        ties: Pairs (argument position, result position) that share a buffer.

    Raises:
        InputError: The program prescribes a sharding on other axes than the mesh has.
    """
    with module.context:
        add_rules(module)
        reader = _Reader(mesh, _single_devices(module))
        return reader.read(main_block(module), tuple(arguments), tuple(results), tuple(ties))


def add_rules(module: ir.Module) -> None:
    """Have Shardy put its sharding rule on every op that has one."""
    passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(
        module.operation
    )


class _Reader:
    """The walk: MLIR values to ids, regions to returned values, loops to trip counts."""

    def __init__(self, mesh: MeshShape, single_devices: frozenset[str]) -> None:
        self.mesh, self.single_devices = mesh, single_devices
        self.values: list[Tensor] = []
        self.ids: dict[Value, int] = {}
        self.depth: dict[int, int] = {}  # free values: length of the chain to a constant
        self.types: dict[ir.Type, tuple[tuple[int, ...], str, int]] = {}
        self.rules: dict[tuple[ir.Attribute, str], Rule] = {}
        self.ops: list[Op] = []
        self.unknown: list[int] = []
        self.loosened: list[str] = []
        self.trips: dict[int, int] = {-1: 1}

    def read(
        self,
        block: ir.Block,
        arguments: tuple[Boundary, ...],
        results: tuple[Boundary, ...],
        ties: tuple[tuple[int, int], ...],
    ) -> Graph:
        argument_ids = tuple(
            self._value(a, -1, position) for position, a in enumerate(arrays(block.arguments))
        )
        for token in (a for a in block.arguments if is_token(a)):
            self._value(token, -1, -1)
        operations = list(walk(block))
        for index, (parent, region, operation) in enumerate(operations):
            self._op(index, parent, region, operation)
        ops = tuple(self._with_returned(op, operations[op.index][2]) for op in self.ops)
        if any(op.name == _BARRIER for op in ops):
            self._find_equals([operation for *_, operation in operations])
        result_ids = tuple(self.ids[v] for v in arrays(terminator(block).operands))
        return Graph(
            ops=ops,
            values=tuple(self.values),
            arguments=argument_ids,
            results=result_ids,
            ties=ties,
            argument_info=arguments,
            result_info=results,
            unknown_trips=tuple(self.unknown),
            loosened=tuple(dict.fromkeys(self.loosened)),
        )

    def _find_equals(self, operations: Sequence[ir.Operation]) -> None:
        """Number values so that equal ones, seen through barriers, have one number."""
        same = list(range(len(self.values)))
        first: dict[object, tuple[int, ...]] = {}
        for op, operation in zip(self.ops, operations, strict=True):
            if op.name == _BARRIER:
                for result, operand in zip(op.results, op.operands, strict=True):
                    same[result] = same[operand]
            elif not (op.target or op.body or op.name in REGION_OPS):
                known = first.setdefault(_computation(op, operation, same), op.results)
                for result, equal in zip(op.results, known, strict=True):
                    same[result] = same[equal]
        self.values = [replace(t, same=same[t.id]) for t in self.values]

    def _value(self, value: Value, op: int, position: int, depth: int = 0, alias: int = -1) -> int:
        type_ = value.type
        if type_ not in self.types:
            self.types[type_] = _type(type_)
        shape, dtype, nbytes = self.types[type_]
        number = len(self.values)
        root = number if alias < 0 else self.values[alias].alias
        new = Tensor(number, shape, dtype, nbytes, op, position, root, depth > 0, number)
        self.values.append(new)
        self.ids[value] = new.id
        if depth:
            self.depth[new.id] = depth
        return new.id

    def _op(self, index: int, parent: int, region: int, operation: ir.Operation) -> None:
        name = operation.name
        operands = tuple(self.ids[v] for v in operation.operands)
        given = rule_for(operation)
        rule = given or self._rule(operation)
        fixed = self._fixed(operation)
        around = self.trips[parent]
        body_trips = around
        if name in ALIASES or _is_alias(operation, fixed):
            results = tuple(
                self._value(v, index, k, alias=-1 if self.values[o].free else o)
                for k, (v, o) in enumerate(zip(operation.results, operands, strict=True))
            )
        else:
            depth = self._free_depth(operation, operands, rule)
            results = tuple(
                self._value(v, index, k, depth) for k, v in enumerate(operation.results)
            )
        if name == "stablehlo.while":
            count = trip_count(operation)
            if count is None:
                self.unknown.append(index)
            body_trips = around * (1 if count is None else count)
            for inside in operation.regions:
                for argument, value in zip(inside.blocks[0].arguments, results, strict=True):
                    self.ids[argument] = value
        self.trips[index] = body_trips
        self.ops.append(
            Op(
                index=index,
                name=name,
                operands=operands,
                results=results,
                returned=(),
                rule=rule or _elementwise(operation),
                parent=parent,
                region=region,
                trips=around,
                body_trips=body_trips,
                flops=flops_of(operation, rule),
                combiner=combiner_of(operation),
                fixed=fixed,
                source=source_of(operation),
                target=target_of(operation),
                piecewise=given is not None or is_grouped(operation),
                on_one_device=self._is_on_one_device(operation),
                collective=collective_of(operation, self.mesh),
                body=self._body(operation),
                window=window_of(operation),
                is_precise=_is_precise(operation),
            )
        )

    def _body(self, operation: ir.Operation) -> Graph | None:
        """What one device runs of a ``shard_map``."""
        if operation.name != MANUAL:
            return None
        block = operation.regions[0].blocks[0]
        arguments = tuple(Boundary("") for _ in arrays(block.arguments))
        results = tuple(Boundary("") for _ in arrays(terminator(block).operands))
        return _Reader(self.mesh, self.single_devices).read(block, arguments, results, ())

    def _is_on_one_device(self, operation: ir.Operation) -> bool:
        if operation.name != "stablehlo.custom_call" or "sdy.sharding" not in operation.attributes:
            return False
        named = re.findall(r"@([\w.$-]+)", str(operation.attributes["sdy.sharding"]))
        return any(name in self.single_devices for name in named)

    def _with_returned(self, op: Op, operation: ir.Operation) -> Op:
        if op.name not in REGION_OPS:
            return op
        regions = list(operation.regions)
        bodies = regions[1:] if op.name == "stablehlo.while" else regions
        returned = tuple(
            tuple(self.ids[v] for v in terminator(r.blocks[0]).operands) for r in bodies
        )
        return replace(op, returned=returned)

    def _rule(self, operation: ir.Operation) -> Rule | None:
        if "sdy.sharding_rule" not in operation.attributes:
            return None
        if operation.name in BEYOND_RULES:
            return read_rule(operation)
        attribute = operation.attributes["sdy.sharding_rule"]
        key = (attribute, operation.name)
        if key not in self.rules:
            self.rules[key] = read_rule(operation)
        return self.rules[key]

    def _free_depth(
        self, operation: ir.Operation, operands: tuple[int, ...], rule: Rule | None
    ) -> int:
        """Length of the chain from constants if the op is free, else 0."""
        if operation.name in MATERIALS:
            return 1
        if rule is None or len(operation.results) != 1 or len(operation.regions):
            return 0
        if operation.name.startswith("sdy.") or not all(self.values[v].free for v in operands):
            return 0
        if not operands or any(kind != "pass" for kind in rule.kinds):
            return 0
        depth = 1 + max(self.depth[v] for v in operands)
        return depth if depth <= MAX_FREE_DEPTH else 0

    def _fixed(
        self, operation: ir.Operation
    ) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | None:
        if operation.name == "sdy.sharding_constraint":
            sharding = self._closed(sdy.TensorShardingAttr(operation.attributes["sharding"]))
            if sharding is None or "@empty_mesh" in str(operation.attributes["sharding"]):
                return None
            kept = self._kept(operation, sharding)
            return (kept,), (kept,)
        if operation.name == "sdy.manual_computation":
            sides = []
            for side in ("in_shardings", "out_shardings"):
                per_value = sdy.TensorShardingPerValueAttr(operation.attributes[side])
                sides.append(
                    tuple(self._named(sdy.TensorShardingAttr(s)) for s in per_value.shardings)
                )
            return sides[0], sides[1]
        return None

    def _kept(self, operation: ir.Operation, sharding: Sharding) -> Sharding:
        """What is kept of a prescribed sharding: axes that would pad a dimension much are not."""
        shape = tuple(ir.RankedTensorType(operation.results[0].type).shape)
        kept = loosened(shape, sharding, self.mesh, padded=True)
        if kept != sharding:
            at = f" at {source_of(operation)}" if source_of(operation) else ""
            self.loosened.append(
                f"{to_partition_spec(sharding)} of a {list(shape)} array{at} is carried out as "
                f"{to_partition_spec(kept)}"
            )
        return kept

    def _closed(self, attribute: sdy.TensorShardingAttr) -> Sharding | None:
        """The sharding prescribed; None if it leaves everything open.

        Where it leaves a dimension open, that dimension gets the axes named and no more.
        """
        named = self._named(attribute)
        dimensions = [sdy.DimensionShardingAttr(d) for d in attribute.dimension_shardings]
        is_open = not any(d.axes for d in dimensions) and not all(d.is_closed for d in dimensions)
        return None if is_open else named

    def _named(self, attribute: sdy.TensorShardingAttr) -> Sharding:
        """The axes that a sharding names; those of size one are left out."""
        dimensions = [sdy.DimensionShardingAttr(d) for d in attribute.dimension_shardings]
        sharding = tuple(tuple(sdy.AxisRefAttr(a).name for a in d.axes) for d in dimensions)
        for axis in (a for dim in sharding for a in dim):
            if axis not in self.mesh.names:
                raise InputError(
                    f"the function prescribes a sharding over the axis {axis!r}, "
                    f"which the mesh ({self.mesh}) does not have",
                    fix="use the mesh that autoshard was given in with_sharding_constraint",
                )
        return splitting(sharding, self.mesh)


def _single_devices(module: ir.Module) -> frozenset[str]:
    """Names of the module's meshes that are one device, on which JAX puts callbacks into Python."""
    meshes = [op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return frozenset(
        str(ir.StringAttr(mesh.attributes["sym_name"]).value)
        for mesh in meshes
        if list(sdy.MeshAttr(mesh.attributes["mesh"]).device_ids)
        and not list(sdy.MeshAttr(mesh.attributes["mesh"]).axes)
    )


def _computation(op: Op, operation: ir.Operation, same: Sequence[int]) -> object:
    """What an op computes and where: equal for two ops only if they compute the same."""
    if len(operation.regions) and not op.combiner:
        return op.index
    try:
        attributes = tuple(
            (str(name), operation.attributes[name])
            for name in operation.attributes
            if name != "sdy.sharding_rule"
        )
    except TypeError:  # the bindings do not know constants of complex numbers
        return op.index
    types = tuple(str(result.type) for result in operation.results)
    operands = tuple(same[v] for v in op.operands)
    return op.name, op.parent, op.region, operands, attributes, types, op.combiner


def _is_alias(
    operation: ir.Operation, fixed: tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | None
) -> bool:
    """A constraint that says nothing (open, or on an empty mesh) only passes its operand on."""
    return operation.name == "sdy.sharding_constraint" and fixed is None


def _type(type_: ir.Type) -> tuple[tuple[int, ...], str, int]:
    if not isinstance(type_, ir.RankedTensorType):
        return (), "token", 0
    tensor = ir.RankedTensorType(type_)
    shape = tuple(tensor.shape)
    dtype = str(tensor.element_type)
    bits = _BITS.get(dtype)
    if bits is None:
        # f8E4M3FN, bf16, ui4: the first number is the size.
        digits = re.match(r"[a-z]*(\d+)", dtype)
        bits = int(digits[1]) if digits else 32
    return shape, dtype, math.ceil(math.prod(shape) * bits / 8)


def read_rule(operation: ir.Operation) -> Rule:
    """The sharding rule that Shardy put on an op."""
    attribute = sdy.OpShardingRuleAttr(operation.attributes["sdy.sharding_rule"])
    sizes = tuple(attribute.factor_sizes)
    special: dict[int, FactorKind] = {}
    special.update(dict.fromkeys(attribute.reduction_factors, "reduction"))
    special.update(dict.fromkeys(attribute.permutation_factors, "permutation"))
    special.update(dict.fromkeys(attribute.need_replication_factors, "replicated"))

    def side(mappings: Sequence[ir.Attribute]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(
                tuple(sdy.DimMappingAttr(d).factor_indices)
                for d in sdy.TensorMappingAttr(m).dim_mappings
            )
            for m in mappings
        )

    operands, results = side(attribute.operand_mappings), side(attribute.result_mappings)
    kinds: list[FactorKind] = [special.get(f, "pass") for f in range(len(sizes))]
    for factor in whole_factors(operation, operands, results):
        kinds[factor] = "replicated"
    return Rule(sizes, tuple(kinds), operands, results)


def _elementwise(operation: ir.Operation) -> Rule | None:
    """A rule for ops of the CHLO dialect that work element by element, which Shardy leaves out."""
    if not operation.name.startswith("chlo.") or len(operation.regions):
        return None
    shapes = {shape_of(v) for v in (*operation.operands, *operation.results)}
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    dims = tuple((i,) for i in range(len(shape)))
    kinds: list[FactorKind] = ["pass" for _ in shape]
    return Rule(
        shape,
        tuple(kinds),
        (dims,) * len(operation.operands),
        (dims,) * len(operation.results),
    )


def _is_precise(operation: ir.Operation) -> bool:
    """Whether a product asks for more than its platform's default precision."""
    held = operation.attributes
    return "algorithm" in held or (
        "precision_config" in held and "HIGH" in str(held["precision_config"])
    )
