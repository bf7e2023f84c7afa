"""``reassociate``: cheaper orders of products, and transposes that disappear into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from jax.extend.mlir import ir

from autoshard.cost_models import COST_MODELS
from autoshard.passes.context import PassContext
from autoshard.passes.contraction import (
    DOT,
    TRANSPOSE,
    Einsum,
    Price,
    contract,
    dot_numbers,
    einsum_of,
    product,
    transposed,
)
from autoshard.passes.driver import apply_patterns
from autoshard.passes.fold_transpose import PATTERNS, permutation_of
from autoshard.passes.patterns import Pattern, maker_of, sharding_of
from autoshard.passes.prices import ShardedProducts, axes_of_labels
from autoshard.passes.registry import register_pass
from autoshard.passes.replacing import Make, replacing
from autoshard.program import Value, main_block, shape_of
from autoshard.shardings import Sharding

_UNARY = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "cbrt", "ceil", "convert", "cosine", "exponential", "exponential_minus_one"),
        *("floor", "log", "log_plus_one", "logistic", "negate", "not", "rsqrt", "sign", "sine"),
        *("sqrt", "tan", "tanh"),
    )
)
_BINARY = frozenset(
    f"stablehlo.{name}" for name in ("add", "divide", "maximum", "minimum", "multiply", "subtract")
)


@register_pass(
    "reassociate",
    summary="Multiplies in the cheapest order, and folds transposes into products",
    preserves=("numerics", "boundary", "effects"),
)
@dataclass(frozen=True)
class Reassociate:
    """Products in a cheaper order, and transposes taken into them.

    Sums are taken in another order: floating-point values agree within rounding, integers exactly.

    Attributes:
        products: Whether products change their order.
        transposes: Whether transposes are folded.
        cost: ``flops`` counts operations. ``time`` asks the cost model for the time of the pieces
            that devices hold, all-reduces of what is summed over split dimensions included; factors
            are split as the caller pinned them or the module constrains them.
    """

    products: bool = True
    transposes: bool = True
    cost: Literal["flops", "time"] = "flops"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place.

        Raises:
            InputError: Times are asked for, of no mesh.
        """
        transposes = (*PATTERNS, fold_result, sink_transpose) if self.transposes else ()
        apply_patterns(module, transposes, context)
        if self.products:
            order = _reorder(self._price(module, context))
            apply_patterns(module, (*transposes, order), context)

    def _price(self, module: ir.Module, context: PassContext) -> Pricing:
        if self.cost == "flops":
            return lambda einsum: None
        mesh, given = context.needed_mesh("reassociate"), context.boundaries
        model = context.cost_model or COST_MODELS["cpu"]()
        main = main_block(module)

        def sharding(value: Value) -> Sharding | None:
            argument = maker_of(value) is None and value.owner == main
            if argument and given is not None:
                # Not what the module says: it says more once there is a plan.
                return given.arguments[ir.BlockArgument(value).arg_number].pin
            return sharding_of(value)

        def price(einsum: Einsum) -> Price:
            axes = axes_of_labels(einsum, [sharding(leaf) for leaf in einsum.leaves])
            element = ir.RankedTensorType(einsum.leaves[0].type).element_type
            return ShardedProducts(model, mesh, einsum.sizes, axes, element)

        return price


Pricing = Callable[[Einsum], Price | None]
"""From an einsum to what prices its products; None for their operations."""


def _reorder(pricing: Pricing) -> Pattern:
    """The pattern that puts products into the cheapest order."""

    @replacing("order", DOT)
    def reorder(dot: ir.Operation) -> Make | None:
        einsum = einsum_of(dot)
        if einsum is None:
            return None
        best = einsum.best(pricing(einsum))
        if best == einsum.order:
            return None
        return lambda: contract(einsum, best)

    return reorder


