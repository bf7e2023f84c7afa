"""The program as a frozen graph: ops, values, loops, ties; each op with its sharding rule.

The graph holds no compiler object, so it can be saved, printed, compared and priced anywhere. Its
ops are numbered as :func:`autoshard.program.walk` yields them, which is how a plan finds its way
back to a module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from autoshard.errors import InputError
from autoshard.program import (
    MATERIALS as MATERIALS,
)
from autoshard.program import (
    MAX_FREE_DEPTH,
    REGION_OPS,
    Boundary,
    Value,
    main_block,
    source_of,
    terminator,
    walk,
)
from autoshard.shardings import MeshShape, Sharding
from autoshard.traps import whole_factors

FactorKind = Literal["pass", "reduction", "replicated", "permutation"]

ALIASES = frozenset({"stablehlo.optimization_barrier"})
"""Ops whose results are their operands, one to one (as is a constraint that says nothing)."""

_BITS = {"i1": 8, "complex<f32>": 64, "complex<f64>": 128, "tf32": 32, "index": 64}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value in the program.

    Attributes:
        id: Position in ``Graph.values``.
        shape: Global (unsharded) sizes, major to minor.
        dtype: A StableHLO element type, e.g. ``bf16``.
        nbytes: Size of the whole tensor [bytes].
        op: Index of the op that makes it; -1 for an argument of the program.
        position: Which result of that op (or which argument of the program) it is.
        alias: Id of the value whose buffer and sharding it shares; its own id if it is no alias.
        free: Whether it costs nothing in any sharding: constants, and what is computed from them
            element by element.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    op: int
    position: int
    alias: int
    free: bool = False

    def __str__(self) -> str:
        return f"%{self.id}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Rule:
    """How the dimensions of an op's operands and results are made of factors.

    Attributes:
        sizes: Size of each factor.
        kinds: Kind of each factor: passed through, reduced away, to be kept whole
            (``replicated``), or needing communication between neighbours (``permutation``).
        operands: Per operand, per dimension, its factors, major to minor.
        results: Per result, per dimension, its factors, major to minor.
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        index: Position in ``Graph.ops``: the walk order of the module.
        name: E.g. ``stablehlo.dot_general``.
        operands: Ids of the values read.
        results: Ids of the values made. A loop's results are its carried values, which its body
            reads under the same ids.
        returned: Per region that gives values back (a loop's body, each branch of a case), the ids
            of what it gives back, one per result.
        rule: Its sharding rule; None if it has none.
        parent: Index of the op whose region holds it; -1 at the top level.
        region: Which of that op's regions it is in.
        trips: How often it runs in one call of the program (product of the trip counts around it).
        body_trips: For a loop, how often its body runs in one call of the program.
        flops: Floating-point operations of one unsharded execution [FLOP].
        combiner: For a reduction or scatter, the op in its body, e.g. ``stablehlo.add``.
        fixed: Shardings of operands and results that the program itself prescribes.
        source: ``file.py:line`` of the user's code that made it.
    """

    index: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    returned: tuple[tuple[int, ...], ...]
    rule: Rule | None
    parent: int
    region: int
    trips: int
    body_trips: int
    flops: float
    combiner: str
    fixed: tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | None
    source: str

    @property
    def is_alias(self) -> bool:
        """Whether its results are its operands, one to one."""
        return self.name in ALIASES or (self.name == "sdy.sharding_constraint" and not self.fixed)

    @property
    def kind(self) -> str:
        """The name without its dialect."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole program.

    Attributes:
        ops: All ops in walk order.
        values: All values; ``values[i].id == i``.
        arguments: Ids of the program's arguments.
        results: Ids of the program's results.
        ties: Pairs (argument position, result position) that must share a sharding because the
            result replaces the donated argument.
        argument_info: The caller's view of the arguments.
        result_info: The caller's view of the results.
        unknown_trips: Indices of loops whose trip count the program does not state; counted once.
    """

    ops: tuple[Op, ...]
    values: tuple[Tensor, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    argument_info: tuple[Boundary, ...]
    result_info: tuple[Boundary, ...]
    unknown_trips: tuple[int, ...] = ()

    def signature(self) -> tuple[str, ...]:
        """One line per argument and op: what a plan is checked against."""
        head = [f"argument {self.values[v]}" for v in self.arguments]
        body = [
            f"{op.name}({', '.join(f'%{v}' for v in op.operands)}) -> "
            f"{', '.join(str(self.values[v]) for v in op.results)}"
            for op in self.ops
        ]
        tail = [f"result {self.values[v]}" for v in self.results]
        return (*head, *body, *tail)

    def fingerprint(self) -> str:
        """SHA-256 of :meth:`signature`, in hex."""
        return hashlib.sha256("\n".join(self.signature()).encode()).hexdigest()

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            depth, parent = 0, op.parent
            while parent >= 0:
                depth, parent = depth + 1, self.ops[parent].parent
            results = ", ".join(str(self.values[v]) for v in op.results)
            operands = ", ".join(f"%{v}" for v in op.operands)
            lines.append(f"{op.index:5d} {'  ' * depth}{results} = {op.name}({operands})")
        return "\n".join(lines)


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
        return _Reader(module, mesh).read(tuple(arguments), tuple(results), tuple(ties))


def add_rules(module: ir.Module) -> None:
    """Have Shardy put its sharding rule on every op that has one."""
    passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(
        module.operation
    )


class _Reader:
    """The walk: MLIR values to ids, regions to returned values, loops to trip counts."""

    def __init__(self, module: ir.Module, mesh: MeshShape) -> None:
        self.module, self.mesh = module, mesh
        self.values: list[Tensor] = []
        self.ids: dict[Value, int] = {}
        self.depth: dict[int, int] = {}  # free values: length of the chain to a constant
        self.rules: dict[tuple[ir.Attribute, str], Rule] = {}
        self.ops: list[Op] = []
        self.unknown: list[int] = []
        self.trips: dict[int, int] = {-1: 1}

    def read(
        self,
        arguments: tuple[Boundary, ...],
        results: tuple[Boundary, ...],
        ties: tuple[tuple[int, int], ...],
    ) -> Graph:
        block = main_block(self.module)
        argument_ids = tuple(
            self._value(a, -1, position) for position, a in enumerate(block.arguments)
        )
        operations = list(walk(block))
        for index, (parent, region, operation) in enumerate(operations):
            self._op(index, parent, region, operation)
        ops = tuple(self._with_returned(op, operations[op.index][2]) for op in self.ops)
        result_ids = tuple(self.ids[v] for v in terminator(block).operands)
        return Graph(
            ops=ops,
            values=tuple(self.values),
            arguments=argument_ids,
            results=result_ids,
            ties=ties,
            argument_info=arguments,
            result_info=results,
            unknown_trips=tuple(self.unknown),
        )

    def _value(self, value: Value, op: int, position: int, depth: int = 0, alias: int = -1) -> int:
        shape, dtype, nbytes = _type(value.type)
        number = len(self.values)
        root = number if alias < 0 else self.values[alias].alias
        new = Tensor(number, shape, dtype, nbytes, op, position, root, depth > 0)
        self.values.append(new)
        self.ids[value] = new.id
        if depth:
            self.depth[new.id] = depth
        return new.id

    def _op(self, index: int, parent: int, region: int, operation: ir.Operation) -> None:
        name = operation.name
        operands = tuple(self.ids[v] for v in operation.operands)
        rule = self._rule(operation)
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
            count = _trip_count(operation)
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
                flops=_flops(operation, rule),
                combiner=_combiner(operation),
                fixed=fixed,
                source=source_of(operation),
            )
        )

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
            return (sharding,), (sharding,)
        if operation.name == "sdy.manual_computation":
            sides = []
            for side in ("in_shardings", "out_shardings"):
                per_value = sdy.TensorShardingPerValueAttr(operation.attributes[side])
                read = [self._closed(sdy.TensorShardingAttr(s)) for s in per_value.shardings]
                if any(s is None for s in read):
                    return None
                sides.append(tuple(s for s in read if s is not None))
            return sides[0], sides[1]
        return None

    def _closed(self, attribute: sdy.TensorShardingAttr) -> Sharding | None:
        """The sharding prescribed; None if it leaves everything open.

        Where it leaves a dimension open, that dimension gets the axes named and no more.
        """
        dimensions = [sdy.DimensionShardingAttr(d) for d in attribute.dimension_shardings]
        sharding = tuple(tuple(sdy.AxisRefAttr(a).name for a in d.axes) for d in dimensions)
        for axis in (a for dim in sharding for a in dim):
            if axis not in self.mesh.names:
                raise InputError(
                    f"the function prescribes a sharding over the axis {axis!r}, "
                    f"which the mesh ({self.mesh}) does not have",
                    fix="use the mesh that autoshard was given in with_sharding_constraint",
                )
        return sharding if any(sharding) or all(d.is_closed for d in dimensions) else None


def _is_alias(
    operation: ir.Operation, fixed: tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | None
) -> bool:
    """A constraint that says nothing (open, or on an empty mesh) only passes its operand on."""
    return operation.name == "sdy.sharding_constraint" and fixed is None


def _type(type_: ir.Type) -> tuple[tuple[int, ...], str, int]:
    tensor = ir.RankedTensorType(type_)
    shape = tuple(tensor.shape)
    dtype = str(tensor.element_type)
    bits = _BITS.get(dtype)
    if bits is None:
        digits = "".join(c for c in dtype.lower().removeprefix("ui").lstrip("bfiu") if c.isdigit())
        bits = 8 if dtype.startswith("f8") else int(digits or 32)
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
    shapes = {tuple(ir.RankedTensorType(v.type).shape) for v in operation.operands}
    shapes |= {tuple(ir.RankedTensorType(v.type).shape) for v in operation.results}
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


def _flops(operation: ir.Operation, rule: Rule | None) -> float:
    """FLOP of one unsharded execution; a multiply-add counts two, any other element one."""
    if operation.name == "stablehlo.dot_general" and rule is not None:
        return 2.0 * math.prod(rule.sizes)
    out = sum(math.prod(ir.RankedTensorType(v.type).shape) for v in operation.results)
    if operation.name == "stablehlo.convolution":
        return _convolution_flops(operation)
    if operation.name in REGION_OPS or operation.name in ALIASES | MATERIALS:
        return 0.0
    if len(operation.regions) and len(operation.operands):
        return float(math.prod(ir.RankedTensorType(operation.operands[0].type).shape))
    return float(out)


def _convolution_flops(operation: ir.Operation) -> float:
    """Products with real elements times two: padding and the holes of dilation cost nothing."""
    lhs, kernel, out = (
        tuple(ir.RankedTensorType(v.type).shape)
        for v in (operation.operands[0], operation.operands[1], operation.results[0])
    )
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    axes = len(numbers.input_spatial_dimensions)
    strides = _numbers(operation, "window_strides", axes, 1)
    low = _numbers(operation, "padding", 2 * axes, 0)[::2]
    holes = _numbers(operation, "lhs_dilation", axes, 1)
    spread = _numbers(operation, "rhs_dilation", axes, 1)
    products = 1
    for axis in range(axes):
        size = lhs[numbers.input_spatial_dimensions[axis]]
        starts = np.arange(out[numbers.output_spatial_dimensions[axis]]) * strides[axis] - low[axis]
        taps = np.arange(kernel[numbers.kernel_spatial_dimensions[axis]]) * spread[axis]
        read = starts[:, None] + taps[None, :]
        real = (read >= 0) & (read <= (size - 1) * holes[axis]) & (read % holes[axis] == 0)
        products *= int(real.sum())
    groups = ir.IntegerAttr(operation.attributes["batch_group_count"]).value
    features = kernel[numbers.kernel_input_feature_dimension]
    features *= kernel[numbers.kernel_output_feature_dimension]
    return 2.0 * products * features * (lhs[numbers.input_batch_dimension] // groups)


def _numbers(operation: ir.Operation, name: str, count: int, default: int) -> list[int]:
    """A list of integers among an op's attributes."""
    if name not in operation.attributes:
        return [default] * count
    attribute = operation.attributes[name]
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        return [int(n) for n in attribute]
    dense = ir.DenseIntElementsAttr(attribute)
    return [int(dense[0])] * count if dense.is_splat else [int(n) for n in dense]


def _combiner(operation: ir.Operation) -> str:
    """The single op in the body of a reduction or scatter; empty if it is another thing."""
    if operation.name in REGION_OPS or len(operation.regions) != 1:
        return ""
    body = [op.operation for op in operation.regions[0].blocks[0].operations]
    return body[0].name if len(body) == 2 else ""


def _constant(value: Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return None
    attribute = ir.DenseElementsAttr(owner.attributes["value"])
    if not attribute.is_splat:
        return None
    try:
        return int(ir.DenseIntElementsAttr(attribute)[0])
    except (ValueError, TypeError):
        return None


def _trip_count(loop: ir.Operation) -> int | None:
    """How often the body of a counting loop runs; None when the module does not say."""
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    test = terminator(condition).operands[0].owner
    if isinstance(test, ir.Block) or test.name != "stablehlo.compare":
        return None
    counter = test.operands[0]
    if not isinstance(counter.owner, ir.Block):
        return None
    position = [a == counter for a in condition.arguments].index(True)
    bound = _loop_invariant(loop, test.operands[1], condition)
    start = _constant(loop.operands[position])
    step_op = terminator(body).operands[position].owner
    if bound is None or start is None or isinstance(step_op, ir.Block):
        return None
    if step_op.name != "stablehlo.add" or step_op.operands[0] != body.arguments[position]:
        return None
    step = _constant(step_op.operands[1])
    if not step or step < 0 or " LT" not in str(test.attributes["comparison_direction"]):
        return None
    return max(0, math.ceil((bound - start) / step))


def _loop_invariant(loop: ir.Operation, value: Value, condition: ir.Block) -> int | None:
    """A constant, given inside the condition or carried unchanged through the loop."""
    if not isinstance(value.owner, ir.Block):
        return _constant(value)
    for position, argument in enumerate(condition.arguments):
        if argument == value:
            body = loop.regions[1].blocks[0]
            if terminator(body).operands[position] == body.arguments[position]:
                return _constant(loop.operands[position])
    return None
