"""``collective-matmul``: products that run while their operands are gathered or scattered."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.mlir import ir

from autoshard.cost_models.protocol import CostModel
from autoshard.passes.context import PassContext
from autoshard.passes.contraction import product_sizes
from autoshard.passes.driver import blocks
from autoshard.passes.exchanges import nbytes_of
from autoshard.passes.prices import dot_s, exchange_s
from autoshard.passes.registry import register_pass
from autoshard.passes.windowed import (
    Gathered,
    Scattered,
    gathered,
    multiply_while_gathering,
    multiply_while_scattering,
    scattered,
)
from autoshard.shardings import MeshShape


@dataclass(frozen=True, slots=True)
class Overlap:
    """What running products beside their collective is predicted to take, for one execution.

    Attributes:
        pattern: ``gather-dot`` or ``dot-scatter``.
        devices: Devices in the ring.
        dots: Products that share the collective.
        apart_s: Collective and products one after the other [s].
        together_s: A piece is multiplied while the next one travels [s].
    """

    pattern: str
    devices: int
    dots: int
    apart_s: float
    together_s: float

    @property
    def gain_s(self) -> float:
        """What is saved [s]; negative where pieces are too small."""
        return self.apart_s - self.together_s


@register_pass(
    "collective-matmul",
    summary="Runs products beside the all-gather they read or the reduce-scatter that reads them",
    preserves=("numerics", "boundary", "effects"),
)
@dataclass(frozen=True)
class CollectiveMatmul:
    """Products a piece at a time, while the next piece is on its way.

    It works on the program of one device. Where the gathered dimension is summed over, parts are
    added up in another order.

    Attributes:
        always: Decompose wherever it can be done; otherwise where the cost model predicts a gain.
        both_ways: Half of each piece travels each way around the ring.
        limit: The largest ring; each of its devices means one more product.
    """

    always: bool = False
    both_ways: bool = False
    limit: int = 16

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place; publishes the list of :class:`Overlap` that were made."""
        made: list[Overlap] = []
        for block in list(blocks(module)):
            collectives = [o.operation for o in block.operations if o.operation.name in _NAMES]
            for operation in collectives:
                found = gathered(operation) or scattered(operation)
                if found is None or not 1 < found.exchange.devices <= self.limit:
                    continue
                model = context.cost_model
                overlap = None
                if model is not None:
                    overlap = overlap_of(model, context.mesh, found, self.both_ways)
                if not self.always and (overlap is None or overlap.gain_s <= 0):
                    continue
                if not context.allow(_pattern(found), operation):
                    continue
                if isinstance(found, Gathered):
                    multiply_while_gathering(found, both_ways=self.both_ways)
                else:
                    multiply_while_scattering(found, both_ways=self.both_ways)
                if overlap is not None:
                    made.append(overlap)
        context.publish("collective-matmul", tuple(made))


_NAMES = ("stablehlo.all_gather", "stablehlo.reduce_scatter")


def _pattern(found: Gathered | Scattered) -> str:
    return "gather-dot" if isinstance(found, Gathered) else "dot-scatter"


def overlap_of(
    model: CostModel, mesh: MeshShape | None, found: Gathered | Scattered, both_ways: bool
) -> Overlap:
    """What a decomposition is predicted to save.

    A ring of n takes n products and n - 1 permutes; each permute runs beside a product. XLA:CPU
    runs one after the other.

    Args:
        model: Prices.
        mesh: The mesh, for the axes along which the ring lies.
        found: What would be decomposed.
        both_ways: Whether half of each piece travels each way.
    """
    exchange, n = found.exchange, found.exchange.devices
    apart_s = exchange_s(model, exchange, mesh, exchange.kind, exchange.nbytes)
    piece_s, parts = 0.0, 2 if both_ways else 1
    for dot, divided, summed in _dots(found):
        whole = product_sizes(dot)
        element = ir.RankedTensorType(dot.operands[0].type).element_type
        sizes = [nbytes_of(value) for value in (*dot.operands, *dot.results)]
        apart_s += dot_s(model, whole, element, sum(sizes))
        pieces = [
            size / n / parts if cut else size for size, cut in zip(sizes, divided, strict=True)
        ]
        if summed:
            pieces[2] *= 2  # what is there already is read as well
        smaller = _smaller(whole, divided, n * parts)
        piece_s += parts * dot_s(model, smaller, element, sum(pieces))
    travelling = exchange.nbytes / n / parts
    permute_s = exchange_s(model, exchange, mesh, "permute", travelling)
    step_s = permute_s + piece_s if model.compiler == "cpu" else max(permute_s, piece_s)
    dots = len(found.readings) if isinstance(found, Gathered) else 1
    return Overlap(_pattern(found), n, dots, apart_s, (n - 1) * step_s + piece_s)


def _dots(found: Gathered | Scattered) -> list[tuple[ir.Operation, tuple[bool, ...], bool]]:
    """Products; which of left, right and result are divided; whether the division is of a sum."""
    if isinstance(found, Scattered):
        left, right = (dim >= 0 for dim in found.dims)
        return [(found.dot, (left, right, True), True)]
    rows = []
    for reading in found.readings:
        sides = [True, reading.other_dim >= 0]
        if reading.side:
            sides.reverse()
        rows.append((reading.dot, (*sides, reading.out_dim >= 0), reading.out_dim < 0))
    return rows


def _smaller(
    sizes: tuple[int, int, int, int], divided: tuple[bool, ...], by: int
) -> tuple[int, int, int, int]:
    """Sizes (batch, m, n, k) of one of ``by`` pieces."""
    left, right, result = divided
    batch, m, n, k = sizes
    if left and right:
        if result:
            return max(1, batch // by), m, n, k
        return batch, m, n, max(1, k // by)
    return (batch, max(1, m // by), n, k) if left else (batch, m, max(1, n // by), k)
