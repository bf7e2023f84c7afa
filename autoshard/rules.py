"""Rules that the caller gives: how an op that Shardy knows nothing of may be split.

A rule is written like an einsum: names for the dimensions of each operand and result, the same name
where they run along together.

    "b i j, b j k -> b i k; sum j"

Operands and results are separated by commas, dimensions by spaces; ``...`` stands for any number of
leading dimensions. A dimension named in some operand and in every result may be split. One that is
named in no result is split only after ``; sum``: each device's results are then added up. All
others, and those after ``; whole``, stay whole on every device.

An op that is split by such a rule runs *piecewise*: each device calls it on its own pieces of the
operands, and what it returns is that device's piece of the results. XLA has no part in it, so the
rule alone must make that right. No dimension that is split may be named in the op's attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from jax.extend.mlir import ir

from autoshard.errors import InputError
from autoshard.graph import ALIASES, FactorKind, Rule
from autoshard.program import MATERIALS, REGION_OPS, is_token, shape_of, source_of, target_of
from autoshard.ragged import RAGGED_DOT, ragged_formula

Shape: TypeAlias = tuple[int, ...]
RuleMaker: TypeAlias = Callable[[tuple[Shape, ...], tuple[Shape, ...]], str | None]
"""From the global shapes of all operands and of all results to a rule; None gives none."""
FlopsMaker: TypeAlias = Callable[[tuple[Shape, ...], tuple[Shape, ...]], float]
"""From the same shapes to the work of the matrix units in one unsplit call [FLOP]."""

_REST = "..."
_DIALECTS = ("stablehlo.", "chlo.")


@dataclass(frozen=True, slots=True)
class Formula:
    """A rule as it was written.

    Attributes:
        text: The text.
        operands: Names of the dimensions of each operand.
        results: Names of the dimensions of each result.
        sums: Names of dimensions over which the results of the devices are added up.
        whole: Names of dimensions that stay whole.
    """

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    sums: frozenset[str]
    whole: frozenset[str]


@dataclass(frozen=True, eq=False, slots=True)
class Registration:
    """A rule that is in force until it is removed; also a context manager that does so at its end.

    Attributes:
        target: The op or custom call it is for.
        rule: The rule.
        flops: What a call computes; None if nobody has said.
    """

    target: str
    rule: str | RuleMaker
    flops: FlopsMaker | None = None

    def remove(self) -> None:
        """Put back what was in force before; a later rule for the same target stays in force."""
        kept = [one for one in _REGISTERED.pop(self.target, ()) if one is not self]
        if kept:
            _REGISTERED[self.target] = kept

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


_REGISTERED: dict[str, list[Registration]] = {}
"""What is registered for each target, first to last: the last is in force."""


def register_rule(
    target: str, rule: str | RuleMaker, *, flops: FlopsMaker | None = None
) -> Registration:
    """Say how an op that autoshard would run whole on every device may be split.

    Each device then calls the op on its own pieces (see :mod:`autoshard.rules` for how a rule is
    written), so the op must be right on pieces of any size. A rule is in force for what is planned
    from now on, in this process; a later one for the same target takes its place.

    Args:
        target: The target of a custom call, e.g. ``"my_kernel"``, or the name of a StableHLO or
            CHLO op, e.g. ``"stablehlo.fft"``.
        rule: E.g. ``"i j, j k -> i k; sum j"``, or a function from the shapes of all operands and
            of all results to such a text (or None).
        flops: A function from the same shapes to the work of the matrix units in one unsplit call
            [FLOP], e.g. by :func:`autoshard.cost_models.attention.flash_attention_flops`; devices
            that split the call share it. None: it is priced by the memory that it reads and writes.

    Returns:
        The registration: ``remove()`` ends it, as does the end of a ``with`` block around it.

    Raises:
        InputError: The rule cannot be read, or the target is not an op that can be split.

    Examples:
        >>> with register_rule("my_kernel", "... n -> ... n; whole n"):
        ...     pass  # plan here
    """
    if not target or not isinstance(target, str):
        raise InputError(
            f"{target!r} is no name of an op",
            fix='give the target of a custom call, or a name such as "stablehlo.fft"',
        )
    if target in REGION_OPS | MATERIALS | ALIASES or target.startswith(("sdy.", "func.")):
        raise InputError(
            f"{target} cannot have a rule: it is no op on tensors that can be split by one",
            fix="give rules for the ops inside it",
        )
    if "python" in target and "callback" in target:
        raise InputError(
            f"{target} calls back into Python, which checks that it gets whole arrays",
            fix="call it inside jax.shard_map to have each device call it on its own piece",
        )
    if isinstance(rule, str):
        parse(rule)
    elif not callable(rule):
        raise InputError(
            f"the rule of {target} is a {type(rule).__name__}",
            fix='give a text such as "i j, j k -> i k; sum j" or a function from shapes to one',
        )
    if flops is not None and not callable(flops):
        raise InputError(
            f"flops of {target} is a {type(flops).__name__}",
            fix="give a function from the shapes of all operands and of all results to a number",
        )
    before = _in_force(target)
    if before is not None and before.rule == rule and before.flops == flops:
        return before
    made = Registration(target, rule, flops)
    _REGISTERED.setdefault(target, []).append(made)
    return made


def _in_force(target: str) -> Registration | None:
    registered = _REGISTERED.get(target)
    return registered[-1] if registered else None


def _made(given: Registration, operation: ir.Operation) -> str | None:
    """What a caller's rule says of one op."""
    assert not isinstance(given.rule, str)
    made: str | None = _asked(given, "rule", given.rule, operation, "a text such as 'i j -> i j'")
    return made


