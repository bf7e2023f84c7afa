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
from typing import Any, TypeAlias

from jax.extend.mlir import ir, passmanager

from autoshard.shardings import Sharding

Value: TypeAlias = "ir.Value[Any]"

REGION_OPS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
"""Ops whose regions hold ops of the program; any other region is part of its op."""

TERMINATORS = frozenset({"stablehlo.return", "func.return", "sdy.return"})

_FRAME = re.compile(r'"([^"]+\.(?:py|ipynb))":(\d+)')
_LIBRARY = re.compile(r"/site-packages/|/jax/_src/|<frozen")
_OURS = tuple(
    str(Path(__file__).parent / name) for name in ("execute.py", "api.py", "signature.py")
)


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
            body: ir.Block = op.operation.regions[0].blocks[0]
            return body
    raise ValueError("the module has no function called main")


def normalize(module: ir.Module) -> None:
    """Flatten the call graph, inline every call, and make loops carry what they read, in place."""
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
    with module.context, ir.Location.unknown():
        _carry_captures(main_block(module))
    for name, function in functions.items():
        if name != "main" and not _is_referenced(module, name):
            function.erase()


def walk(
    block: ir.Block, parent: int = -1, region: int = 0, start: int = 0
) -> Iterator[tuple[int, int, ir.Operation]]:
    """Every op of the program in order, with the region it is in.

    The position in this sequence is the op's index everywhere. Terminators are left out.

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


def _carry_captures(block: ir.Block) -> None:
    """Turn values that a loop reads from outside into values it carries unchanged.

    Then every value has one sharding inside a loop, decided where it enters. Constants stay where
    they are: they are made anew wherever they are read.
    """
    for op in list(block.operations):
        operation = op.operation
        if operation.name not in REGION_OPS:
            continue
        for region in operation.regions:
            _carry_captures(region.blocks[0])
        if operation.name == "stablehlo.while":
            captured = _captures(operation)
            if captured:
                _with_operands(operation, captured)


def _captures(loop: ir.Operation) -> list[Value]:
    """Values made outside ``loop`` and read inside it, in order of reading; constants left out."""
    inside: set[Value] = set()
    read: dict[Value, None] = {}

    def visit(operation: ir.Operation) -> None:
        for value in operation.operands:
            read[value] = None
        inside.update(operation.results)
        for region in operation.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for inner in block.operations:
                    visit(inner.operation)

    for region in loop.regions:
        block = region.blocks[0]
        inside.update(block.arguments)
        for inner in block.operations:
            visit(inner.operation)
    return [v for v in read if v not in inside and not _is_constant(v)]


def _is_constant(value: Value) -> bool:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    name = owner.name
    if name in ("stablehlo.broadcast_in_dim", "stablehlo.convert"):
        return _is_constant(owner.operands[0])
    return name in ("stablehlo.constant", "stablehlo.iota")


def _with_operands(loop: ir.Operation, captured: list[Value]) -> None:
    """Replace ``loop`` by one that carries ``captured`` as well."""
    kept = len(loop.results)
    new = ir.Operation.create(
        loop.name,
        results=[*(r.type for r in loop.results), *(v.type for v in captured)],
        operands=[*loop.operands, *captured],
        attributes={name: loop.attributes[name] for name in _names(loop)},
        regions=len(loop.regions),
        loc=loop.location,
        ip=ir.InsertionPoint(loop),
    )
    for number, region in enumerate(list(loop.regions)):
        block = region.blocks[0]
        carried = [block.add_argument(v.type, loop.location) for v in captured]
        inner = {id(o): o for o in _operations(block)}
        for value, argument in zip(captured, carried, strict=True):
            for operation in inner.values():
                for position, operand in enumerate(operation.operands):
                    if operand == value:
                        operation.operands[position] = argument
        if number == 1:
            end = terminator(block)
            with ir.InsertionPoint(end):
                ir.Operation.create(end.name, operands=[*end.operands, *carried], loc=end.location)
            end.erase()
        block.append_to(new.regions[number])
    for position in range(kept):
        loop.results[position].replace_all_uses_with(new.results[position])
    loop.erase()


def _names(operation: ir.Operation) -> list[str]:
    return [str(name) for name in operation.attributes]


def _operations(block: ir.Block) -> Iterator[ir.Operation]:
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _operations(inner)


def _is_referenced(module: ir.Module, name: str) -> bool:
    wanted = f"@{name}"
    return any(
        wanted in str(attribute)
        for _, _, operation in walk(main_block(module))
        if operation.name in ("stablehlo.composite", "stablehlo.custom_call", "func.call")
        for attribute in operation.attributes.values()
    )
