"""What a convolution or a pooling says of its dimensions beyond a sharding rule."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

SELECT_AND_SCATTER = "stablehlo.select_and_scatter"


@dataclass(frozen=True, slots=True)
class Window:
    """How an op with a window lays out and pads its operands.

    Attributes:
        orders: Of a convolution, the dimensions of both operands and of the result in the order of
            a convolution library: images, positions, features; of the kernel positions, input
            features, output features. Empty for an operand that is brought there in any case.
        padding: Of a pooling's gradient, by how much each dimension of the pooled is padded.
    """

    orders: tuple[tuple[int, ...], ...] = ()
    padding: tuple[int, ...] = ()


def window_of(operation: ir.Operation) -> Window | None:
    """The window of a convolution or of a pooling's gradient; None for other ops."""
    if operation.name == "stablehlo.convolution":
        n = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        lhs = (n.input_batch_dimension, *n.input_spatial_dimensions, n.input_feature_dimension)
        kernel = (
            *n.kernel_spatial_dimensions,
            n.kernel_input_feature_dimension,
            n.kernel_output_feature_dimension,
        )
        out = (n.output_batch_dimension, *n.output_spatial_dimensions, n.output_feature_dimension)
        by_batch = ir.IntegerAttr(operation.attributes["batch_group_count"]).value > 1
        # See autoshard.grouped: the groups move into the features.
        return Window(orders=(() if by_batch else lhs, kernel, out))
    if operation.name == SELECT_AND_SCATTER:
        rank = ir.RankedTensorType(operation.operands[0].type).rank
        padding = (0,) * rank
        if "padding" in operation.attributes:
            given = ir.DenseIntElementsAttr(operation.attributes["padding"])
            sides = [int(given[0 if given.is_splat else n]) for n in range(2 * rank)]
            padding = tuple(a + b for a, b in zip(sides[::2], sides[1::2], strict=True))
        return Window(padding=padding)
    return None
