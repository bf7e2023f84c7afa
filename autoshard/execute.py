"""Running what was compiled: where arrays live, and calls that look like those of the function."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import InputError
from autoshard.shardings import Sharding
from autoshard.signature import (
    Call,
    is_weak,
    settings,
    split,
)
from autoshard.tracing import Traced, named


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Where arguments and results live, in the caller's own trees.

    Attributes:
        in_shardings: Per positional argument that is not static, its tree of ``NamedSharding``:
            what ``jax.jit(fn, in_shardings=...)`` takes.
        keyword_shardings: The same for arguments given by keyword.
        out_shardings: The tree of the result's ``NamedSharding``.
        positions: Positions of the positional arguments that are not static.
    """

    in_shardings: tuple[Any, ...]
    keyword_shardings: dict[str, Any]
    out_shardings: Any
    positions: tuple[int, ...]

    @classmethod
    def of(
        cls, traced: Traced, arguments: Sequence[Sharding], results: Sequence[Sharding]
    ) -> Placement:
        """The placement that a plan's shardings mean on the caller's mesh."""
        signature = traced.signature
        given, keywords = signature.fill(
            named(signature.arguments, arguments, traced.mesh), fixed=None
        )
        out = traced.result_tree.fill(named(traced.results, results, traced.mesh), fixed=None)
        return cls(given, keywords, out, signature.positions)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Move arguments to where the program wants them.

        Give the arguments as for a call; later ones may be left out.

        Returns:
            One argument alone if one was given, else a tuple; with keywords, a pair of tuple and
            dictionary.
        """
        wanted = dict(zip(self.positions, self.in_shardings, strict=True))
        if len(args) > len(self.positions) and max(wanted, default=-1) < len(args) - 1:
            raise InputError(
                f"{len(args)} positional arguments to place, the plan is for {len(wanted)}",
                fix="give the arguments with which the plan was made",
            )
        placed = tuple(_put(arg, wanted[i]) if i in wanted else arg for i, arg in enumerate(args))
        if kwargs:
            unknown = next((k for k in kwargs if k not in self.keyword_shardings), None)
            if unknown is not None:
                raise InputError(
                    f"the plan has no keyword argument {unknown!r}",
                    fix=f"keywords: {', '.join(self.keyword_shardings) or 'none'}",
                )
            moved = {k: _put(v, self.keyword_shardings[k]) for k, v in kwargs.items()}
            return placed, moved
        return placed[0] if len(placed) == 1 else placed


def _put(argument: Any, shardings: Any) -> Any:
    try:
        return jax.tree.map(
            lambda leaf, sharding: leaf if sharding is None else put(leaf, sharding),
            argument,
            shardings,
            is_leaf=lambda leaf: leaf is None,
        )
    except ValueError as error:
        raise InputError(
            f"an argument of another structure than planned: {error}",
            fix=f"give one of structure {jax.tree.structure(shardings)}",
        ) from error


_AVAL = operator.attrgetter("aval")


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """An array where ``sharding`` says; the array itself if it is there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, sharding)


