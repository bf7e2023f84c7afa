"""``quantize``: products with weights in few bits, for serving; and what that does to accuracy."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.errors import InputError
from autoshard.passes.context import PassContext, Rewrites
from autoshard.passes.contraction import DOT
from autoshard.passes.driver import blocks, remove_dead
from autoshard.passes.evaluate import Array, evaluate, random_arguments
from autoshard.passes.exchanges import bits_of, nbytes_of
from autoshard.passes.loop_exchanges import WHILE, following, with_sums
from autoshard.passes.module_state import copy_of
from autoshard.passes.quantized import (
    BITS,
    Narrow,
    WeightedDot,
    quantize_dot,
    weighted_dot,
)
from autoshard.passes.registry import register_pass
from autoshard.program import Value, main_block, shape_of, source_of, terminator

PATTERN = "quantize"


@dataclass(frozen=True, slots=True)
class QuantizedDot:
    """One product that was quantized.

    Attributes:
        source: ``file.py:line`` of the product.
        argument: Name of the argument that its weight comes from.
        nbytes: Size of that argument [bytes].
        stored_bytes: What it would take if the caller kept it in few bits, scales left out [bytes].
    """

    source: str
    argument: str
    nbytes: int
    stored_bytes: int


@register_pass(
    "quantize",
    summary="Multiplies with weights (and activations) rounded to few bits, scaled per channel",
    preserves=("boundary", "effects"),
)
@dataclass(frozen=True)
class Quantize:
    """Products in few bits.

    Arguments stay as they are: weights are rounded when the program runs, so that it computes what
    a program with stored weights would. What storing them would save is in the published list of
    :class:`QuantizedDot`; the caller's arrays are the caller's to convert. A quantized product
    reads no weight any more but what is made of one, so the pass is idempotent.

    Attributes:
        dtype: The type to round to.
        weights_only: Whether activations stay as they are; otherwise both operands are rounded and
            multiplied in few bits.
        weights: Names of arguments (``*`` stands for anything) whose products are quantized; all
            that are large enough if none is named.
        least: Elements that an argument must have to be taken for a weight.
    """

    dtype: Narrow = "int8"
    weights_only: bool = True
    weights: tuple[str, ...] = ()
    least: int = 1024

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place; publishes a tuple of :class:`QuantizedDot`.

        Raises:
            InputError: Both operands are to be four-bit integers.
        """
        if self.dtype == "int4" and not self.weights_only:
            raise InputError(
                "products of four-bit activations are not known here",
                at="quantize{dtype=int4,weights-only=false}",
                fix="weights-only=true, or dtype=int8",
            )
        made = []
        for found, name in self.chosen(module, context):
            if not context.allow(PATTERN, found.dot):
                continue
            result = quantize_dot(found, self.dtype, weights_only=self.weights_only)
            found.dot.results[0].replace_all_uses_with(result)
            value = main_block(module).arguments[found.argument]
            stored = math.ceil(math.prod(shape_of(value)) * BITS[self.dtype] / 8)
            made.append(QuantizedDot(source_of(found.dot), name, nbytes_of(value), stored))
        for block in reversed(list(blocks(module))):
            remove_dead(block)
        context.publish("quantize", tuple(made))

    def chosen(self, module: ir.Module, context: PassContext) -> list[tuple[WeightedDot, str]]:
        """The products to quantize, in order, each with the name of its weight.

        Raises:
            InputError: An argument is named that is none.
        """
        names = [b.name for b in context.boundaries_of(module).arguments]
        main = main_block(module)
        found = []
        for block in blocks(module):
            for op in block.operations:
                weighted = weighted_dot(module, op.operation) if op.operation.name == DOT else None
                if weighted is None:
                    continue
                name, value = names[weighted.argument], main.arguments[weighted.argument]
                element = ir.RankedTensorType(value.type).element_type
                small = math.prod(shape_of(value)) < self.least
                if self.weights and not any(_is_called(name, w) for w in self.weights):
                    continue
                if bits_of(element) > BITS[self.dtype] and (self.weights or not small):
                    found.append((weighted, name))
        for wanted in self.weights:
            if not any(_is_called(name, wanted) for name in names):
                known = ", ".join(names[:8])
                raise InputError(
                    f"no argument is called {wanted}",
                    at="option weights of quantize",
                    fix=f"arguments are called {known}; * stands for anything",
                )
        return found


