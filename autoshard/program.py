"""A StableHLO module in the one shape the rest of autoshard reads: one function, no calls.

JAX lowers nested ``jit`` and ``scan`` bodies to private functions. :func:`normalize` gives every
call its own callee (Shardy's ``sdy-flatten-call-graph``) and moves the callee's ops to the call, so
that one op has one place and one sharding. Two lowerings of one function, with and without
shardings, normalize to the same ops in the same order; :func:`walk` numbers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from jax.extend.mlir import ir, passmanager

from autoshard.shardings import Sharding

Value: TypeAlias = "ir.Value[Any]"

REGION_OPS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
"""Ops whose regions hold ops of the program; any other region is part of its op."""

MANUAL = "sdy.manual_computation"
"""A ``shard_map``: its body is the program of one device, with collectives of its own."""

TERMINATORS = frozenset({"stablehlo.return", "func.return", "sdy.return"})

MATERIALS = frozenset({"stablehlo.constant", "stablehlo.iota"})
"""Ops that make a value from nothing and cost nothing in any sharding."""

MAX_FREE_DEPTH = 16
"""Up to this many ops from a constant, what is computed from constants alone is free."""

_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("add", "and", "broadcast_in_dim", "compare", "convert", "divide", "maximum", "minimum"),
        *("multiply", "negate", "not", "or", "remainder", "select", "subtract"),
    )
)
_EFFECTS = frozenset(
    f"stablehlo.{name}" for name in ("custom_call", "infeed", "outfeed", "recv", "send")
)
"""Ops that are kept even if nothing reads their results."""

_REFERENCE = re.compile(r'@(?:([\w.$-]+)|"([^"]+)")')
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
        required: Whether the pin is no wish of the caller's but what the program needs.
    """

    name: str
    donated: bool = False
    pin: Sharding | None = None
    required: bool = False


