"""How often each computation of a compiled program runs.

The trip count of a loop is what XLA notes, or is read off its condition, step and initial value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.cost_models.hlo import Computation, HloModule, Instruction

_KNOWN = re.compile(r"known_trip_count\W+n\W+(\d+)")
_SAME_VALUE = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_MAX_STEPS = 10_000  # of one search; a value is found in tens, so this only stops malformed text

_MAX_NESTING = 50  # of loops

CallSites = Mapping[str, tuple[tuple[Computation, Instruction], ...]]
"""By computation, the instructions that call it and where they stand."""


def call_sites(module: HloModule) -> CallSites:
    """Who calls each computation of ``module``."""
    sites: dict[str, list[tuple[Computation, Instruction]]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for callee in instruction.called:
                sites.setdefault(callee, []).append((computation, instruction))
    return {callee: tuple(callers) for callee, callers in sites.items()}


Weight = tuple[float, float]
"""What one branch is compared with another by: FLOPs, then bytes sent."""


def executions(
    module: HloModule, sites: CallSites, weights: Mapping[str, Weight]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """How often each computation runs in one call of the program.

    Args:
        module: The program.
        sites: Its call sites.
        weights: Weight of one run of each computation, without what it calls. Of a conditional's
            branches only the heaviest is taken to run.

    Returns:
        Runs of each computation that runs at all, callers first; and the names of the loops whose
        trip count is unknown, which are taken to run once.
    """
    trips = TripCounts(module, sites)
    counts = {
        (computation.name, instruction.name): trips.of(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }
    calls = {c.name: tuple(_calls(c, counts)) for c in module.computations.values()}
    order = _callers_first(module.entry.name, calls)
    total: dict[str, Weight] = {}
    for name in reversed(order):
        flops, sent = weights[name]
        for times, callees in calls[name]:
            more = max((total.get(callee, (0.0, 0.0)) for callee in callees), default=(0.0, 0.0))
            flops, sent = flops + times * more[0], sent + times * more[1]
        total[name] = flops, sent
    runs = dict.fromkeys(order, 0)
    runs[module.entry.name] = 1
    for name in order:
        for times, callees in calls[name]:
            known = [callee for callee in callees if callee in total]
            if known:
                runs[max(known, key=total.__getitem__)] += times * runs[name]
    unknown = tuple(loop for (name, loop), n in counts.items() if n is None and runs.get(name))
    return {name: count for name, count in runs.items() if count}, unknown


@dataclass(frozen=True, slots=True)
class _Value:
    """A part of an instruction's result: ``path`` indexes into nested tuples, innermost last.

    ``calls`` are the call sites that the search came down through.
    """

    where: Computation
    instruction: Instruction
    path: tuple[int, ...] = ()
    calls: tuple[tuple[Computation, Instruction], ...] = ()


class TripCounts:
    """Trip counts of the while loops of one module.

    Args:
        module: The module.
        sites: Its call sites.
    """

    def __init__(self, module: HloModule, sites: CallSites) -> None:
        self._module = module
        self._sites = sites
        self._invariant: dict[tuple[str, int], bool] = {}
        self._depth = 0

    def of(self, where: Computation, loop: Instruction) -> int | None:
        """Trips of ``loop``, an instruction of ``where``; None if the text does not tell.

        Uses XLA's own ``known_trip_count`` if it is there. Otherwise the condition must compare a
        carried integer with a constant, and the body must add a constant to it.
        """
        if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
            return int(known[1])
        condition = self._callee(loop, "condition")
        body = self._callee(loop, "body")
        if condition is None or body is None:
            return None
        test = self._trace(_Value(condition, condition.root), loop)
        if test is None or test.instruction.opcode != "compare":
            return None
        direction = test.instruction.attributes.get("direction", "")
        sides = [self._trace(side, loop) for side in self._operands(test)]
        if len(sides) != 2:
            return None
        bounds = [self._constant(side, where, loop) for side in sides]
        for at, flip in ((0, False), (1, True)):
            counter, bound = sides[at], bounds[1 - at]
            if counter is None or bound is None or not _is_carried(counter, loop):
                continue
            index = counter.path[-1]
            step = self._step(where, body, loop, index)
            start = self._initial(where, loop, index)
            if step and start is not None:
                return _trips(
                    start, bound, step, _FLIPPED.get(direction, "") if flip else direction
                )
        return None

    def _callee(self, loop: Instruction, key: str) -> Computation | None:
        return self._module.computations.get(loop.attributes.get(key, "").lstrip("%"))

    def _operands(self, value: _Value) -> list[_Value]:
        makers = (value.where.by_name.get(name) for name in value.instruction.operands)
        return [replace(value, instruction=maker, path=()) for maker in makers if maker]

    def _trace(self, value: _Value | None, stop: Instruction | None) -> _Value | None:
        """Where ``value`` comes from, through copies, tuples, calls and loops that don't change it.

        The search ends at a constant, an arithmetic op, or a value that the loop ``stop`` carries.
        """
        for _ in range(_MAX_STEPS):
            if value is None or (stop is not None and _is_carried(value, stop)):
                return value
            following = self._before(value)
            if following is value:
                return value
            value = following
        return None

    def _before(self, value: _Value) -> _Value | None:
        """One step back; ``value`` itself where it is made, None where the trail is lost."""
        instruction = value.instruction
        if instruction.opcode == "parameter":
            return self._argument(value)
        if instruction.opcode in ("fusion", "call") and instruction.called:
            callee = self._module.computations.get(instruction.called[0])
            calls = (*value.calls, (value.where, instruction))
            return _Value(callee, callee.root, value.path, calls) if callee else None
        if instruction.opcode == "tuple" and value.path:
            operand = value.where.by_name.get(instruction.operands[value.path[-1]])
            shorter = value.path[:-1]
            return replace(value, instruction=operand, path=shorter) if operand else None
        operand = value.where.by_name.get(instruction.operands[0]) if instruction.operands else None
        if operand is None:
            return value
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attributes.get("index", "0"))
            return replace(value, instruction=operand, path=(*value.path, index))
        if instruction.opcode in _SAME_VALUE:
            return replace(value, instruction=operand)
        if instruction.opcode == "while" and value.path:
            same = self._is_invariant(instruction, value.path[-1])
            return replace(value, instruction=operand) if same else None
        return value

    def _argument(self, value: _Value) -> _Value | None:
        """What the caller passes for the parameter ``value``."""
        if value.calls:
            where, call = value.calls[-1]
            calls = value.calls[:-1]
        else:
            sites = self._sites.get(value.where.name, ())
            if len(sites) != 1:
                return None
            (where, call), calls = sites[0], ()
        number = int(value.instruction.literal)
        if call.opcode == "while":
            if not value.path or not self._is_invariant(call, value.path[-1]):
                return None
        elif call.opcode == "conditional":
            number = 1 + call.called.index(value.where.name)
        elif call.opcode not in ("fusion", "call"):
            return None
        operand = where.by_name.get(call.operands[number]) if number < len(call.operands) else None
        return _Value(where, operand, value.path, calls) if operand else None

    def _is_invariant(self, loop: Instruction, index: int) -> bool:
        """Whether ``loop`` hands its carried value ``index`` on unchanged."""
        key = (loop.name, index)
        if key not in self._invariant:
            self._invariant[key] = False  # in case the search comes back here
            body = self._callee(loop, "body")
            if body is not None and self._depth < _MAX_NESTING:
                self._depth += 1
                end = self._trace(_Value(body, body.root, (index,)), loop)
                self._depth -= 1
                same = end is not None and _is_carried(end, loop) and end.path == (index,)
                self._invariant[key] = same
        return self._invariant[key]

    def _constant(self, value: _Value | None, where: Computation, loop: Instruction) -> int | None:
        """The integer that ``value`` always is, also if ``loop`` carries it in unchanged."""
        if value is not None and _is_carried(value, loop):
            index = value.path[-1]
            return self._initial(where, loop, index) if self._is_invariant(loop, index) else None
        if value is None or value.instruction.opcode != "constant":
            return None
        literal = value.instruction.literal.strip("{} ")
        return int(literal) if re.fullmatch(r"-?\d+", literal) else None

    def _initial(self, where: Computation, loop: Instruction, index: int) -> int | None:
        operand = where.by_name.get(loop.operands[0])
        made = self._trace(_Value(where, operand, (index,)), None) if operand else None
        return self._constant(made, where, loop) if made else None

    def _step(
        self, where: Computation, body: Computation, loop: Instruction, index: int
    ) -> int | None:
        """What each iteration adds to the carried value ``index``."""
        made = self._trace(_Value(body, body.root, (index,)), loop)
        if made is None or made.instruction.opcode not in ("add", "subtract"):
            return None
        sides = [self._trace(side, loop) for side in self._operands(made)]
        if len(sides) != 2:
            return None
        if made.instruction.opcode == "add" and sides[1] and _is_carried(sides[1], loop):
            sides.reverse()
        if sides[0] is None or not _is_carried(sides[0], loop) or sides[0].path != (index,):
            return None
        amount = self._constant(sides[1], where, loop)
        return -amount if amount and made.instruction.opcode == "subtract" else amount


def _is_carried(value: _Value, loop: Instruction) -> bool:
    """Whether ``value`` is one of the values that ``loop`` carries, as its body or test sees it."""
    return (
        value.instruction.opcode == "parameter"
        and not value.calls
        and len(value.path) == 1
        and value.where.name in loop.called
    )


def _trips(start: int, bound: int, step: int, direction: str) -> int | None:
    """Trips of ``for (i = start; i <direction> bound; i += step)``; None if it does not end."""
    distance = bound - start
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "GT", "LE", "GE"):
        return None
    reach = distance + (direction in ("LE", "GE"))  # trips are the steps that stay below it
    if reach <= 0:
        return 0
    return -(-reach // step) if step > 0 else None


_Calls = tuple[tuple[int, tuple[str, ...]], ...]
"""What a computation calls: how often, and which; one of several where branches exclude another."""


def _calls(
    computation: Computation, counts: Mapping[tuple[str, str], int | None]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Calls that can hold products or collectives."""
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            count = counts[computation.name, instruction.name]
            body = instruction.attributes.get("body", "").lstrip("%")
            condition = instruction.attributes.get("condition", "").lstrip("%")
            yield 1 if count is None else count, (body,)
            yield 1 if count is None else count + 1, (condition,)
        elif instruction.opcode == "conditional":
            yield 1, instruction.called
        elif instruction.opcode in ("fusion", "call", "custom-call", "async-start"):
            yield from ((1, (callee,)) for callee in instruction.called)


def _callers_first(entry: str, calls: Mapping[str, _Calls]) -> tuple[str, ...]:
    """The computations that ``entry`` reaches, each after all that call it."""
    done: dict[str, None] = {}
    stack = [(entry, False)]
    open_: set[str] = set()
    while stack:
        name, finished = stack.pop()
        if finished:
            done[name] = None
        elif name not in open_:
            open_.add(name)
            stack.append((name, True))
            callees = (callee for _, names in calls[name] for callee in names)
            stack.extend((callee, False) for callee in callees if callee in calls)
    return tuple(reversed(done))