@replacing("fold-result", TRANSPOSE)
def fold_result(transpose: ir.Operation) -> Make | None:
    """``transpose(dot(x, y))`` -> ``dot(y, x)``, where the transpose swaps the operands' parts."""
    dot = maker_of(transpose.operands[0])
    if dot is None or dot.name != DOT or len(list(dot.results[0].uses)) != 1:
        return None
    if dot.block != transpose.block:
        return None
    numbers, moved = dot_numbers(dot), list(permutation_of(transpose))
    batch = len(numbers[0])
    left = len(shape_of(dot.operands[0])) - batch - len(numbers[2])
    free = list(range(batch, len(moved)))
    if sorted(moved[:batch]) != list(range(batch)):
        return None
    swapped = free[left:] + free[:left]
    if moved[batch:] not in (swapped, free):
        return None
    for side in (0, 1):
        numbers[side] = [numbers[side][d] for d in moved[:batch]]
    values = list(dot.operands)
    if moved[batch:] != free:
        values.reverse()
        numbers = [numbers[1], numbers[0], numbers[3], numbers[2]]
    element = ir.RankedTensorType(dot.results[0].type).element_type
    assert element == ir.RankedTensorType(transpose.results[0].type).element_type
    return lambda: product(
        dot, values[0], values[1], numbers, shape_of(transpose.results[0]), before=transpose
    )


@replacing("sink-transpose", *_UNARY, *_BINARY)
def sink_transpose(operation: ir.Operation) -> Make | None:
    """``f(transpose(x))`` -> ``transpose(f(x))``, where products or transposes can take it in."""
    if not _reaches_products(operation):
        return None
    makers = [maker_of(value) for value in operation.operands]
    turned = [m for m in makers if m is not None and m.name == TRANSPOSE]
    if not turned or any(permutation_of(t) != permutation_of(turned[0]) for t in turned):
        return None
    if any(len(list(t.results[0].uses)) > turned.count(t) for t in turned):
        return None  # it stays for others to read, so nothing is gained
    if any(m is None or not (m in turned or _is_splat(m)) for m in makers):
        return None
    moved, shape = permutation_of(turned[0]), shape_of(turned[0].operands[0])

    def make() -> Value:
        values = [
            m.operands[0] if m.name == TRANSPOSE else _splat(m, shape, operation)
            for m in makers
            if m is not None
        ]
        element = ir.RankedTensorType(operation.results[0].type).element_type
        made = ir.Operation.create(
            operation.name,
            results=[ir.RankedTensorType.get(list(shape), element)],
            operands=values,
            attributes={
                name: operation.attributes[name]
                for name in map(str, operation.attributes)
                if name != "sdy.sharding"
            },
            loc=operation.location,
            ip=ir.InsertionPoint(operation),
        )
        return transposed(operation, cast(Value, made.results[0]), moved, turned[0].location)

    return make


def _reaches_products(operation: ir.Operation, depth: int = 8) -> bool:
    """Whether all that reads an op's result, through elementwise ops, can take a transpose in."""
    uses = list(operation.results[0].uses)
    return bool(uses) and all(
        use.owner.name in (DOT, TRANSPOSE)
        or (
            depth > 0
            and _is_of_one_value(use.owner.operation)
            and _reaches_products(use.owner.operation, depth - 1)
        )
        for use in uses
    )


def _is_of_one_value(operation: ir.Operation) -> bool:
    """Whether an op is elementwise in one value; others may be the same number everywhere."""
    if operation.name in _UNARY:
        return True
    makers = [maker_of(value) for value in operation.operands]
    return operation.name in _BINARY and any(m is not None and _is_splat(m) for m in makers)


def _is_splat(maker: ir.Operation) -> bool:
    """Whether all elements of what an op makes are one scalar."""
    if maker.name == "stablehlo.broadcast_in_dim":
        return not shape_of(maker.operands[0])
    return maker.name == "stablehlo.constant" and bool(
        ir.DenseElementsAttr(maker.attributes["value"]).is_splat
    )


def _splat(maker: ir.Operation, shape: tuple[int, ...], before: ir.Operation) -> Value:
    """The same scalar in another shape."""
    element = ir.RankedTensorType(maker.results[0].type).element_type
    kind = ir.RankedTensorType.get(list(shape), element)
    attributes = {name: maker.attributes[name] for name in map(str, maker.attributes)}
    attributes.pop("sdy.sharding", None)
    if maker.name == "stablehlo.constant":
        scalar = ir.DenseElementsAttr(attributes["value"]).get_splat_value()
        attributes["value"] = ir.DenseElementsAttr.get_splat(kind, scalar)
    made = ir.Operation.create(
        maker.name,
        results=[kind],
        operands=list(maker.operands),
        attributes=attributes,
        loc=maker.location,
        ip=ir.InsertionPoint(before),
    )
    return cast(Value, made.results[0])
