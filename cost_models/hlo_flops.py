"""Floating-point operations of the dots, convolutions and matmul calls of compiled HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from autoshard.cost_models.hlo import Computation, Instruction, Shape

_CONTRACTING = re.compile(r'lhs_contracting_dimensions\W+(\d[\d",]*)')
_WINDOW = re.compile(r"(\w+)=([\w-]+)")
MATMUL_TARGETS = ("__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
"""Custom calls that multiply their first two operands."""


def matmul_flops(instruction: Instruction, where: Computation) -> float | None:
    """Floating-point operations of one execution; a multiply-add counts two.

    A dot costs ``2 * elements of the result * contracted sizes``. A convolution counts products
    with real elements alone, not those with padding or the holes of a dilated operand: so does
    XLA's ``HloCostAnalysis``, and so a batched matmul that XLA:TPU writes as a base-dilated
    convolution comes out right.

    Args:
        instruction: Any instruction.
        where: The computation that holds it.

    Returns:
        Operations [FLOP]; None if the instruction is no product of this kind.
    """
    operands = where.operand_shapes(instruction)
    if len(operands) < 2 or not instruction.shapes:
        return None
    lhs, rhs, out = operands[0], operands[1], instruction.shapes[0]
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        contracted = _numbers(attributes.get("lhs_contracting_dims", ""))
        return 2.0 * out.elements * math.prod(lhs.dims[d] for d in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(lhs, rhs, out, attributes)
    if _target(instruction) in MATMUL_TARGETS:
        found = _CONTRACTING.search(attributes.get("backend_config", ""))
        if found:
            return 2.0 * out.elements * math.prod(lhs.dims[d] for d in _numbers(found[1]))
        # Matrices in the last two dimensions: |lhs| = batch m k and |out| = batch m n.
        return 2.0 * lhs.elements * out.dims[-1] if out.dims else 2.0 * lhs.elements
    return None


def opaque_target(instruction: Instruction) -> str:
    """Target of a custom call whose work is not known here; empty for anything else."""
    target = _target(instruction)
    return "" if target in MATMUL_TARGETS else target


def _target(instruction: Instruction) -> str:
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _convolution_flops(
    lhs: Shape, kernel: Shape, out: Shape, attributes: Mapping[str, str]
) -> float:
    """Products with real elements of a convolution, times two."""
    labels, out_labels = attributes.get("dim_labels", "_->").split("->")
    lhs_labels, kernel_labels = labels.split("_")
    window = dict(_WINDOW.findall(attributes.get("window", "")))
    macs = 1.0
    for axis, label in enumerate(sorted(filter(str.isdigit, out_labels), key=int)):
        taps = kernel.dims[kernel_labels.index(label)]
        macs *= _real_products(
            outputs=out.dims[out_labels.index(label)],
            taps=taps,
            inputs=lhs.dims[lhs_labels.index(label)],
            stride=_window_number(window, "stride", axis, 1),
            low_padding=_window_number(window, "pad", axis, 0),
            lhs_dilation=_window_number(window, "lhs_dilate", axis, 1),
            rhs_dilation=_window_number(window, "rhs_dilate", axis, 1),
        )
    batch = lhs.dims[lhs_labels.index("b")] // int(attributes.get("batch_group_count", "1"))
    features = kernel.dims[kernel_labels.index("i")] * kernel.dims[kernel_labels.index("o")]
    return 2.0 * macs * batch * features


def _window_number(window: Mapping[str, str], key: str, axis: int, default: int) -> int:
    """The number of ``key`` along ``axis``; of a padding, the low one."""
    return int(window[key].split("x")[axis].split("_")[0]) if key in window else default


def _real_products(
    *,
    outputs: int,
    taps: int,
    inputs: int,
    stride: int,
    low_padding: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> int:
    """Pairs of output position and kernel tap, along one axis, that meet a real input element."""
    last = (inputs - 1) * lhs_dilation
    few, many = (taps, rhs_dilation), (outputs, stride)
    if taps > outputs:
        few, many = many, few
    count, (length, pace) = few[0], many
    return sum(
        _multiples(length, pace, index * few[1] - low_padding, last, lhs_dilation)
        for index in range(count)
    )


def _multiples(length: int, pace: int, start: int, last: int, unit: int) -> int:
    """How many of ``start + i * pace``, i < ``length``, are multiples of ``unit`` in [0, last]."""
    low = max(0, -(start // pace))
    high = min(length - 1, (last - start) // pace)
    common = math.gcd(pace, unit)
    if high < low or start % common:
        return 0
    period = unit // common
    first = -(start // common) * pow(pace // common, -1, period) % period
    first += -(-(low - first) // period) * period
    return max(0, (high - first) // period + 1)
