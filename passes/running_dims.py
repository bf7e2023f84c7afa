"""Dimensions that run together through a program, so that all of them can be made longer at once.

Two dimensions run together where an op makes one from the other, element by element. A sum over
such a dimension stays right if what was added is masked; an index into it, if it is kept from
reaching there. Where an op cannot take a longer dimension, the padding is cut off before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.counting import combiner_of
from autoshard.passes.contraction import DOT, dot_numbers
from autoshard.passes.driver import blocks
from autoshard.program import Value, shape_of, terminator

Dim: TypeAlias = tuple[Value, int]
"""A value and one of its dimensions."""

Use: TypeAlias = tuple[ir.Operation, int, int]
"""An op, the number of an operand, and a dimension of it."""

Kind = Literal["along", "sum", "index"]

_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert"),
        *("cosine", "divide", "exponential", "exponential_minus_one", "floor", "imag"),
        *("is_finite", "log", "log_plus_one", "logistic", "maximum", "minimum", "multiply"),
        *("negate", "not", "or", "power", "real", "remainder", "round_nearest_afz"),
        *("round_nearest_even", "rsqrt", "select", "shift_left", "shift_right_arithmetic"),
        *("shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"),
        *("popcnt", "count_leading_zeros", "optimization_barrier"),
    )
) | {"sdy.sharding_constraint", "chlo.erf", "chlo.erf_inv", "chlo.lgamma", "chlo.digamma"}

REDUCERS = frozenset(
    f"stablehlo.{name}" for name in ("add", "and", "maximum", "minimum", "multiply", "or")
)


@dataclass(frozen=True, slots=True)
class Link:
    """Dimensions that one op ties together.

    Attributes:
        op: The op.
        kind: How: ``along`` from operands to results; a ``sum`` over them; an ``index`` into one.
        uses: The op's operands (and what a loop's body returns) among them.
        made: The op's results (and a loop's arguments) among them.
    """

    op: ir.Operation
    kind: Kind
    uses: tuple[Use, ...]
    made: tuple[Dim, ...] = ()

    @property
    def dims(self) -> list[Dim]:
        """All of them."""
        return [*((op.operands[k], d) for op, k, d in self.uses), *self.made]


@dataclass(frozen=True, slots=True)
class Component:
    """Dimensions that run together.

    Attributes:
        size: Their size.
        dims: The dimensions.
        links: What ties them.
    """

    size: int
    dims: frozenset[Dim]
    links: tuple[Link, ...]

    @property
    def dots(self) -> int:
        """Products that one of them is a dimension of."""
        return len({link.op for link in self.links if link.op.name == DOT})


def components(module: ir.Module) -> list[Component]:
    """The dimensions of a program that run together, those of most products first."""
    links = [
        link
        for block in blocks(module)
        for op in block.operations
        for link in links_of(op.operation)
    ]
    parent: dict[Dim, Dim] = {}

    def root(dim: Dim) -> Dim:
        while parent.setdefault(dim, dim) != dim:
            parent[dim] = parent[parent[dim]]
            dim = parent[dim]
        return dim

    for link in links:
        first, *others = link.dims
        for other in others:
            parent[root(other)] = root(first)
    dims: dict[Dim, list[Dim]] = defaultdict(list)
    tied: dict[Dim, list[Link]] = defaultdict(list)
    for dim in list(parent):
        dims[root(dim)].append(dim)
    for link in links:
        tied[root(link.dims[0])].append(link)
    made = [
        Component(shape_of(key[0])[key[1]], frozenset(together), tuple(tied[key]))
        for key, together in dims.items()
    ]
    return sorted(made, key=lambda c: (-c.dots, -c.size))


def links_of(op: ir.Operation) -> Iterator[Link]:
    """What an op ties together; nothing of what it cannot take longer."""
    name = op.name
    if name in _ELEMENTWISE:
        yield from _elementwise(op)
    elif name == "stablehlo.while":
        yield from _loop(op)
    elif name == DOT:
        yield from _product(op)
    elif name in _OTHERS:
        yield from _OTHERS[name](op)


def _along(op: ir.Operation, *uses: tuple[int, int], out: int) -> Link:
    """Dimensions of operands that become one dimension of the only result."""
    listed = tuple((op, k, d) for k, d in uses)
    return Link(op, "along", listed, ((cast(Value, op.results[0]), out),))


def _elementwise(op: ir.Operation) -> Iterator[Link]:
    if op.name == "stablehlo.optimization_barrier":
        for k, value in enumerate(op.operands):
            for d in range(_rank(value)):
                yield Link(op, "along", ((op, k, d),), ((cast(Value, op.results[k]), d),))
        return
    rank = _rank(op.results[0])
    for d in range(rank):
        yield _along(op, *((k, d) for k, v in enumerate(op.operands) if _rank(v) == rank), out=d)


def _rank(value: Value) -> int:
    return len(shape_of(value))


def _loop(op: ir.Operation) -> Iterator[Link]:
    condition, body = (region.blocks[0] for region in op.regions)
    end = terminator(body)
    for k, value in enumerate(op.operands):
        for d in range(_rank(value)):
            made = (op.results[k], condition.arguments[k], body.arguments[k])
            yield Link(
                op, "along", ((op, k, d), (end, k, d)), tuple((cast(Value, v), d) for v in made)
            )


def _product(op: ir.Operation) -> Iterator[Link]:
    numbers = dot_numbers(op)
    for out, (left, right) in enumerate(zip(numbers[0], numbers[1], strict=True)):
        yield _along(op, (0, left), (1, right), out=out)
    for left, right in zip(numbers[2], numbers[3], strict=True):
        yield Link(op, "sum", ((op, 0, left), (op, 1, right)))
    out = len(numbers[0])
    for side in (0, 1):
        for d in range(_rank(op.operands[side])):
            if d not in numbers[side] and d not in numbers[2 + side]:
                yield _along(op, (side, d), out=out)
                out += 1


def _numbers(op: ir.Operation, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def _broadcast(op: ir.Operation) -> Iterator[Link]:
    dims, whole, part = (
        _numbers(op, "broadcast_dimensions"),
        shape_of(op.results[0]),
        shape_of(op.operands[0]),
    )
    for out in range(len(whole)):
        if out in dims and part[dims.index(out)] == whole[out]:
            yield _along(op, (0, dims.index(out)), out=out)
        else:
            yield _along(op, out=out)


def _transpose(op: ir.Operation) -> Iterator[Link]:
    for out, d in enumerate(_numbers(op, "permutation")):
        yield _along(op, (0, d), out=out)


def _reshape(op: ir.Operation) -> Iterator[Link]:
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    starts = [_starts(before), _starts(after)]
    for d, size in enumerate(before):
        for out, other in enumerate(after):
            if size == other > 1 and starts[0][d] == starts[1][out]:
                yield _along(op, (0, d), out=out)


def _starts(shape: tuple[int, ...]) -> list[int]:
    """Per dimension, how many elements lie before it: the product of the sizes to its left."""
    found, product = [], 1
    for size in shape:
        found.append(product)
        product *= size
    return found


def _reduce(op: ir.Operation) -> Iterator[Link]:
    if len(op.operands) != 2 or combiner_of(op) not in REDUCERS:
        return
    gone, out = _numbers(op, "dimensions"), 0
    for d in range(_rank(op.operands[0])):
        if d in gone:
            yield Link(op, "sum", ((op, 0, d),))
        else:
            yield _along(op, (0, d), out=out)
            out += 1


def _material(op: ir.Operation) -> Iterator[Link]:
    is_iota = op.name == "stablehlo.iota"
    if is_iota or ir.DenseElementsAttr(op.attributes["value"]).is_splat:
        for d in range(_rank(op.results[0])):
            yield _along(op, out=d)


def _slice(op: ir.Operation) -> Iterator[Link]:
    """Dimensions that are taken whole."""
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    for d, (size, other) in enumerate(zip(before, after, strict=True)):
        if size == other:
            yield _along(op, (0, d), out=d)


def _update(op: ir.Operation) -> Iterator[Link]:
    whole, part = shape_of(op.operands[0]), shape_of(op.operands[1])
    for d, (size, other) in enumerate(zip(whole, part, strict=True)):
        if size == other:
            yield _along(op, (0, d), (1, d), out=d)


def _concatenate(op: ir.Operation) -> Iterator[Link]:
    joined = int(ir.IntegerAttr(op.attributes["dimension"]).value)
    for d in range(_rank(op.results[0])):
        if d != joined:
            yield _along(op, *((k, d) for k in range(len(op.operands))), out=d)


def _gather(op: ir.Operation) -> Iterator[Link]:
    numbers: Any = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes, shape = _numbers(op, "slice_sizes"), shape_of(op.operands[0])
    collapsed, batching = list(numbers.collapsed_slice_dims), list(numbers.operand_batching_dims)
    indexed = list(numbers.start_index_map)
    window = [d for d in range(len(shape)) if d not in (*collapsed, *batching)]
    for d, out in zip(window, numbers.offset_dims, strict=True):
        if sizes[d] == shape[d]:
            yield _along(op, (0, d), out=out)
    if len(indexed) == 1 and indexed[0] in collapsed:
        yield Link(op, "index", ((op, 0, indexed[0]),))
    outs = [d for d in range(_rank(op.results[0])) if d not in numbers.offset_dims]
    places = [d for d in range(_rank(op.operands[1])) if d != numbers.index_vector_dim]
    by_batch = dict(zip(numbers.start_indices_batching_dims, batching, strict=True))
    for d, out in zip(places, outs, strict=True):
        also = [(0, by_batch[d])] if d in by_batch else []
        yield _along(op, (1, d), *also, out=out)


def _scatter(op: ir.Operation) -> Iterator[Link]:
    """An index beyond the end writes nothing, or into the padding."""
    if len(op.operands) != 3:
        return
    numbers: Any = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    whole, part = shape_of(op.operands[0]), shape_of(op.operands[2])
    inserted, batching = list(numbers.inserted_window_dims), list(numbers.input_batching_dims)
    indexed = list(numbers.scattered_dims_to_operand_dims)
    for d in inserted:
        yield _along(op, (0, d), out=d)
    window = [d for d in range(len(whole)) if d not in (*inserted, *batching)]
    for d, place in zip(window, numbers.update_window_dims, strict=True):
        if d not in indexed and whole[d] == part[place]:
            yield _along(op, (0, d), (2, place), out=d)
    places = [d for d in range(_rank(op.operands[1])) if d != numbers.index_vector_dim]
    updates = [d for d in range(len(part)) if d not in numbers.update_window_dims]
    by_batch = dict(zip(numbers.scatter_indices_batching_dims, batching, strict=True))
    for d, update in zip(places, updates, strict=True):
        if d in by_batch:
            yield _along(op, (0, by_batch[d]), (1, d), (2, update), out=by_batch[d])


_OTHERS = {
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.constant": _material,
    "stablehlo.dynamic_slice": _slice,
    "stablehlo.dynamic_update_slice": _update,
    "stablehlo.gather": _gather,
    "stablehlo.iota": _material,
    "stablehlo.reduce": _reduce,
    "stablehlo.reshape": _reshape,
    "stablehlo.scatter": _scatter,
    "stablehlo.slice": _slice,
    "stablehlo.transpose": _transpose,
}