@dataclass(frozen=True, eq=False, slots=True)
class Executable:
    """A compiled program that is called like the function it came from.

    Attributes:
        compiled: The executable as JAX made it, over flat arrays.
        traced: The program it was compiled from.
        in_shardings: One per array argument.
        partitioner: Who wrote the program of one device: ``"xla"`` or ``"shardy"``.
        fallback_reason: Why that is XLA although Shardy was asked for; else empty.
    """

    compiled: jax.stages.Compiled
    traced: Traced
    in_shardings: tuple[NamedSharding, ...]
    partitioner: str = "xla"
    fallback_reason: str = ""
    _settings: tuple[Any, ...] = field(default_factory=settings)
    _weak: list[bool] = field(init=False)
    _seen: list[list[Any]] = field(init=False, default_factory=list)
    _donated: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        weak = [leaf.weak_type for leaf in self.traced.signature.arguments]
        object.__setattr__(self, "_weak", weak)
        object.__setattr__(self, "_donated", self.traced.signature.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments of the planned structure, shapes and types; they are moved if need be.

        Raises:
            InputError: Arguments of another structure, or with other static parts.
        """
        values = self.match(split(self.traced.signature.convention, args, kwargs))
        if values is None:
            raise InputError(
                "the arguments differ from those the program was compiled for",
                at=f"{self.traced.name}({', '.join(map(str, self.traced.signature.arguments))})",
                fix="call the sharded function, which plans for new arguments, or compile again",
            )
        self.check_donated(values)
        return self.traced.result_tree.fill(self.compiled(*self.place(values)))

    def match(self, call: Call) -> list[Any] | None:
        """The call's arrays if all that JAX itself does not check fits; else None."""
        signature = self.traced.signature
        if call.tree != signature.tree or settings() != self._settings:
            return None
        values = call.leaves
        if signature.fixed:
            if not all(_same(values[i], fixed) for i, fixed in signature.fixed):
                return None
            values = [values[i] for i in signature.array_positions]
        if call.statics or signature.statics:
            same = len(call.statics) == len(signature.statics) and all(
                ours[0] == theirs[0] and _same(ours[1], theirs[1])
                for ours, theirs in zip(signature.statics, call.statics, strict=True)
            )
            if not same:
                return None
        try:
            avals = list(map(_AVAL, values))
        except AttributeError:  # numpy arrays and Python numbers among them
            return values if [is_weak(value) for value in values] == self._weak else None
        # In a training loop the abstract values are the very objects of the call before.
        if self._seen and avals == self._seen[0]:
            return values
        if [aval.weak_type for aval in avals] != self._weak:
            return None
        self._seen[:] = [avals]
        return values

    def is_alive(self, values: Sequence[Any]) -> bool:
        """Whether the first donated array still holds its buffer; cheap enough for every call.

        XLA:CPU runs on a deleted buffer until it crashes, so it must never get one.
        """
        donated = self._donated
        if not donated:
            return True
        value = values[donated[0]]
        return not (isinstance(value, jax.Array) and value.is_deleted())

    def check_donated(self, values: Sequence[Any]) -> None:
        """Refuse donated arrays that are gone or given twice.

        Raises:
            InputError: Names the argument.
        """
        seen: dict[int, str] = {}
        for number in self._donated:
            value, leaf = values[number], self.traced.signature.arguments[number]
            if not isinstance(value, jax.Array):
                continue
            if value.is_deleted():
                raise InputError(
                    f"{leaf.name} was donated to an earlier call and holds nothing any more",
                    at=f"argument {leaf}",
                    fix="pass the result that replaced it",
                )
            if id(value) in seen:
                raise InputError(
                    f"{leaf.name} and {seen[id(value)]} are one array, donated twice",
                    at=f"argument {leaf}",
                    fix="pass a copy for one of them, or do not donate both",
                )
            seen[id(value)] = leaf.name

    def place(self, values: Sequence[Any]) -> list[Any]:
        """The arrays where the program wants them."""
        return [put(v, s) for v, s in zip(values, self.in_shardings, strict=True)]

    @property
    def leaf_shardings(self) -> list[NamedSharding | None]:
        """One per leaf of ``(args, kwargs)`` without static arguments; None for fixed leaves."""
        signature = self.traced.signature
        leaves: list[NamedSharding | None] = [None] * signature.tree.num_leaves
        for position, sharding in zip(signature.array_positions, self.in_shardings, strict=True):
            leaves[position] = sharding
        return leaves

    def as_text(self) -> str:
        """The compiled per-device program."""
        return str(self.compiled.as_text())

    def cost_analysis(self) -> Any:
        """What XLA says the program costs, as ``jax.stages.Compiled.cost_analysis``."""
        return self.compiled.cost_analysis()

    @property
    def peak_bytes(self) -> int:
        """Arguments, results and temporaries together on one device [bytes]; 0 if XLA is silent."""
        sizes = self.memory_analysis()
        if sizes is None:
            return 0
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return int(held + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes)

    def memory_analysis(self) -> Any:
        """What XLA says the program occupies, as ``jax.stages.Compiled.memory_analysis``."""
        return self.compiled.memory_analysis()


def _same(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (type(ours) is type(theirs) and bool(ours == theirs))
