"""What a plan was made from: the module, the caller's wishes, the prices; kept inside the plan.

With it a plan can be made again elsewhere, under other wishes, without the function it came from.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir
from jax.interpreters import mlir

from autoshard.child import UnsupportedError, ask, serve
from autoshard.cost_models.protocol import CostModel
from autoshard.cost_models.saved import describe
from autoshard.errors import InputError
from autoshard.extract import add_rules
from autoshard.program import Boundary, main_block, operations

MAX_CONSTANT_BYTES = 16 * 2**20
"""Constants of a module up to which their values are kept [bytes]."""

DEADLINE_S = 120.0
"""Time that a child may take to read a module [s]."""

READER = (sys.executable, "-c", "from autoshard.origin import main; main()")
"""The command that tries modules out."""

_ELIDED_ABOVE = 64
"""Elements above which a constant's values are left out, where they are not kept."""


@dataclass(frozen=True, slots=True)
class Origin:
    """All that a plan depends on, as plain data.

    Attributes:
        module: The normalized module with its source locations: MLIR text, compressed by zlib, in
            base64.
        whole: Whether the values of all constants are in it; those of large ones do not matter to
            a plan.
        arguments: The caller's view of each argument.
        results: The caller's view of each result.
        ties: Pairs (argument position, result position) that share a buffer.
        cost_model: The cost model as text (see :mod:`autoshard.cost_models.saved`); empty if it is
            the caller's own.
        time_limit_s: Time the solver had [s].
    """

    module: str
    whole: bool
    arguments: tuple[Boundary, ...]
    results: tuple[Boundary, ...]
    ties: tuple[tuple[int, int], ...]
    cost_model: str
    time_limit_s: float

    @classmethod
    def of(
        cls,
        module: ir.Module,
        arguments: Sequence[Boundary],
        results: Sequence[Boundary],
        ties: Sequence[tuple[int, int]],
        model: CostModel,
        time_limit_s: float,
    ) -> Origin:
        """The origin of a plan for a normalized module; arguments as for ``plan_module``."""
        text, whole = pack(module)
        return cls(
            text,
            whole,
            tuple(arguments),
            tuple(results),
            tuple((a, r) for a, r in ties),
            describe(model) or "",
            float(time_limit_s),
        )

    def try_out(self) -> None:
        """Read the module in a child process, which a bad one may kill: for one out of a file.

        Raises:
            InputError: This release of JAX cannot read it.
        """
        try:
            ask(READER, self.module.encode(), DEADLINE_S)
        except UnsupportedError as error:
            raise _unreadable(str(error)) from error

    def open(self) -> ir.Module:
        """The module, read anew: the caller may change it.

        Raises:
            InputError: This release of JAX cannot read it.
        """
        try:
            module = _parsed(self.module)
        except (ValueError, binascii.Error, zlib.error, ir.MLIRError) as error:
            raise _unreadable(str(error)) from error
        return module


def _parsed(packed: str) -> ir.Module:
    text = zlib.decompress(base64.b64decode(packed, validate=True)).decode()
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    main_block(module)
    return module


def _unreadable(why: str) -> InputError:
    return InputError(
        f"the program inside the plan cannot be read: {why.partition(chr(10))[0]}",
        fix="plan again with this release of JAX",
    )


def main() -> None:
    """The child's side: reads modules and looks for the rules of their ops, as planning does."""

    def answer(packed: bytes) -> bytes:
        module = _parsed(packed.decode())
        with module.context:
            add_rules(module)
        return b""

    serve(answer)


def pack(module: ir.Module) -> tuple[str, bool]:
    """A module as compressed text, and whether the values of all constants are in it."""
    held = sum(
        _nbytes(operation.results[0].type)
        for operation in operations(module.body)
        if operation.name == "stablehlo.constant" and not _is_splat(operation)
    )
    whole = held <= MAX_CONSTANT_BYTES
    text = str(
        module.operation.get_asm(
            enable_debug_info=True, large_elements_limit=None if whole else _ELIDED_ABOVE
        )
    )
    return base64.b64encode(zlib.compress(text.encode())).decode(), whole


def _is_splat(operation: ir.Operation) -> bool:
    try:
        value = operation.attributes["value"]
    except TypeError:  # the bindings do not know constants of complex numbers
        return False
    return isinstance(value, ir.DenseElementsAttr) and value.is_splat


def _nbytes(type_: ir.Type) -> int:
    """About the bytes of a tensor: element types of unknown size count as eight bytes."""
    tensor = ir.RankedTensorType(type_)
    bits = re.search(r"\d+", str(tensor.element_type))
    return math.prod(tensor.shape) * int(bits[0] if bits else 64) // 8
