"""Collectives that a loop repeats without need: hoisted before it, or sunk behind it.

What does not change from one iteration to the next is exchanged once, before the loop. Where a loop
adds up what a reduction gives, it can add up each device's part instead; one reduction after the
loop then does what one in every iteration did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from jax.extend.mlir import ir

from autoshard.counting import trip_count
from autoshard.passes.exchanges import Exchange, bits_of, exchange_of, exchanged, nbytes_of
from autoshard.passes.patterns import maker_of
from autoshard.program import Value, operations, shape_of, terminator

WHILE = "stablehlo.while"

_PURE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "broadcast_in_dim", "compare", "concatenate", "constant", "convert"),
        *("divide", "dot_general", "dynamic_slice", "exponential", "iota", "maximum", "minimum"),
        *("multiply", "negate", "not", "or", "pad", "partition_id", "remainder", "reshape"),
        *("select", "slice", "sqrt", "subtract", "tanh", "transpose"),
        *("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"),
    )
)
_SCALES = frozenset(("stablehlo.multiply", "stablehlo.divide"))
_ARRANGES = frozenset(("stablehlo.transpose", "stablehlo.reshape"))


def loops_of(block: ir.Block) -> list[ir.Operation]:
    """All loops in a block, inner ones first."""
    return [o for o in operations(block) if o.name == WHILE][::-1]


def hoist(
    loop: ir.Operation, allow: Callable[[str, ir.Operation], bool], limit: int | None = None
) -> int:
    """Move collectives of what a loop does not change to before the loop.

    Args:
        loop: The loop; nothing happens to one that is known to run less than twice.
        allow: Asked before each is moved.
        limit: The largest result that may be held while the loop runs [bytes]; None for any.

    Returns:
        How many were moved.
    """
    if _runs_once(loop):
        return 0
    body = loop.regions[1].blocks[0]
    invariant = _Invariant(loop)
    moved = 0
    for operation in [o.operation for o in body.operations]:
        exchange = exchange_of(operation)
        if exchange is None or not invariant.holds(operation):
            continue
        if limit is not None and sum(map(nbytes_of, operation.results)) > limit:
            continue
        if not allow("hoist", operation):
            continue
        outside = invariant.copy(operation)
        for result, made in zip(operation.results, outside.results, strict=True):
            result.replace_all_uses_with(made)
        moved += 1
    return moved


def _runs_once(loop: ir.Operation) -> bool:
    trips = trip_count(loop)
    return trips is not None and trips < 2


class _Invariant:
    """What is the same in every iteration of a loop, and copies of it before the loop."""

    def __init__(self, loop: ir.Operation) -> None:
        self.loop = loop
        self.body = loop.regions[1].blocks[0]
        ends = terminator(self.body).operands
        self.outside: dict[Value, Value] = {
            cast(Value, argument): loop.operands[k]
            for k, argument in enumerate(self.body.arguments)
            if ends[k] == argument
        }
        self.known: dict[ir.Operation, bool] = {}

    def holds(self, operation: ir.Operation) -> bool:
        """Whether an op of the body gives the same in every iteration."""
        if operation not in self.known:
            self.known[operation] = operation.name in _PURE and all(
                self._value(value) for value in operation.operands
            )
        return self.known[operation]

    def _value(self, value: Value) -> bool:
        if value in self.outside:
            return True
        maker = maker_of(value)
        if maker is None:
            return bool(value.owner != self.body)
        return self.holds(maker) if maker.block == self.body else True

    def copy(self, operation: ir.Operation) -> ir.Operation:
        """A copy of an op before the loop, and of what it needs."""
        made = operation.clone(ir.InsertionPoint(self.loop)).operation
        for position, value in enumerate(operation.operands):
            maker = maker_of(value)
            if value not in self.outside and maker is not None and maker.block == self.body:
                before = self.copy(maker)
                made.move_after(before)
                for result, copied in zip(maker.results, before.results, strict=True):
                    self.outside[cast(Value, result)] = cast(Value, copied)
            made.operands[position] = self.outside.get(value, value)
        return made


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A value to which a loop adds the result of a reduction in every iteration.

    Attributes:
        loop: The loop.
        position: Which carried value.
        add: The op that adds.
        exchange: The reduction.
        path: Linear ops between the reduction and the addition.
    """

    loop: ir.Operation
    position: int
    add: ir.Operation
    exchange: Exchange
    path: tuple[ir.Operation, ...]