def _asked(
    given: Registration,
    what: str,
    function: Callable[..., Any],
    operation: ir.Operation,
    gives: str,
) -> Any:
    """What a caller's function says of one op."""
    shapes = (
        tuple(shape_of(v) for v in operation.operands),
        tuple(shape_of(v) for v in operation.results),
    )
    try:
        return function(*shapes)
    except Exception as error:  # the caller's own code: whatever it raises, say which it was
        raise InputError(
            f"the {what} of {given.target} raised {type(error).__name__}: {error}",
            at=f"{source_of(operation) or given.target}, with {shapes[0]} -> {shapes[1]}",
            fix="it is called with the shapes of all operands and of all results, and returns "
            f"{gives}, or None",
        ) from error


def stated_flops(operation: ir.Operation) -> float | None:
    """What the caller says that one unsplit call computes [FLOP]; None if nothing is said.

    Raises:
        InputError: What was registered for it does not give a number.
    """
    given = _in_force(target_of(operation) or operation.name)
    if given is None or given.flops is None:
        return None
    gives = "a number"
    flops = _asked(given, "flops function", given.flops, operation, gives)
    if flops is None:
        return None
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 <= flops < math.inf:
        raise InputError(
            f"the flops function of {given.target} returned {flops!r}",
            at=source_of(operation),
            fix="return a number of operations, 0 or more",
        )
    return float(flops)


def parse(text: str) -> Formula:
    """Read a rule.

    Raises:
        InputError: It cannot be read.
    """
    head, *clauses = text.split(";")
    sides = head.split("->")
    if len(sides) != 2:
        raise _unreadable(text, "there must be one '->' between operands and results")
    operands, results = (tuple(tuple(t.split()) for t in side.split(",")) for side in sides)
    for tensor in (*operands, *results):
        for name in tensor:
            if name != _REST and not name.isidentifier():
                raise _unreadable(text, f"{name!r} is no name of a dimension")
            if tensor.count(name) > 1:
                raise _unreadable(text, f"{name!r} names two dimensions of one tensor")
        if _REST in tensor[1:]:
            raise _unreadable(text, "'...' must come first")
    known = {name for tensor in (*operands, *results) for name in tensor}
    named: dict[str, set[str]] = {"sum": set(), "whole": set()}
    for clause in clauses:
        word, *names = clause.split() or [""]
        if word not in named or not names:
            raise _unreadable(text, f"{clause.strip()!r} is neither 'sum ...' nor 'whole ...'")
        missing = [name for name in names if name not in known]
        if missing:
            raise _unreadable(text, f"{missing[0]!r} names no dimension")
        named[word] |= set(names)
    returned = named["sum"] & {name for tensor in results for name in tensor}
    if returned:
        raise _unreadable(text, f"{min(returned)!r} is summed, yet a result has it")
    return Formula(text, operands, results, frozenset(named["sum"]), frozenset(named["whole"]))


