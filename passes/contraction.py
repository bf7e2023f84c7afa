"""Cheaper orders of products, and transposes that disappear into them.

A tree of ``dot_general`` ops, each read once, with transposes between, is one einsum over its
leaves. The order of contraction with the fewest operations is found exactly, by dynamic programming
over subsets of the leaves (Chin, O'Hallaron 1975 for chains of matrices; here every einsum).
Remaining transposes are folded into dimension numbers, which cost nothing.

Sums are taken in another order: floating-point values agree within rounding, integers exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.counting import trip_count
from autoshard.passes.fold_transpose import permutation_of
from autoshard.passes.patterns import maker_of
from autoshard.program import Value, main_block, operations, shape_of

MAX_LEAVES = 9
"""Factors of one product up to which every order is tried: 3^9 pairs of subsets."""

DOT = "stablehlo.dot_general"
TRANSPOSE = "stablehlo.transpose"

TIE = 1e-9
"""Share by which an order must be cheaper: sums of prices are rounded."""

Labels = frozenset[int]
Price = Callable[[Labels, Labels, Labels], float]
"""The price of one product, from the labels of its operands and of its result."""

Order = int | tuple["Order", "Order"]
"""The number of a leaf, or two orders whose results are multiplied."""


@dataclass(frozen=True, slots=True)
class Einsum:
    """A tree of products as one einsum.

    Attributes:
        leaves: The factors.
        labels: The labels of each factor's dimensions.
        out: The labels of the result's dimensions.
        sizes: Size of each label.
        order: How the program multiplies them.
        dots: The products it uses, the last one first.
    """

    leaves: tuple[Value, ...]
    labels: tuple[tuple[int, ...], ...]
    out: tuple[int, ...]
    sizes: dict[int, int]
    order: Order
    dots: tuple[ir.Operation, ...]

    def cost(self, order: Order, price: Price | None = None) -> float:
        """The sum of the prices of an order's products; by default their operations [FLOP]."""
        return self._cost(order, price or self.flops)[0]

    def _cost(self, order: Order, price: Price) -> tuple[float, frozenset[int]]:
        if isinstance(order, int):
            return 0.0, frozenset((order,))
        (left_cost, left), (right_cost, right) = (self._cost(half, price) for half in order)
        both = left | right
        this = price(self.kept(left), self.kept(right), self.kept(both))
        return left_cost + right_cost + this, both

    def flops(self, left: Labels, right: Labels, out: Labels) -> float:
        """Operations of one product [FLOP]; a multiply-add counts two."""
        return 2.0 * math.prod(self.sizes[n] for n in left | right)

    def kept(self, members: frozenset[int]) -> frozenset[int]:
        """Labels that the product of some leaves still has: those that are wanted elsewhere."""
        inside = {n for k in members for n in self.labels[k]}
        others = (n for k, ls in enumerate(self.labels) if k not in members for n in ls)
        return frozenset(inside & {*others, *self.out})

    def best(self, price: Price | None = None) -> Order:
        """The cheapest order; the program's own if none is cheaper.

        Args:
            price: Of one product, from the labels of its operands and of its result; by default
                its operations.
        """
        price = price or self.flops
        count = len(self.leaves)
        full = (1 << count) - 1
        inside = [0] * (full + 1)  # per set of leaves, as bits: its labels, as bits
        for members in range(1, full + 1):
            lowest = (members & -members).bit_length() - 1
            mine = sum(1 << n for n in set(self.labels[lowest]))
            inside[members] = inside[members & (members - 1)] | mine
        wanted = sum(1 << n for n in set(self.out))
        kept = [inside[m] & (inside[full ^ m] | wanted) for m in range(full + 1)]
        prices: dict[tuple[int, int, int], float] = {}
        best: list[tuple[float, Order]] = [(0.0, 0)] * (full + 1)
        for members in range(1, full + 1):
            if members & (members - 1) == 0:
                best[members] = 0.0, members.bit_length() - 1
                continue
            lowest, found = members & -members, (math.inf, members)
            part = (members - 1) & members
            while part:
                if part & lowest:
                    other = members ^ part
                    key = kept[part], kept[other], kept[members]
                    if key not in prices:
                        prices[key] = price(*map(_labels, key))
                    cost = best[part][0] + best[other][0] + prices[key]
                    if cost < found[0]:
                        found = cost, part
                part = (part - 1) & members
            left = found[1]
            best[members] = found[0], (best[left][1], best[members ^ left][1])
        cost, order = best[full]
        return order if cost < self.cost(self.order, price) * (1 - TIE) else self.order


