"""Which factors of an op may be split unevenly: what XLA then pads, masks and gets right."""

from __future__ import annotations

from autoshard.graph import Op
from autoshard.kinds import ELEMENTWISE

PADDED = frozenset(
    [f"{dialect}.{kind}" for dialect in ("stablehlo", "chlo") for kind in ELEMENTWISE]
    + [
        f"stablehlo.{kind}"
        for kind in (
            "broadcast_in_dim",
            "concatenate",
            "convolution",
            "dot_general",
            "dynamic_slice",
            "dynamic_update_slice",
            "gather",
            "pad",
            "reduce",
            "reduce_window",
            "reshape",
            "reverse",
            "select_and_scatter",
            "slice",
            "sort",
            "transpose",
        )
    ]
)
"""Ops that random plans with uneven factors were seen to run right and as priced.

Not ``scatter``: XLA gathers unevenly split indices.
"""


def may_pad(
    op: Op,
    factor: int,
    operand_shapes: list[tuple[int, ...]],
    result_shapes: list[tuple[int, ...]],
) -> bool:
    """Whether a factor may be split into uneven parts."""
    rule = op.rule
    assert rule is not None
    if op.name not in PADDED or op.piecewise:
        return False
    for tensors, shapes in ((rule.operands, operand_shapes), (rule.results, result_shapes)):
        for tensor, shape in zip(tensors, shapes, strict=True):
            for factors, size in zip(tensor, shape, strict=True):
                if factor in factors and (factors != (factor,) or size != rule.sizes[factor]):
                    return False
    return True


def masked_dims(op: Op, position: int) -> tuple[int, ...]:
    """Dimensions of an operand whose padding XLA sets to zero in a copy: a product sums over it.

    A reduction masks its operand as it reads it.
    """
    rule = op.rule
    if op.name != "stablehlo.dot_general" or rule is None:
        return ()
    dims = enumerate(rule.operands[position])
    return tuple(d for d, factors in dims if {rule.kinds[f] for f in factors} == {"reduction"})