def _is_called(name: str, wanted: str) -> bool:
    return name == wanted or fnmatch.fnmatchcase(name, wanted.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class DotAccuracy:
    """What rounding does to one product, all others left as they are.

    Attributes:
        quantized: Which one.
        relative_error: Norm of the difference over the norm of the product, over all iterations of
            the loops it is in; NaN inside a conditional, where it is not measured.
        result_error: Largest relative error of a result of the program.
    """

    quantized: QuantizedDot
    relative_error: float
    result_error: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What quantization does to a program's values.

    Attributes:
        dots: One per product.
        result_errors: With all products quantized: per result, the norm of the difference over the
            norm of the result.
    """

    dots: tuple[DotAccuracy, ...]
    result_errors: tuple[float, ...]

    def __str__(self) -> str:
        lines = [
            f"{d.quantized.argument} ({d.quantized.source}): product {d.relative_error:.2%}, "
            f"results {d.result_error:.2%}"
            for d in self.dots
        ]
        worst = max(self.result_errors, default=0.0)
        return "\n".join([*lines, f"all together: results {worst:.2%}"])


@dataclass(slots=True)
class _Only(Rewrites):
    """Allows one rewrite."""

    wanted: int = 0
    asked: int = field(default=-1)

    def allow(self, pattern: str, op: ir.Operation) -> bool:
        self.asked += 1
        return self.asked == self.wanted


def accuracy(
    module: ir.Module,
    quantize: Quantize,
    arguments: Sequence[Array] | None = None,
    context: PassContext | None = None,
) -> Accuracy:
    """Measure what a quantization does, product by product and all together.

    The module is left as it is. It is compiled and run on the CPU twice for every product.

    Args:
        module: The program, not sharded, with calls inlined (pass ``flatten-calls``).
        quantize: The pass.
        arguments: Its arguments; random numbers if None, which are no trained weights: outliers,
            which cost accuracy, are rare among them.
        context: Names of arguments, and the seed of random ones.
    """
    context = PassContext() if context is None else context
    given = random_arguments(module, context.seed) if arguments is None else tuple(arguments)
    exact = evaluate(module, given)
    dots = []
    for number in range(len(quantize.chosen(module, context))):
        copy, alone = copy_of(module), _Only(wanted=number)
        (found,) = _quantized(copy, quantize, context, alone)
        errors = _errors(evaluate(copy, given), exact)
        dots.append(
            DotAccuracy(found, _dot_error(module, quantize, number, given, context), max(errors))
        )
    together = copy_of(module)
    _quantized(together, quantize, context, Rewrites())
    return Accuracy(tuple(dots), tuple(_errors(evaluate(together, given), exact)))


def _quantized(
    module: ir.Module, quantize: Quantize, context: PassContext, rewrites: Rewrites
) -> tuple[QuantizedDot, ...]:
    own = PassContext(boundaries=context.boundaries, rewrites=rewrites)
    with module.context, ir.Location.unknown():
        quantize.run(module, own)
    return cast("tuple[QuantizedDot, ...]", own.results["quantize"])


def _dot_error(
    module: ir.Module,
    quantize: Quantize,
    number: int,
    arguments: Sequence[Array],
    context: PassContext,
) -> float:
    """The relative error of one product on what it is given in the exact program."""
    copy = copy_of(module)
    with copy.context, ir.Location.unknown():
        found, _ = quantize.chosen(copy, context)[number]
        rounded = quantize_dot(found, quantize.dtype, weights_only=quantize.weights_only)
        after = following(found.dot)
        with found.dot.location, ir.InsertionPoint(after):
            whole = _wide(found.dot.results[0])
            apart = cast(Value, stablehlo.subtract(_wide(rounded), whole))
            sums = [_square_sum(apart), _square_sum(whole)]
        block = found.dot.block
        while block != main_block(copy):
            around = block.owner.operation
            if around.name != WHILE or block != around.regions[1].blocks[0]:
                return math.nan
            around, sums = with_sums(around, sums)
            block = around.block
        _return_too(copy, sums)
    off, norm = evaluate(copy, arguments)[-2:]
    return math.sqrt(float(off) / float(norm)) if float(norm) else float(off)


def _wide(value: Value) -> Value:
    kind = ir.RankedTensorType.get(list(shape_of(value)), ir.F32Type.get())
    return cast(Value, stablehlo.convert(kind, value))


def _square_sum(value: Value) -> Value:
    """The sum of the squares of all elements, as a product of the value with itself."""
    dims = list(range(len(shape_of(value))))
    numbers = stablehlo.DotDimensionNumbers.get([], [], dims, dims)
    kind = ir.RankedTensorType.get([], ir.F32Type.get())
    return cast(Value, stablehlo.dot_general(kind, value, value, numbers))


def _return_too(module: ir.Module, values: Sequence[Value]) -> None:
    """Make ``main`` return more values."""
    block = main_block(module)
    end, function = terminator(block), block.owner.operation
    returned = [*end.operands, *values]
    with ir.InsertionPoint(end):
        ir.Operation.create(end.name, operands=returned, loc=end.location)
    end.erase()
    inputs = [argument.type for argument in block.arguments]
    kind = ir.FunctionType.get(inputs, [value.type for value in returned])
    function.attributes["function_type"] = ir.TypeAttr.get(kind)
    if "res_attrs" in function.attributes:
        del function.attributes["res_attrs"]


def _errors(found: Sequence[Array], wanted: Sequence[Array]) -> list[float]:
    """Per result, the norm of the difference over the norm of the result."""
    errors = []
    for one, other in zip(found, wanted, strict=True):
        exact = np.asarray(other).astype(np.float64)
        off = float(np.linalg.norm(np.asarray(one).astype(np.float64) - exact))
        norm = float(np.linalg.norm(exact))
        errors.append(off / norm if norm else off)
    return errors
