"""Patterns of ops, and what they are rewritten to.

A :class:`Pattern` is an :func:`op` to look for, with the ops that make its operands, and a function
that makes what replaces it. The greedy driver (:mod:`autoshard.passes.driver`) finds and applies
them everywhere in a program. Inside the function, the builders of
``jax.extend.mlir.dialects.stablehlo`` write in front of the matched op and give new ops its source
location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autoshard.shardings import Sharding

Value: TypeAlias = "ir.Value[Any]"

Attributes: TypeAlias = "Mapping[str, object | Callable[[ir.Attribute], bool]]"
"""Attribute name to its value as MLIR prints it, or to a test of it."""


@dataclass(frozen=True, slots=True, eq=False)
class OpPattern:
    """An op to look for; made by :func:`op`.

    Attributes:
        names: Its name is one of these; any if empty.
        operands: What makes its operands; None stands for anything.
        attributes: What its attributes are.
        sharding: A test of the sharding of its first result (None where the module states none).
        where: A test of the op itself.
        bind: By what name the rewrite finds it.
        single_use: Whether its result must have one use.
        commutative: Whether two operands may also match in the opposite order.
    """

    names: frozenset[str]
    operands: tuple[OpPattern | None, ...] | None
    attributes: Attributes
    sharding: Callable[[Sharding | None], bool] | None
    where: Callable[[ir.Operation], bool] | None
    bind: str
    single_use: bool
    commutative: bool

    def match(self, operation: ir.Operation) -> dict[str, ir.Operation] | None:
        """The ops found, by the names they are bound to; None if the op is another."""
        if self.names and operation.name not in self.names:
            return None
        if self.single_use and len(list(operation.results[0].uses)) != 1:
            return None
        if not all(_agrees(operation, n, wanted) for n, wanted in self.attributes.items()):
            return None
        if self.sharding is not None and not self.sharding(sharding_of(operation.results[0])):
            return None
        if self.where is not None and not self.where(operation):
            return None
        for found in self._operands(operation):
            return {**found, self.bind: operation} if self.bind else found
        return None

    def _operands(self, operation: ir.Operation) -> Iterator[dict[str, ir.Operation]]:
        if self.operands is None:
            yield {}
            return
        values = list(operation.operands)
        if len(values) != len(self.operands):
            return
        orders = [values, values[::-1]] if self.commutative and len(values) == 2 else [values]
        for order in orders:
            bound: dict[str, ir.Operation] = {}
            for value, wanted in zip(order, self.operands, strict=True):
                if wanted is None:
                    continue
                maker = maker_of(value)
                found = None if maker is None else wanted.match(maker)
                if found is None:
                    break
                bound.update(found)
            else:
                yield bound


def op(
    *names: str,
    operands: Sequence[OpPattern | None] | None = None,
    attributes: Attributes | None = None,
    sharding: Callable[[Sharding | None], bool] | None = None,
    where: Callable[[ir.Operation], bool] | None = None,
    bind: str = "",
    single_use: bool = False,
    commutative: bool = False,
) -> OpPattern:
    """An op to look for, e.g. ``op("stablehlo.transpose", operands=[op("stablehlo.add")])``.

    Args:
        *names: Its name is one of these; any if none is given.
        operands: What makes its operands, None for anything; left out if they do not matter.
        attributes: Attribute name to its value as MLIR prints it, or to a test of the attribute.
        sharding: A test of the sharding of its first result (None where the module states none).
        where: A test of the op itself.
        bind: By what name the rewrite finds it.
        single_use: Whether its result must have one use.
        commutative: Whether two operands may also match in the opposite order.
    """
    return OpPattern(
        frozenset(names),
        None if operands is None else tuple(operands),
        attributes or {},
        sharding,
        where,
        bind,
        single_use,
        commutative,
    )


@dataclass(frozen=True, slots=True)
class Match:
    """Where a pattern was found.

    Attributes:
        root: The op that is replaced.
        bound: The ops of the pattern that have names.
    """

    root: ir.Operation
    bound: Mapping[str, ir.Operation]

    def __getitem__(self, name: str) -> ir.Operation:
        return self.bound[name]


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes ops in front of the matched one, with its source location.

    It stands for the location and the place that the builders of JAX's dialects use as well.

    Attributes:
        root: The matched op.
    """

    root: ir.Operation

    def make(
        self,
        name: str,
        operands: Sequence[Value],
        types: Sequence[ir.Type],
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> ir.Operation:
        """An op by name, for those that no dialect has a builder of."""
        return ir.Operation.create(
            name,
            results=list(types),
            operands=list(operands),
            attributes=dict(attributes or {}),
            loc=self.root.location,
            ip=ir.InsertionPoint(self.root),
        )

    def like(
        self,
        operation: ir.Operation,
        operands: Sequence[Value],
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> ir.Operation:
        """A copy of an op, regions included, with other operands and some other attributes."""
        copy = operation.clone(ir.InsertionPoint(self.root)).operation
        for position, operand in enumerate(operands):
            copy.operands[position] = operand
        for name, attribute in (attributes or {}).items():
            copy.attributes[name] = attribute
        return copy


Rewriter: TypeAlias = "Callable[[Match, Builder], Sequence[Value]]"


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A rewrite: what to look for, and what to put in its place.

    Attributes:
        name: What its rewrites are counted under.
        root: The op that is replaced.
        rewrite: Makes the values that replace its results, one for each. What matches is rewritten:
            whether the rewrite applies is for ``root`` and ``where`` to say.
        where: A test of everything that was found.
    """

    name: str
    root: OpPattern
    rewrite: Rewriter
    where: Callable[[Match], bool] | None = None

    def match(self, operation: ir.Operation) -> Match | None:
        """Where the pattern holds at this op; None if it does not."""
        bound = self.root.match(operation)
        if bound is None:
            return None
        match = Match(operation, bound)
        return match if self.where is None or self.where(match) else None


def pattern(
    name: str, root: OpPattern, *, where: Callable[[Match], bool] | None = None
) -> Callable[[Rewriter], Pattern]:
    """Make a function ``f(match, builder) -> values`` the pattern that it rewrites.

    Examples:
        >>> @pattern("double-negation", op("stablehlo.negate", operands=[op("stablehlo.negate",
        ...          bind="inner")]))
        ... def double_negation(match, builder):
        ...     return [match["inner"].operands[0]]
        >>> double_negation.name
        'double-negation'
    """
    return lambda rewrite: Pattern(name, root, rewrite, where)


def maker_of(value: Value) -> ir.Operation | None:
    """The op that makes a value; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def sharding_of(value: Value) -> Sharding | None:
    """The sharding that the module states for a value; None if it states none.

    It is that of a constraint that makes the value or is the only one to read it, of the op's own
    ``sdy.sharding``, or of an argument of ``main``.
    """
    maker = maker_of(value)
    if maker is None:
        return _argument_sharding(ir.BlockArgument(value))
    if maker.name == "sdy.sharding_constraint":
        return _axes(maker.attributes["sharding"])
    if "sdy.sharding" in maker.attributes:
        number = ir.OpResult(value).result_number
        per_value = sdy.TensorShardingPerValueAttr(maker.attributes["sdy.sharding"])
        return _axes(list(per_value.shardings)[number])
    readers = [use.owner.operation for use in value.uses]
    if len(readers) == 1 and readers[0].name == "sdy.sharding_constraint":
        return _axes(readers[0].attributes["sharding"])
    return None


def _argument_sharding(argument: Any) -> Sharding | None:
    function = argument.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return None
    told = list(ir.ArrayAttr(function.attributes["arg_attrs"]))[argument.arg_number]
    attributes = ir.DictAttr(told)
    return _axes(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None


def _axes(attribute: ir.Attribute) -> Sharding:
    dimensions = map(
        sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attribute).dimension_shardings
    )
    return tuple(tuple(sdy.AxisRefAttr(axis).name for axis in dim.axes) for dim in dimensions)


def _agrees(operation: ir.Operation, name: str, wanted: object) -> bool:
    if name not in operation.attributes:
        return False
    attribute = operation.attributes[name]
    return bool(wanted(attribute)) if callable(wanted) else str(attribute) == str(wanted)