def accumulations(loop: ir.Operation) -> list[Accumulation]:
    """The accumulations of a loop that may be reduced once, after it."""
    if _runs_once(loop):
        return []
    found = (_accumulation(loop, position) for position in range(len(loop.results)))
    return [one for one in found if one is not None]


def _accumulation(loop: ir.Operation, position: int) -> Accumulation | None:
    condition, body = (region.blocks[0] for region in loop.regions)
    argument = body.arguments[position]
    if any(True for _ in condition.arguments[position].uses):
        return None
    add = maker_of(terminator(body).operands[position])
    if add is None or add.name != "stablehlo.add" or add.block != body:
        return None
    if _readers(argument) != 1 or _readers(add.results[0]) != 1:
        return None
    values = [v for v in add.operands if v != argument]
    if len(values) != 1:
        return None
    path: list[ir.Operation] = []
    value = values[0]
    while True:
        maker = maker_of(value)
        if maker is None or maker.block != body or _readers(value) != 1:
            return None
        exchange = exchange_of(maker)
        if exchange is not None:
            break
        if not _is_linear(maker):
            return None
        path.append(maker)
        value = maker.operands[0]
    if exchange.kind not in ("all_reduce", "reduce_scatter") or not exchange.is_sum:
        return None
    if len(exchange.op.operands) != 1:
        return None
    return Accumulation(loop, position, add, exchange, tuple(reversed(path)))


def _readers(value: Value) -> int:
    return len(list(value.uses))


def _is_linear(maker: ir.Operation) -> bool:
    """Whether an op widens, multiplies by one number, or arranges the elements in another way."""
    if maker.name in _ARRANGES:
        return True
    if maker.name == "stablehlo.convert":
        before, after = (ir.RankedTensorType(v.type).element_type for v in _ends(maker))
        floats = isinstance(before, ir.FloatType) and isinstance(after, ir.FloatType)
        return floats and bits_of(before) <= bits_of(after)
    if maker.name not in _SCALES:
        return False
    is_float = isinstance(ir.RankedTensorType(maker.results[0].type).element_type, ir.FloatType)
    return is_float and _splat_of(maker.operands[1]) is not None


def _ends(maker: ir.Operation) -> tuple[Value, Value]:
    return maker.operands[0], cast(Value, maker.results[0])


def _splat_of(value: Value) -> float | None:
    """The one number that all elements of a floating-point constant are."""
    maker = maker_of(value)
    while maker is not None and maker.name == "stablehlo.broadcast_in_dim":
        maker = maker_of(maker.operands[0])
    if maker is None or maker.name != "stablehlo.constant":
        return None
    dense = ir.DenseElementsAttr(maker.attributes["value"])
    return float(ir.FloatAttr(dense.get_splat_value()).value) if dense.is_splat else None


def sink(found: list[Accumulation]) -> ir.Operation:
    """Reduce what a loop adds up once, after it.

    Args:
        found: Accumulations of one loop.

    Returns:
        The loop that takes its place; what it carried before, it now carries for nothing.
    """
    loop = found[0].loop
    body = loop.regions[1].blocks[0]
    for one in found:
        terminator(body).operands[one.position] = body.arguments[one.position]
    made, sums = with_sums(loop, [_widened(one) for one in found])
    after = following(made)
    for total, one in zip(sums, found, strict=True):
        (whole,) = exchanged(one.exchange, after, [total])
        whole = _along(one, whole, after)
        carried = made.results[one.position]
        added = ir.Operation.create(
            "stablehlo.add",
            results=[whole.type],
            operands=[carried, whole],
            loc=one.add.location,
            ip=ir.InsertionPoint(after),
        )
        carried.replace_all_uses_except(cast(Value, added.results[0]), [added])
    return made