def main_block(module: ir.Module) -> ir.Block:
    """The body of the module's entry function, ``main``."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and _symbol(op.operation) == "main":
            body: ir.Block = op.operation.regions[0].blocks[0]
            return body
    raise ValueError("the module has no function called main")


def normalize(module: ir.Module) -> None:
    """Bring a module into the one shape, in place.

    Calls are inlined; ops that repeat another or that nothing reads are removed, as XLA would do
    (it then makes no collective for them either); loops carry what they read from outside.
    """
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
    referenced = _referenced(module)
    for name, function in functions.items():
        if name != "main" and name not in referenced:
            function.erase()
    with module.context, ir.Location.unknown():
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
        remove_unread(main_block(module))
        carry_captures(main_block(module))


def remove_unread(block: ir.Block) -> None:
    """Remove what nothing reads, and what loops carry without need, until there is no more."""
    while _simplify(block):
        pass


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


def target_of(operation: ir.Operation) -> str:
    """The target of a custom call; empty for other ops."""
    if operation.name != "stablehlo.custom_call":
        return ""
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def shape_of(value: Value) -> tuple[int, ...]:
    """Sizes of a value, major to minor; a token has none."""
    return () if is_token(value) else tuple(ir.RankedTensorType(value.type).shape)


def is_token(value: Value) -> bool:
    """Whether a value only orders effects and holds nothing."""
    return not isinstance(value.type, ir.RankedTensorType)


def arrays(values: Iterable[Value]) -> list[Value]:
    """The values that are no tokens; JAX puts tokens before the arrays of a program."""
    return [value for value in values if not is_token(value)]


def terminator(block: ir.Block) -> ir.Operation:
    """The op that ends a block and names the values it gives back."""
    return block.operations[len(block.operations) - 1].operation


def source_of(operation: ir.Operation) -> str:
    """``file.py:line`` of the innermost frame outside libraries; empty if there is none."""
    return _innermost(str(operation.location))


@lru_cache(maxsize=4096)  # repeated layers come from the same lines
def _innermost(location: str) -> str:
    frames: list[tuple[str, str]] = _FRAME.findall(location)
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
        elif operation.name in REGION_OPS or operation.name == MANUAL:
            for region in operation.regions:
                _inline(region.blocks[0], functions)


def _simplify(block: ir.Block) -> bool:
    """Remove what nothing reads, last op first, and what loops carry without need.

    Returns:
        Whether anything was removed from a loop or conditional: there may be more to remove then.
    """
    changed = False
    for op in reversed(list(block.operations)):
        operation = op.operation
        if is_dead(operation):
            operation.erase()
            continue
        if operation.name == MANUAL:
            changed |= _simplify(operation.regions[0].blocks[0])
        if operation.name not in REGION_OPS:
            continue
        used = [any(True for _ in result.uses) for result in operation.results]
        if operation.name == "stablehlo.while":
            gone = _needless(operation, used)
        else:
            gone = {k for k, is_used in enumerate(used) if not is_used}
        changed |= bool(gone)
        operation = _without(operation, gone)
        for region in operation.regions:
            changed |= _simplify(region.blocks[0])
    return changed


def is_dead(operation: ir.Operation) -> bool:
    """Whether nothing reads its results and it does nothing else."""
    return (
        operation.name not in TERMINATORS
        and operation.name.startswith(("stablehlo.", "chlo.", "sdy."))
        and not any(True for result in operation.results for _ in result.uses)
        and not any(o.name in _EFFECTS for o in (operation, *_nested(operation)))
    )


def _needless(loop: ir.Operation, used: list[bool]) -> set[int]:
    """Which values a loop need not carry: those it never changes, and those that nothing reads.

    Whatever reads the former is made to read the value from outside.
    """
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    returned = list(terminator(body).operands)
    same = {k for k, value in enumerate(returned) if value == body.arguments[k]}
    for k in same:
        outside = loop.operands[k]
        condition.arguments[k].replace_all_uses_with(outside)
        loop.results[k].replace_all_uses_with(outside)
        terminator(body).operands[k] = outside
        body.arguments[k].replace_all_uses_with(outside)
    position = {argument: k for k, argument in enumerate(body.arguments)}
    wanted = {k for k in range(len(returned)) if k not in same and used[k]}
    wanted |= {k for k, a in enumerate(condition.arguments) if any(True for _ in a.uses)}
    seen: set[ir.Operation] = set()
    values = [returned[k] for k in wanted]
    for operation in (op.operation for op in body.operations):
        inside = (operation, *_nested(operation))
        if any(o.name in _EFFECTS for o in inside):
            values += [value for o in inside for value in o.operands]
    while values:
        value = values.pop()
        owner = value.owner
        if isinstance(owner, ir.Block):
            if value in position and position[value] not in wanted | same:
                wanted.add(position[value])
                values.append(returned[position[value]])
        elif (made := cast(ir.Operation, owner)) not in seen:
            seen.add(made)
            for inner in (made, *_nested(made)):
                values += inner.operands
    return set(range(len(returned))) - wanted


def _without(operation: ir.Operation, gone: set[int]) -> ir.Operation:
    """Replace a loop or conditional by one without some of its results (and carried values)."""
    if not gone:
        return operation
    loop = operation.name == "stablehlo.while"
    kept = [k for k in range(len(operation.results)) if k not in gone]
    new = ir.Operation.create(
        operation.name,
        results=[operation.results[k].type for k in kept],
        operands=[operation.operands[k] for k in kept] if loop else list(operation.operands),
        attributes={name: operation.attributes[name] for name in _names(operation)},
        regions=len(operation.regions),
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    for number, region in enumerate(list(operation.regions)):
        block = region.blocks[0]
        if not (loop and number == 0):
            end = terminator(block)
            with ir.InsertionPoint(end):
                operands = [end.operands[k] for k in kept]
                ir.Operation.create(end.name, operands=operands, loc=end.location)
            end.erase()
        if loop:
            if number == 1:
                for op in reversed(list(block.operations)):
                    if is_dead(op.operation):
                        op.operation.erase()
            for k in sorted(gone, reverse=True):
                block.erase_argument(k)
        block.append_to(new.regions[number])
    for position, k in enumerate(kept):
        operation.results[k].replace_all_uses_with(new.results[position])
    operation.erase()
    return new


def carry_captures(block: ir.Block, *, constrain: bool = False) -> None:
    """Turn values that a loop reads from outside into values it carries unchanged.

    Then every value has one sharding inside a loop, decided where it enters. Constants stay where
    they are: they are made anew wherever they are read.

    Args:
        block: Where to look for loops.
        constrain: Whether what comes out of a sharding constraint gets the same one in the loop.
    """
    for op in list(block.operations):
        operation = op.operation
        if operation.name not in REGION_OPS:
            continue
        for region in operation.regions:
            carry_captures(region.blocks[0], constrain=constrain)
        if operation.name == "stablehlo.while":
            captured = _captures(operation)
            if captured:
                _with_operands(operation, captured, constrain)


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


def _is_constant(value: Value, depth: int = 1) -> bool:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    if owner.name in MATERIALS:
        return True
    if owner.name not in _ELEMENTWISE or depth == MAX_FREE_DEPTH:
        return False
    return all(_is_constant(operand, depth + 1) for operand in owner.operands)


def _with_operands(loop: ir.Operation, captured: list[Value], constrain: bool) -> None:
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
        inside = dict(zip(captured, carried, strict=True))
        for operation in operations(block):
            for position, operand in enumerate(operation.operands):
                if operand in inside:
                    operation.operands[position] = inside[operand]
        if constrain:
            for value, argument in inside.items():
                _constrain_like(value, argument)
        if number == 1:
            end = terminator(block)
            with ir.InsertionPoint(end):
                ir.Operation.create(end.name, operands=[*end.operands, *carried], loc=end.location)
            end.erase()
        block.append_to(new.regions[number])
    for position in range(kept):
        loop.results[position].replace_all_uses_with(new.results[position])
    loop.erase()


def _constrain_like(value: Value, argument: Value) -> None:
    """Give a loop's argument the constraint that made the value it stands for."""
    maker = value.owner
    if isinstance(maker, ir.Block) or maker.name != "sdy.sharding_constraint":
        return
    first = cast(ir.Block, argument.owner).operations[0]
    same = maker.clone(ir.InsertionPoint(first)).operation
    argument.replace_all_uses_with(same.results[0])
    same.operands[0] = argument


def _names(operation: ir.Operation) -> list[str]:
    return [str(name) for name in operation.attributes]


def operations(block: ir.Block) -> Iterator[ir.Operation]:
    """Every op in a block and in all regions inside it, terminators included."""
    for op in block.operations:
        yield op.operation
        yield from _nested(op.operation)


def _nested(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for inner in region.blocks:
            yield from operations(inner)


def _referenced(module: ir.Module) -> set[str]:
    """Functions that an op names: by a call that is not inlined (in a reduction's body, say)."""
    return {
        name or quoted
        for operation in _nested(module.operation)
        if operation.name in ("stablehlo.composite", "stablehlo.custom_call", "func.call")
        for attribute in operation.attributes.values()
        for name, quoted in _REFERENCE.findall(str(attribute))
    }