def _labels(bits: int) -> frozenset[int]:
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def einsum_of(root: ir.Operation, limit: int = MAX_LEAVES) -> Einsum | None:
    """The einsum that ends in a product; None where it is part of a larger one, or of two factors.

    Products are joined where nothing else reads the inner one and both compute alike: the same
    element type throughout, the same precision and algorithm.
    """
    if root.name != DOT or not _is_plain(root) or _outer(root) is not None:
        return None
    counter = itertools.count()
    sizes: dict[int, int] = {}
    leaves: list[Value] = []
    labels: list[tuple[int, ...]] = []
    dots: list[ir.Operation] = []

    def fresh(shape: Sequence[int]) -> tuple[int, ...]:
        made = tuple(next(counter) for _ in shape)
        sizes.update(zip(made, shape, strict=True))
        return made

    def expand(value: Value, named: tuple[int, ...], room: int) -> Order:
        maker = maker_of(value)
        inner = maker is not None and (maker == root or _is_read_once(value, root.block))
        if maker is not None and inner and maker.name == TRANSPOSE:
            moved = dict(zip(permutation_of(maker), named, strict=True))
            behind = maker.operands[0]
            if _joins(behind, root):
                return expand(behind, tuple(moved[d] for d in range(len(named))), room)
        if maker is not None and inner and room > 1 and (maker == root or _joins(value, root)):
            dots.append(maker)
            left, right = operand_labels(maker, named, fresh)
            before = len(leaves)
            first = expand(maker.operands[0], left, room - 1)
            return first, expand(maker.operands[1], right, room - len(leaves) + before)
        leaves.append(value)
        labels.append(named)
        return len(leaves) - 1

    out = fresh(shape_of(root.results[0]))
    order = expand(root.results[0], out, limit)
    if len(leaves) < 3:
        return None
    return Einsum(tuple(leaves), tuple(labels), out, sizes, order, tuple(dots))


def operand_labels(
    dot: ir.Operation, out: Sequence[int], fresh: Callable[[Sequence[int]], tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Labels of a product's operands, given those of its result; summed ones are made anew."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    batch = (list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions))
    summed = (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions))
    lhs = shape_of(dot.operands[0])
    named = fresh([lhs[d] for d in summed[0]])
    rest = iter(out[len(batch[0]) :])
    sides = []
    for side, value in enumerate(dot.operands):
        known = dict(zip(batch[side], out, strict=False)) | dict(
            zip(summed[side], named, strict=True)
        )
        sides.append(
            tuple(known[d] if d in known else next(rest) for d in range(len(shape_of(value))))
        )
    return sides[0], sides[1]


def contract(einsum: Einsum, order: Order) -> Value:
    """Write the products of an order before the last product of the program's own.

    Returns:
        The result, with its dimensions in the program's order.
    """
    root = einsum.dots[0]
    location = ir.Location.fused([dot.location for dot in einsum.dots])

    def write(order: Order) -> tuple[Value, tuple[int, ...], frozenset[int]]:
        if isinstance(order, int):
            return einsum.leaves[order], einsum.labels[order], frozenset((order,))
        one, other = map(write, order)
        if min(other[2]) < min(one[2]):
            one, other = other, one
        members = one[2] | other[2]
        keep = einsum.kept(members)
        made, labels = _product(root, location, one[:2], other[:2], keep)
        if members == frozenset(range(len(einsum.leaves))) and labels != einsum.out:
            swapped, other_labels = _product(root, location, other[:2], one[:2], keep)
            if other_labels == einsum.out:
                made, labels = swapped, other_labels
        return made, labels, members

    made, labels, _ = write(order)
    if labels == einsum.out:
        return made
    return transposed(root, made, [labels.index(n) for n in einsum.out], location)


def _product(
    like: ir.Operation,
    location: ir.Location,
    one: tuple[Value, tuple[int, ...]],
    other: tuple[Value, tuple[int, ...]],
    keep: frozenset[int],
) -> tuple[Value, tuple[int, ...]]:
    """A product of two labelled values, computed like another; with the labels of the result."""
    (lhs, left), (rhs, right) = one, other
    batch = [n for n in left if n in right and n in keep]
    summed = [n for n in left if n in right and n not in keep]
    free = [n for n in (*left, *right) if n not in batch and n not in summed]
    labels = (*batch, *free)
    sizes = dict(zip(left, shape_of(lhs), strict=True)) | dict(
        zip(right, shape_of(rhs), strict=True)
    )
    numbers = (
        [left.index(n) for n in batch],
        [right.index(n) for n in batch],
        [left.index(n) for n in summed],
        [right.index(n) for n in summed],
    )
    made = product(like, lhs, rhs, numbers, [sizes[n] for n in labels], location)
    return made, labels


def product(
    like: ir.Operation,
    lhs: Value,
    rhs: Value,
    numbers: Sequence[Sequence[int]],
    shape: Sequence[int],
    location: ir.Location | None = None,
    before: ir.Operation | None = None,
    element: ir.Type | None = None,
) -> Value:
    """Write a ``dot_general`` with the precision of another.

    Args:
        like: The other.
        lhs: First operand.
        rhs: Second operand.
        numbers: Batch dimensions of both operands, then summed dimensions of both.
        shape: Sizes of the result.
        location: Where it comes from; that of ``like`` by default.
        before: What it is written before; ``like`` by default.
        element: Element type of the result; that of ``like`` by default.
    """
    element = element or ir.RankedTensorType(like.results[0].type).element_type
    attributes = {name: like.attributes[name] for name in map(str, like.attributes)}
    attributes.pop("sdy.sharding", None)
    attributes["dot_dimension_numbers"] = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(numbers[0]),
        rhs_batching_dimensions=list(numbers[1]),
        lhs_contracting_dimensions=list(numbers[2]),
        rhs_contracting_dimensions=list(numbers[3]),
    )
    made = ir.Operation.create(
        DOT,
        results=[ir.RankedTensorType.get(list(shape), element)],
        operands=[lhs, rhs],
        attributes=attributes,
        loc=location or like.location,
        ip=ir.InsertionPoint(like if before is None else before),
    )
    return cast(Value, made.results[0])


