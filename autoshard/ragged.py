"""Ragged products (``chlo.ragged_dot``): rows in groups, each group with its own matrix.

``jax.lax.ragged_dot`` and its gradients are written so for TPU and GPU, with jax 0.10.2 and 0.12.0
alike; for CPU JAX writes masks and dots instead. Shardy has no rule for the op. XLA's partitioner
splits dimensions that belong to one operand, sums over split contracting ones, and gathers the
grouped dimension and the groups (seen in jaxlib 0.10.2 before and after partitioning, and in
programs compiled for v5e).

Its arithmetic is counted as that of one masked product per group: what libtpu 0.0.52 compiles for
v5e, and what JAX writes for CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from jax.extend.mlir import ir

from autoshard.program import shape_of

RAGGED_DOT = "chlo.ragged_dot"


def _dims(operation: ir.Operation) -> Callable[[str], list[int]]:
    """From a field of the op's dimension numbers to its dimensions; those left out are empty."""
    text = str(operation.attributes["ragged_dot_dimension_numbers"])

    def read(field: str) -> list[int]:
        found = re.search(rf"\b{field} = \[([\d, ]*)\]", text)
        return [int(number) for number in found[1].split(",")] if found else []

    return read


def ragged_formula(operation: ir.Operation) -> str | None:
    """How a ragged product may be split, as :mod:`autoshard.rules` writes it.

    ``m k, g k n, g -> m n; sum k; whole m g`` if the rows ``m`` of the result are in groups;
    ``m k, m n, g -> g k n; whole m g`` if each group has a product of its own, as in the gradient
    of the matrices. None, which leaves the op whole, if it has batch dimensions.
    """
    read = _dims(operation)
    if read("lhs_batching_dimensions") or read("rhs_batching_dimensions"):
        return None
    lhs, rhs = (shape_of(operation.operands[k]) for k in (0, 1))
    (ragged,) = read("lhs_ragged_dimensions")
    left = {d: f"m{d}" for d in range(len(lhs))}
    right = {d: f"n{d}" for d in range(len(rhs))}
    contracted = list(
        zip(read("lhs_contracting_dimensions"), read("rhs_contracting_dimensions"), strict=True)
    )
    for mine, theirs in contracted:
        left[mine] = right[theirs] = f"k{mine}"
    groups = read("rhs_group_dimensions")
    right.update(dict.fromkeys(groups, "g"))
    free_left = [name for d, name in left.items() if d not in {mine for mine, _ in contracted}]
    free_right = [
        name
        for d, name in right.items()
        if d not in {theirs for _, theirs in contracted} and d not in groups
    ]
    result = [*([] if groups else ["g"]), *free_left, *free_right]
    summed = [left[mine] for mine, _ in contracted if mine != ragged]
    sides = f"{' '.join(left.values())}, {' '.join(right.values())}, g -> {' '.join(result)}"
    return sides + (f"; sum {' '.join(summed)}" if summed else "") + f"; whole {left[ragged]} g"


def ragged_flops(operation: ir.Operation) -> float:
    """Operations of one product per group over all rows [FLOP]."""
    read = _dims(operation)
    lhs, rhs, groups = (shape_of(operation.operands[k]) for k in (0, 1, 2))
    shared = (*read("lhs_contracting_dimensions"), *read("lhs_batching_dimensions"))
    once = 2.0 * math.prod(lhs) * math.prod(rhs) / max(1, math.prod(lhs[d] for d in shared))
    return once if read("rhs_group_dimensions") else once * groups[-1]