def rule_for(operation: ir.Operation) -> Rule | None:
    """The rule by which an op is run piecewise; None if it is left to XLA.

    Raises:
        InputError: The registered rule does not fit the op.
    """
    name = operation.name
    called = target_of(operation) or name
    if called not in _REGISTERED and name not in _BUILT_IN:
        return None
    if any(is_token(v) for v in (*operation.operands, *operation.results)):
        return None  # its effects are in order: it runs once
    operands = tuple(shape_of(v) for v in operation.operands)
    results = tuple(shape_of(v) for v in operation.results)
    given = _in_force(called)
    if given is None:
        text = _BUILT_IN[name](operation) if name in _BUILT_IN else None
    else:
        text = given.rule if isinstance(given.rule, str) else _made(given, operation)
    if text is None:
        return None
    if not isinstance(text, str):
        raise InputError(
            f"the rule of {called} returned a {type(text).__name__}",
            at=source_of(operation),
            fix="return a text such as 'i j -> i j', or None",
        )
    at = " ".join(filter(None, (called, source_of(operation))))
    return fitted(parse(text), operands, results, at)


def fitted(
    formula: Formula, operands: Sequence[Shape], results: Sequence[Shape], at: str = ""
) -> Rule:
    """A formula with the sizes of actual tensors.

    Raises:
        InputError: It has another number of tensors or dimensions, or one name has two sizes.
    """
    sides = []
    for what, names, shapes in (
        ("operand", formula.operands, operands),
        ("result", formula.results, results),
    ):
        tensors = () if names == ((),) and not shapes else names
        if len(tensors) != len(shapes):
            raise _unfit(formula, f"it has {len(tensors)} {what}s, the op {len(shapes)}", at)
        sides.append(
            [
                _named(formula, f"{what} {k}", dims, shape, at)
                for k, (dims, shape) in enumerate(zip(tensors, shapes, strict=True))
            ]
        )
    sizes: dict[str, int] = {}
    for side, shapes in zip(sides, (operands, results), strict=True):
        for dims, shape in zip(side, shapes, strict=True):
            for name, size in zip(dims, shape, strict=True):
                if sizes.setdefault(name, size) != size:
                    raise _unfit(formula, f"{name!r} is {sizes[name]} here and {size} there", at)
    number = {name: k for k, name in enumerate(sizes)}
    made = [tuple(tuple((number[name],) for name in dims) for dims in side) for side in sides]
    kinds = tuple(_kind(formula, name, sides[0], sides[1]) for name in sizes)
    return Rule(tuple(sizes.values()), kinds, made[0], made[1])


def _named(
    formula: Formula, what: str, names: tuple[str, ...], shape: Shape, at: str
) -> tuple[str, ...]:
    """The names of a tensor's dimensions, with those that ``...`` stands for."""
    rest = names[:1] == (_REST,)
    named = names[1:] if rest else names
    if len(shape) < len(named) or (len(shape) > len(named) and not rest):
        raise _unfit(formula, f"{what} has {len(shape)} dimensions", at)
    return (*(f"{_REST}{k}" for k in range(len(shape) - len(named))), *named)


def _kind(
    formula: Formula,
    name: str,
    operands: Sequence[tuple[str, ...]],
    results: Sequence[tuple[str, ...]],
) -> FactorKind:
    written = _REST if name.startswith(_REST) else name
    if written in formula.whole:
        return "replicated"
    if written in formula.sums:
        return "reduction"
    along = any(name in t for t in operands) and all(name in t for t in results)
    return "pass" if along else "replicated"


def _unreadable(text: str, why: str) -> InputError:
    return InputError(
        f"the rule {text!r} cannot be read: {why}",
        fix="write it like 'b i j, b j k -> b i k; sum j; whole b'",
    )


def _unfit(formula: Formula, why: str, at: str) -> InputError:
    return InputError(
        f"the rule {formula.text!r} does not fit the op: {why}",
        at=at,
        fix="name every dimension of every operand and result, leading ones by '...' if need be",
    )


def _fft(operation: ir.Operation) -> str:
    """All but the dimensions that are transformed."""
    count = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
    here, there = (" ".join(f"{side}{k}" for k in range(count)) for side in "xy")
    return f"... {here} -> ... {there}"


_BUILT_IN: Mapping[str, Callable[[ir.Operation], str | None]] = {
    "stablehlo.fft": _fft,  # XLA gathers an FFT whose batch is split
    RAGGED_DOT: ragged_formula,  # nor for these products
    "chlo.top_k": lambda _: "... n -> ... k, ... k",  # Shardy has no rule for it
}
"""Rules of ops that run piecewise although nobody registered one."""