def dot_numbers(dot: ir.Operation) -> list[list[int]]:
    """Batch dimensions of both operands, then summed dimensions of both."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    return [
        list(numbers.lhs_batching_dimensions),
        list(numbers.rhs_batching_dimensions),
        list(numbers.lhs_contracting_dimensions),
        list(numbers.rhs_contracting_dimensions),
    ]


def product_sizes(dot: ir.Operation) -> tuple[int, int, int, int]:
    """Sizes (batch, m, n, k) of a product."""
    numbers = dot_numbers(dot)
    lhs, rhs = (shape_of(value) for value in dot.operands)
    batch = math.prod(lhs[d] for d in numbers[0])
    summed = math.prod(lhs[d] for d in numbers[2])
    each = max(1, batch * summed)
    return batch, math.prod(lhs) // each, math.prod(rhs) // each, summed


def dot_flops(module: ir.Module) -> float:
    """Operations of all products in one call [FLOP], loops as often as they are known to run."""
    return sum(
        2.0 * math.prod(product_sizes(operation)) * executions(operation)
        for operation in operations(main_block(module))
        if operation.name == DOT
    )


def transposed(
    before: ir.Operation, value: Value, permutation: Sequence[int], location: ir.Location
) -> Value:
    """Write a transpose before an op: dimension ``d`` of the result is ``permutation[d]`` of it."""
    shape = shape_of(value)
    element = ir.RankedTensorType(value.type).element_type
    made = ir.Operation.create(
        TRANSPOSE,
        results=[ir.RankedTensorType.get([shape[d] for d in permutation], element)],
        operands=[value],
        attributes={"permutation": ir.DenseI64ArrayAttr.get(list(permutation))},
        loc=location,
        ip=ir.InsertionPoint(before),
    )
    return cast(Value, made.results[0])


def _is_read_once(value: Value, block: ir.Block) -> bool:
    """Whether one op of the block reads a value, once, and nothing else does."""
    uses = list(value.uses)
    return len(uses) == 1 and uses[0].owner.operation.block == block


def _is_plain(dot: ir.Operation) -> bool:
    """Whether a product computes in the element type of its operands."""
    types = [ir.RankedTensorType(v.type).element_type for v in (*dot.operands, *dot.results)]
    return all(t == types[0] for t in types)


def _joins(value: Value, root: ir.Operation) -> bool:
    """Whether a value is a product, read once in the root's block, that computes like it."""
    maker = maker_of(value)
    return (
        maker is not None
        and maker.name == DOT
        and maker.block == root.block
        and _is_read_once(value, root.block)
        and _computes_like(maker, root)
    )


def _computes_like(one: ir.Operation, other: ir.Operation) -> bool:
    element = [ir.RankedTensorType(o.results[0].type).element_type for o in (one, other)]
    return (
        _is_plain(one)
        and element[0] == element[1]
        and all(
            (name in one.attributes) == (name in other.attributes)
            and (name not in one.attributes or one.attributes[name] == other.attributes[name])
            for name in ("precision_config", "algorithm")
        )
    )


def _outer(dot: ir.Operation) -> ir.Operation | None:
    """The product of a larger tree that takes this one in."""
    value = cast(Value, dot.results[0])
    while _is_read_once(value, dot.block):
        reader = next(iter(value.uses)).owner.operation
        if reader.name == DOT:
            return reader if _is_plain(reader) and _computes_like(dot, reader) else None
        if reader.name != TRANSPOSE:
            return None
        value = cast(Value, reader.results[0])
    return None


def executions(operation: ir.Operation) -> int:
    """How often an op runs in one call of the program; unknown trip counts count once."""
    times, around = 1, operation.parent
    while around is not None:
        inside = around.operation
        if inside.name == "stablehlo.while":
            times *= trip_count(inside) or 1
        around = inside.parent
    return times