def following(operation: ir.Operation) -> ir.Operation:
    """The op that comes next in a block."""
    listed = [o.operation for o in operation.block.operations]
    return listed[listed.index(operation) + 1]


def with_sums(loop: ir.Operation, values: Sequence[Value]) -> tuple[ir.Operation, list[Value]]:
    """Replace a loop by one that also adds up values of its body over all iterations.

    Args:
        loop: The loop.
        values: What is added up; values of the loop's body.

    Returns:
        The new loop, and the sums as values after it.
    """
    starts = [_zeros(value, loop) for value in values]
    made = ir.Operation.create(
        WHILE,
        results=[*(r.type for r in loop.results), *(s.type for s in starts)],
        operands=[*loop.operands, *starts],
        attributes={name: loop.attributes[name] for name in map(str, loop.attributes)},
        regions=2,
        loc=loop.location,
        ip=ir.InsertionPoint(loop),
    )
    condition, body = (region.blocks[0] for region in loop.regions)
    end = terminator(body)
    ends = list(end.operands)
    for value in values:
        condition.add_argument(value.type, loop.location)
        argument = body.add_argument(value.type, loop.location)
        add = ir.Operation.create(
            "stablehlo.add",
            results=[value.type],
            operands=[argument, value],
            loc=cast(ir.Operation, value.owner).location,
            ip=ir.InsertionPoint(end),
        )
        ends.append(cast(Value, add.results[0]))
    with ir.InsertionPoint(end):
        ir.Operation.create(end.name, operands=ends, loc=end.location)
    end.erase()
    condition.append_to(made.regions[0])
    body.append_to(made.regions[1])
    kept = len(loop.results)
    for position in range(kept):
        loop.results[position].replace_all_uses_with(made.results[position])
    loop.erase()
    return made, [cast(Value, result) for result in list(made.results)[kept:]]


def _zeros(like: Value, before: ir.Operation) -> Value:
    """Zeros of a value's type."""
    kind = ir.RankedTensorType(like.type)
    element = kind.element_type
    is_float = isinstance(element, ir.FloatType)
    zero = ir.FloatAttr.get(element, 0.0) if is_float else ir.IntegerAttr.get(element, 0)
    made = ir.Operation.create(
        "stablehlo.constant",
        results=[kind],
        attributes={"value": ir.DenseElementsAttr.get_splat(kind, zero)},
        loc=before.location,
        ip=ir.InsertionPoint(before),
    )
    return cast(Value, made.results[0])


def _widened(one: Accumulation) -> Value:
    """The part of a device, in the element type in which it is added up."""
    value = one.exchange.value
    element = ir.RankedTensorType(one.add.results[0].type).element_type
    if ir.RankedTensorType(value.type).element_type == element:
        return value
    made = ir.Operation.create(
        "stablehlo.convert",
        results=[ir.RankedTensorType.get(list(shape_of(value)), element)],
        operands=[value],
        loc=one.exchange.op.location,
        ip=ir.InsertionPoint(one.add),
    )
    return cast(Value, made.results[0])


def _along(one: Accumulation, value: Value, before: ir.Operation) -> Value:
    """What was summed up, taken through the linear ops; it has been widened already."""
    element = ir.RankedTensorType(value.type).element_type
    for maker in one.path:
        if maker.name == "stablehlo.convert":
            continue
        kind = ir.RankedTensorType.get(list(shape_of(maker.results[0])), element)
        operands = [value]
        if maker.name in _SCALES:
            number = _splat_of(maker.operands[1])
            assert number is not None
            same = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(element, number))
            constant = ir.Operation.create(
                "stablehlo.constant",
                results=[kind],
                attributes={"value": same},
                loc=maker.location,
                ip=ir.InsertionPoint(before),
            )
            operands.append(cast(Value, constant.results[0]))
        made = ir.Operation.create(
            maker.name,
            results=[kind],
            operands=operands,
            attributes={name: maker.attributes[name] for name in map(str, maker.attributes)},
            loc=maker.location,
            ip=ir.InsertionPoint(before),
        )
        value = cast(Value, made.results[0])
    return value
