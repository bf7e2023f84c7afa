"""Makes a program small while something about it stays true: results, ops and trip counts go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.counting import trip_count
from autoshard.passes.module_state import from_bytes, op_counts, to_bytes
from autoshard.program import (
    MATERIALS,
    Value,
    is_token,
    main_block,
    normalize,
    operations,
    terminator,
    walk,
)

Holds: TypeAlias = "Callable[[ir.Module], bool]"
"""Whether what is looked for is true of a module, which it must leave as it is."""

Edit: TypeAlias = "Callable[[ir.Module], bool]"
"""Makes a module smaller, in place; says whether there was anything to do."""

_BOUND = "stablehlo.constant"


def shrink(module: ir.Module, holds: Holds, *, budget_s: float = 60.0) -> ir.Module:
    """A smaller module of which ``holds`` is still true.

    Results are cut; what ops make is taken from new arguments or from their own operands instead,
    many ops at a time at first; loops run once or twice. An edit that makes the module invalid, or
    no smaller, or after which ``holds`` is false, is taken back.

    Args:
        module: The program; it is left as it is.
        holds: What has to stay true; true of ``module``.
        budget_s: Time after which the smallest module so far is good enough [s].
    """
    search = _Search(module, holds, time.monotonic() + budget_s)
    search.attempt(lambda m: _normalized(m))
    while search.attempt_all(_cuts) | search.attempt_all(_shorter_loops) | search.halves():
        if search.is_late:
            break
    search.attempt(_drop_unread_arguments)
    return search.module


class _Search:
    def __init__(self, module: ir.Module, holds: Holds, deadline: float) -> None:
        self.module = from_bytes(to_bytes(module), module.context)
        self.holds, self.deadline = holds, deadline
        self.size, self.endless = _size(self.module), _endless(self.module)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def attempt(self, edit: Edit) -> bool:
        """Keep the edited module if it still holds and is no larger."""
        if self.is_late:
            return False
        candidate = from_bytes(to_bytes(self.module), self.module.context)
        try:
            with candidate.context, ir.Location.unknown():
                if not edit(candidate):
                    return False
                normalize(candidate)
                _drop_unread_arguments(candidate)
            candidate.operation.verify()
        except (ir.MLIRError, ValueError):  # no program any more
            return False
        size = _size(candidate)
        if _endless(candidate) > self.endless:
            return False  # it may run for ever
        if size >= self.size or not self.holds(candidate):
            return False
        self.module, self.size = candidate, size
        return True

    def attempt_all(self, edits: Callable[[ir.Module], Sequence[Edit]]) -> bool:
        """Try edits one after another; those after one that is kept are made anew."""
        changed, position = False, 0
        while not self.is_late:
            found = edits(self.module)
            if position >= len(found):
                return changed
            if self.attempt(found[position]):
                changed = True
            else:
                position += 1
        return changed

    def halves(self) -> bool:
        """Try to do without runs of ops: half of all, then a quarter, down to single ones."""
        changed = False
        length = max(1, len(_replaceable(self.module)) // 2)
        while not self.is_late:
            start = 0
            while start < len(_replaceable(self.module)) and not self.is_late:
                run = range(start, start + length)
                if self.attempt(lambda m, run=run: _replace(m, run, _new_argument)) or (  # type: ignore[misc]
                    self.attempt(lambda m, run=run: _replace(m, run, _own_operand))  # type: ignore[misc]
                ):
                    changed = True
                else:
                    start += length
            if length == 1:
                return changed
            length //= 2
        return changed


def _size(module: ir.Module) -> tuple[int, int, int]:
    """Ops, then results and arguments, then the trips that constants stand for."""
    block = main_block(module)
    boundary = len(terminator(block).operands) + len(list(block.arguments))
    return op_counts(module).total(), boundary, sum(_bounds(module))


def _endless(module: ir.Module) -> int:
    """Loops of which the module does not say how often they run."""
    loops = (o for _, _, o in walk(main_block(module)) if o.name == "stablehlo.while")
    return sum(trip_count(loop) is None for loop in loops)


def _normalized(module: ir.Module) -> bool:
    normalize(module)
    return True


def _replaceable(module: ir.Module) -> list[ir.Operation]:
    """Ops whose results could come from elsewhere, last first."""
    found = [o for _, _, o in walk(main_block(module))]
    return [
        o
        for o in reversed(found)
        if o.name not in MATERIALS
        and o.results
        and not any(is_token(v) for v in o.results)
        and any(True for v in o.results for _ in v.uses)
    ]


Source: TypeAlias = "Callable[[ir.Module, Value], Value | None]"


def _replace(module: ir.Module, run: range, source: Source) -> bool:
    changed = False
    for operation in _replaceable(module)[run.start : run.stop]:
        for value in operation.results:
            new = source(module, value) if any(True for _ in value.uses) else None
            if new is not None:
                value.replace_all_uses_with(new)
                changed = True
    return changed


def _new_argument(module: ir.Module, value: Value) -> Value | None:
    """A further argument of ``main``, which regions may read as well."""
    block = main_block(module)
    made = block.add_argument(value.type, ir.Location.unknown())
    _restate(module)
    return made


def _own_operand(module: ir.Module, value: Value) -> Value | None:
    """The first operand of the op that has the same type."""
    maker = value.owner
    assert not isinstance(maker, ir.Block)
    return next((o for o in maker.operands if o.type == value.type), None)


def _cuts(module: ir.Module) -> list[Edit]:
    """Keep one result alone, or all but one."""
    count = len(terminator(main_block(module)).operands)
    if count < 2:
        return []
    alone = [_keep(frozenset({k})) for k in range(count)]
    without = [_keep(frozenset(range(count)) - {k}) for k in range(count)]
    return alone + without if count > 2 else alone


def _keep(kept: frozenset[int]) -> Edit:
    def edit(module: ir.Module) -> bool:
        end = terminator(main_block(module))
        operands = [o for k, o in enumerate(end.operands) if k in kept or is_token(o)]
        if len(operands) == len(end.operands):
            return False
        with ir.InsertionPoint(end):
            ir.Operation.create("func.return", operands=operands, loc=end.location)
        end.erase()
        _restate(module)
        return True

    return edit


def _bounds(module: ir.Module) -> list[int]:
    """Numbers that loop conditions compare with."""
    return [_number(o) for o in _bound_constants(module)]


def _bound_constants(module: ir.Module) -> list[ir.Operation]:
    found: dict[ir.Operation, None] = {}
    for _, _, operation in walk(main_block(module)):
        if operation.name != "stablehlo.while":
            continue
        for inner in operations(operation.regions[0].blocks[0]):
            for value in inner.operands:
                maker = value.owner
                if isinstance(maker, ir.Block) or inner.name != "stablehlo.compare":
                    continue
                kind = ir.RankedTensorType(value.type)
                if maker.name == _BOUND and not kind.rank and str(kind.element_type) == "i32":
                    found[maker.operation] = None
    return list(found)


def _number(constant: ir.Operation) -> int:
    return int(ir.DenseIntElementsAttr(constant.attributes["value"])[0])


def _shorter_loops(module: ir.Module) -> list[Edit]:
    """Let loops end after one or two iterations."""
    return [
        _bounded(position, trips)
        for position, number in enumerate(_bounds(module))
        for trips in (1, 2)
        if number > trips
    ]


def _bounded(position: int, trips: int) -> Edit:
    def edit(module: ir.Module) -> bool:
        constant = _bound_constants(module)[position]
        kind = constant.results[0].type
        with ir.InsertionPoint(constant), constant.location:
            attribute = ir.DenseElementsAttr.get_splat(
                kind, ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, trips)
            )
            made = stablehlo.constant(attribute)
        # The same constant may be read elsewhere: as a size it must stay.
        for use in list(constant.results[0].uses):
            reader = use.owner.operation
            if reader.name == "stablehlo.compare":
                reader.operands[use.operand_number] = made
        return True

    return edit


def _drop_unread_arguments(module: ir.Module) -> bool:
    block = main_block(module)
    unread = [
        k
        for k, argument in enumerate(block.arguments)
        if not any(True for _ in argument.uses) and not is_token(argument)
    ]
    for k in reversed(unread):
        block.erase_argument(k)
    if unread:
        _restate(module)
    return bool(unread)


def _restate(module: ir.Module) -> None:
    """Give ``main`` the type of its body; what was said of its arguments and results goes."""
    block = main_block(module)
    function: Any = block.owner
    kind = ir.FunctionType.get(
        [a.type for a in block.arguments], [v.type for v in terminator(block).operands]
    )
    function.attributes["function_type"] = ir.TypeAttr.get(kind)
    for name in ("arg_attrs", "res_attrs"):
        if name in function.attributes:
            del function.attributes[name]
