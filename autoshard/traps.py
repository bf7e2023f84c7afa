"""Shardings that XLA's partitioner accepts and then gets wrong, or quietly undoes.

Each was seen in programs that jax 0.10.2 compiles for CPU; none is ever proposed by the planner.
``UNSPLIT`` lists ops that are run whole on every device, :func:`whole_factors` the factors of other
ops that must not be split, :func:`is_trap` combinations. ``tests/test_traps.py`` shows that the
faults are still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

if TYPE_CHECKING:
    from autoshard.graph import Rule

Mapping = tuple[tuple[tuple[int, ...], ...], ...]
"""Per tensor, per dimension, its factors, major to minor."""

UNSPLIT = {
    "stablehlo.rng_bit_generator": "random bits must not depend on the sharding",
    "stablehlo.rng": "random bits must not depend on the sharding",
}
"""Ops that run whole on every device, and why."""

BEYOND_RULES = frozenset({"stablehlo.convolution", "stablehlo.reduce"})
"""Ops of which :func:`whole_factors` looks at more than the sharding rule."""


def is_trap(
    name: str,
    rule: Rule,
    counts: Sequence[int],
    factor_axes: Sequence[tuple[str, ...]],
    axes: Sequence[str],
) -> bool:
    """Whether a way to split an op is wrong although each factor by itself may be split so.

    - ``scatter`` of a single index on each device, into a dimension that is split: XLA turns it
      into a dynamic-update-slice, forgets a clamp when it merges slices of slices
      (``AlgebraicSimplifier``), and devices that do not own the index write their neighbours' rows.
    - ``gather`` and ``scatter`` with both the indices and what they index split, over axes that all
      come after one that splits nothing: XLA numbers the devices in another order and permutes
      operands and results.

    Args:
        name: The op.
        rule: Its sharding rule.
        counts: Into how many parts each factor is split.
        factor_axes: The mesh axes that split each factor.
        axes: All axes of the mesh that can split something, major to minor.
    """
    if name == "stablehlo.gather" and len(rule.operands) == 2:
        tensors = (*rule.operands, rule.results[0])
    elif name == "stablehlo.scatter" and len(rule.operands) == 3:
        tensors = rule.operands
    else:
        return False
    target, indices, slices = ({f for dim in t for f in dim} for t in tensors)
    listed, indexed = (indices & slices) - target, target - slices
    single = all(rule.sizes[f] == counts[f] for f in indices & slices)
    if name == "stablehlo.scatter" and single and any(counts[f] > 1 for f in indexed):
        return True
    both = [{a for f in factors for a in factor_axes[f]} for factors in (listed, indexed)]
    used = {a for split in factor_axes for a in split}
    idle = next((k for k, a in enumerate(axes) if a not in used), len(axes))
    return all(both) and idle < min(axes.index(a) for part in both for a in part)


def whole_factors(operation: ir.Operation, operands: Mapping, results: Mapping) -> frozenset[int]:
    """Factors of an op's sharding rule that must stay whole although the rule lets them be split.

    - ``dynamic_update_slice``, dimensions that the update fills in part, and those of the update
      itself: Shardy passes them through; XLA then rewrites whole shards around the update, and
      gathers a split one.
    - ``convolution``, spatial dimensions: Shardy calls those of a kernel's gradient reductions; XLA
      sums windows over the wrong elements where there is padding, and gives wrong values.
    - ``reduce`` that sums from another start than zero, the dimensions summed: every device starts
      from it, and XLA adds it once per device.
    - ``reduce`` by ``and``, ``or`` or ``xor`` of integers, or ``xor`` of booleans, the dimensions
      reduced: XLA:CPU has no such all-reduce and refuses the program.
    - ``cholesky`` and ``triangular_solve``, the matrix dimensions: XLA gathers them.
    - ``custom_call``, dimensions that not every operand and result has: only batch dimensions can
      be split (``xla.is_batch_partitionable``), others are gathered.
    """
    name = operation.name
    if name == "stablehlo.dynamic_update_slice":
        return frozenset(
            f
            for target, update in zip(operands[0], operands[1], strict=True)
            if target != update
            for f in (*target, *update)
        )
    if name == "stablehlo.convolution":
        return _whole_in_convolution(operation, operands, results)
    if name == "stablehlo.reduce" and not _may_start_often(operation):
        kept = {f for dim in results[0] for f in dim}
        return frozenset(f for dim in operands[0] for f in dim if f not in kept)
    if name in ("stablehlo.cholesky", "stablehlo.triangular_solve"):
        return frozenset(f for tensor in (*operands, *results) for dim in tensor[-2:] for f in dim)
    if name == "stablehlo.custom_call":
        tensors = [{f for dim in tensor for f in dim} for tensor in (*operands, *results) if tensor]
        every = frozenset.intersection(*map(frozenset, tensors)) if tensors else frozenset()
        return frozenset().union(*tensors) - every
    return frozenset()


_IDEMPOTENT = frozenset({"stablehlo.maximum", "stablehlo.minimum", "stablehlo.and", "stablehlo.or"})


def _may_start_often(operation: ir.Operation) -> bool:
    """Whether a reduction may take its start into account more than once."""
    if operation.regions[0].blocks[0].operations[0].operation.name in _IDEMPOTENT:
        return True
    start = operation.operands[len(operation.results)].owner
    if isinstance(start, ir.Block) or start.name != "stablehlo.constant":
        return False
    # As text, e.g. ``dense<-0.000000e+00>``: the bindings do not read every type as a number.
    try:
        text = str(start.attributes["value"])
    except TypeError:  # nor complex numbers at all
        text = start.get_asm(use_local_scope=True)
    value = text.partition("dense<")[2].partition(">")[0]
    return value == "false" or (value != "" and not set(value) - set("0.e+-(), "))


def _whole_in_convolution(
    operation: ir.Operation, operands: Mapping, results: Mapping
) -> frozenset[int]:
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    lhs, kernel, out = *operands, results[0]
    dims = [lhs[d] for d in numbers.input_spatial_dimensions]
    dims += [kernel[d] for d in numbers.kernel_spatial_dimensions]
    dims += [out[d] for d in numbers.output_spatial_dimensions]
    return frozenset(f for factors in dims for f in factors)
