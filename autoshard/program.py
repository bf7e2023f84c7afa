"""A StableHLO module in the one shape the rest of autoshard reads: one function, no calls.

JAX lowers nested ``jit`` and ``scan`` bodies to private functions. :func:`normalize` gives every
call its own callee (Shardy's ``sdy-flatten-call-graph``) and moves the callee's ops to the call, so
that one op has one place and one sharding. Two lowerings of one function, with and without
shardings, normalize to the same ops in the same order; :func:`walk` numbers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.extend.mlir import ir, passmanager

from autoshard.shardings import Sharding

REGION_OPS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
"""Ops whose regions hold ops of the program; other regions (a reduction's body) are part of the op."""

TERMINATORS = frozenset({"stablehlo.return", "func.return", "sdy.return"})

_FRAME = re.compile(r'"([^"]+\.(?:py|ipynb))":(\d+)')
_LIBRARY = re.compile(r"/site-packages/|/jax/_src/|<frozen")
_OURS = tuple(str(Path(__file__).parent / name) for name in ("execute.py", "api.py", "signature.py"))


@dataclass(frozen=True, slots=True)
class Boundary:
    """One argument or result of the program, as the caller knows it.

    Attributes:
        name: For people, e.g. ``state['params']['wq']``.
        donated: Whether the caller gives the buffer up (arguments only).
        pin: The sharding the caller asked for; None leaves it to the planner.
    """

    name: str
    donated: bool = False
    pin: Sharding | None = None


def main_block(module: ir.Module) -> ir.Block:
    """The body of the module's entry function, ``main``."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and _symbol(op.operation) == "main":
            return op.operation.regions[0].blocks[0]
    raise ValueError("the module has no function called main")


def normalize(module: ir.Module) -> None:
    """Flatten the call graph and inline every call, in place."""
    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-flatten-call-graph)").run(
            module.operation
        )
    functions = {
        _symbol(op.operation): op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    _inline(main_block(module), functions)
    for name, function in functions.items():
        if name != "main" and not _is_referenced(module, name):
            function.erase()


def walk(
    block: ir.Block, parent: int = -1, region: int = 0, start: int = 0
) -> Iterator[tuple[int, int, ir.Operation]]:
    """Every op of the program in order, with the region it is in.

    The position in this sequence is the op's index everywhere in autoshard. Terminators are left out.

    Yields:
        ``(parent, region, operation)``: the index of the op that holds it (-1 at the top) and which
        of that op's regions it is in.
    """
    index = start
    for op in block.operations:
        operation = op.operation
        if operation.name in TERMINATORS:
            continue
        mine = index
        yield parent, region, operation
        index += 1
        if operation.name in REGION_OPS:
            for number, inside in enumerate(operation.regions):
                for inner in walk(inside.blocks[0], mine, number, index):
                    yield inner
                    index += 1


def terminator(block: ir.Block) -> ir.Operation:
    """The op that ends a block and names the values it gives back."""
    return block.operations[len(block.operations) - 1].operation


def source_of(operation: ir.Operation) -> str:
    """``file.py:line`` of the innermost frame outside libraries; empty if there is none."""
    frames: list[tuple[str, str]] = _FRAME.findall(str(operation.location))
    own = [f for f in frames if not _LIBRARY.search(f[0]) and not f[0].startswith(_OURS)] or frames
    return f"{own[0][0].rsplit('/', 1)[-1]}:{own[0][1]}" if own else ""


def _symbol(operation: ir.Operation) -> str:
    return str(ir.StringAttr(operation.attributes["sym_name"]).value)


def _callee(operation: ir.Operation) -> str:
    return str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)


def _inline(block: ir.Block, functions: dict[str, ir.Operation]) -> None:
    for op in list(block.operations):
        operation = op.operation
        if operation.name == "func.call":
            body = functions[_callee(operation)].regions[0].blocks[0]
            _inline(body, functions)
            for argument, operand in zip(body.arguments, operation.operands, strict=True):
                argument.replace_all_uses_with(operand)
            *inner, end = list(body.operations)
            for moved in inner:
                moved.operation.move_before(operation)
            for result, value in zip(operation.results, end.operation.operands, strict=True):
                result.replace_all_uses_with(value)
            operation.erase()
        elif operation.name in REGION_OPS:
            for region in operation.regions:
                _inline(region.blocks[0], functions)


def _is_referenced(module: ir.Module, name: str) -> bool:
    wanted = f"@{name}"
    return any(
        wanted in str(attribute)
        for _, _, operation in walk(main_block(module))
        if operation.name in ("stablehlo.composite", "stablehlo.custom_call", "func.call")
        for attribute in operation.attributes.values()
    )
