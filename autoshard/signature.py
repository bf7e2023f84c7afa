"""How a function is called: which arguments are static or donated, and the flat list of its arrays.

``jax.jit`` decides from ``static_argnums``, ``static_argnames``, ``donate_argnums`` and
``donate_argnames`` what a call means; :class:`Convention` decides the same. A call is then taken
apart (:func:`split`) into leaves, and its :class:`Signature` says for each array leaf where it
sits, what it is called, and its shape and type. Leaves that are no arrays (an activation function
inside a module, say) are fixed: part of the program, like static arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef, keystr, tree_flatten, tree_flatten_with_path

from autoshard.errors import InputError
from autoshard.given import several

Argnums = int | Sequence[int] | None
Argnames = str | Iterable[str] | None

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments or results.

    Attributes:
        path: Where it sits, as ``jax.tree_util.keystr`` writes it: inside ``args`` for a positional
            argument (``[0]['w1']``), inside ``kwargs`` for a keyword (``['lr']``), or inside
            the result.
        name: The same for people, e.g. ``state.params['w1']`` or ``result[0]``.
        shape: Sizes as JAX shows them.
        dtype: Element type as JAX shows it (a key type for typed PRNG keys).
        weak_type: Whether it takes its type from what it meets (Python numbers).
        donated: Whether the caller gives the buffer up.
        on_host: Whether the program leaves it in the memory of the host.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    donated: bool = False
    on_host: bool = False

    @property
    def is_key(self) -> bool:
        """Whether it holds typed PRNG keys, which a lowered module stores as words."""
        return bool(jnp.issubdtype(self.dtype, jax.dtypes.extended))

    @property
    def module_rank(self) -> int:
        """Rank in the lowered module; keys have more dimensions there than in JAX."""
        if not self.is_key:
            return len(self.shape)
        return len(jax.eval_shape(jax.random.key_data, self.abstract).shape)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and type, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Convention:
    """Which arguments of a function are static and which are donated.

    Attributes:
        parameters: Names of the parameters that can be given by position.
        varargs: Name of the ``*args`` parameter; empty if there is none.
        static_argnums: Positions that are part of the program; negative ones count from the end.
        static_argnames: Keywords that are part of the program.
        donate_argnums: Positions whose arrays the caller gives up.
        donate_argnames: Keywords whose arrays the caller gives up.
    """

    parameters: tuple[str, ...] = ()
    varargs: str = ""
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        static_argnums: Argnums = None,
        static_argnames: Argnames = None,
        donate_argnums: Argnums = None,
        donate_argnames: Argnames = None,
    ) -> Convention:
        """Resolve the options for ``fn``; numbers and names are inferred from each other.

        Raises:
            InputError: A name or number that ``fn`` does not have, or an argument that is both
                static and donated.
        Source:
            The documentation of ``jax.jit``: where only one of ``argnums`` and ``argnames`` is
            given, the other is found with ``inspect.signature``.
        """
        try:
            parameters = tuple(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # builtins and some callables have no signature
            parameters = ()
        s_nums, s_names = _resolve(parameters, "static", static_argnums, static_argnames)
        d_nums, d_names = _resolve(parameters, "donate", donate_argnums, donate_argnames)
        names = tuple(p.name for p in parameters if p.kind in _POSITIONAL)
        both = {*s_names} & {*d_names} or {*s_nums} & {*d_nums}
        if both:
            raise InputError(
                f"argument {next(iter(both))!r} is both static and donated",
                fix="donate only arguments that hold arrays",
            )
        varargs = (p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
        return cls(names, next(varargs, ""), s_nums, s_names, d_nums, d_names)

    @property
    def has_statics(self) -> bool:
        """Whether any argument is static."""
        return bool(self.static_argnums or self.static_argnames)

    def argument_name(self, position: int) -> str:
        """What the positional argument is called."""
        if position < len(self.parameters):
            return self.parameters[position]
        if self.varargs:
            return f"{self.varargs}[{position - len(self.parameters)}]"
        return f"args[{position}]"


class Call(NamedTuple):
    """A call taken apart.

    Attributes:
        leaves: Every leaf of the arguments that are not static.
        tree: How they hang together: ``(positional, keywords)``.
        statics: Static arguments by position or keyword.
        positions: Original positions of the positional arguments that are not static.
    """

    leaves: list[Any]
    tree: PyTreeDef
    statics: tuple[tuple[int | str, Any], ...]
    positions: tuple[int, ...]


def split(convention: Convention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Take a call apart."""
    if not convention.has_statics:
        return Call(*tree_flatten((args, kwargs)), (), tuple(range(len(args))))
    fixed = _in_range(convention.static_argnums, len(args))
    statics: list[tuple[int | str, Any]] = [(i, args[i]) for i in sorted(fixed)]
    statics += [(k, kwargs[k]) for k in sorted(kwargs) if k in convention.static_argnames]
    positions = tuple(i for i in range(len(args)) if i not in fixed)
    rest = {k: v for k, v in kwargs.items() if k not in convention.static_argnames}
    return Call(*tree_flatten((tuple(args[i] for i in positions), rest)), tuple(statics), positions)


def settings() -> tuple[Any, ...]:
    """The JAX settings that change what tracing a function gives."""
    config: Any = jax.config  # its options are not declared
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        config.jax_default_prng_impl,
        config.jax_disable_jit,
        getattr(config, "jax_threefry_partitionable", None),  # not an option of every release
    )


def _is_fixed(leaf: Any) -> bool:
    """Whether a leaf that is no array can be part of the program: a function, or a plain value.

    An object that is equal to itself alone may hold arrays, and change them unseen.
    """
    kind: Any = type(leaf)
    by_value = kind.__eq__ is not object.__eq__ and kind.__hash__ is not object.__hash__
    return kind.__hash__ is not None and (callable(leaf) or by_value)


def call_key(convention: Convention, call: Call) -> Hashable:
    """What a plan depends on: the tree, shapes and types, all that is fixed, and JAX's settings.

    Raises:
        InputError: A static argument or leaf that can be neither an array nor part of the program.
    """
    kinds: list[Hashable] = []
    for number, leaf in enumerate(call.leaves):
        aval = array_type(leaf)
        if aval is not None:
            kinds.append((aval.shape, aval.dtype, bool(aval.weak_type)))
            continue
        if not _is_fixed(leaf):
            name = _leaf_places(convention, call)[number][1]
            raise InputError(
                f"{name} holds a {type(leaf).__name__}, which is not a valid JAX type",
                at=f"argument {name}",
                fix="pass an array or a number, register its type as a pytree, or name the "
                "argument in static_argnames",
            )
        kinds.append(("fixed", type(leaf), leaf))
    statics: list[Hashable] = []
    for place, value in call.statics:
        try:
            hash(value)
        except TypeError as error:
            name = convention.argument_name(place) if isinstance(place, int) else place
            raise InputError(
                f"static argument {name} is a {type(value).__name__}, which cannot be hashed",
                at=f"argument {name}",
                fix="pass something hashable: a tuple instead of a list, a frozen dataclass",
            ) from error
        statics.append((place, type(value), value))
    return call.tree, tuple(kinds), tuple(statics), call.positions, settings()


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """What one kind of call looks like: its arrays in order, and all that is fixed.

    Attributes:
        convention: Static and donated arguments.
        arguments: The arrays, in the order in which the flat program takes them.
        tree: Tree of ``(positional, keywords)`` without static arguments.
        array_positions: Where among all leaves of ``tree`` the arrays are.
        fixed: The other leaves and where they are.
        statics: Static arguments by position or keyword.
        positions: Original positions of the positional arguments in ``tree``.
    """

    convention: Convention
    arguments: tuple[Leaf, ...]
    tree: PyTreeDef
    array_positions: tuple[int, ...]
    fixed: tuple[tuple[int, Any], ...]
    statics: tuple[tuple[int | str, Any], ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, convention: Convention, call: Call) -> Signature:
        """The signature of a call that :func:`call_key` has accepted."""
        donated = _in_range(convention.donate_argnums, len(call.positions) + len(call.statics))
        arguments, array_positions, fixed = [], [], []
        for number, (leaf, place) in enumerate(
            zip(call.leaves, _leaf_places(convention, call), strict=True)
        ):
            path, name, top = place
            aval = array_type(leaf)
            if aval is None:
                fixed.append((number, leaf))
                continue
            gives = top in donated if isinstance(top, int) else top in convention.donate_argnames
            array_positions.append(number)
            arguments.append(
                Leaf(path, name, tuple(aval.shape), aval.dtype, bool(aval.weak_type), gives)
            )
        return cls(
            convention,
            tuple(arguments),
            call.tree,
            tuple(array_positions),
            tuple(fixed),
            call.statics,
            call.positions,
        )

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions in ``arguments`` whose buffers the caller gives up."""
        return tuple(i for i, leaf in enumerate(self.arguments) if leaf.donated)

    def fill(
        self, values: Sequence[Any], fixed: Any = ...
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One value per array, put where the arrays are: ``(positional, keywords)`` as in ``tree``.

        Args:
            values: One per array.
            fixed: What to put where leaves are fixed; by default the leaves themselves.
        """
        leaves: list[Any] = [None] * self.tree.num_leaves
        for position, value in zip(self.array_positions, values, strict=True):
            leaves[position] = value
        for position, value in self.fixed:
            leaves[position] = value if fixed is ... else fixed
        filled: tuple[tuple[Any, ...], dict[str, Any]] = self.tree.unflatten(leaves)
        return filled

    def arguments_of(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The whole call, static arguments included, with ``values`` as its arrays."""
        dynamic, keywords = self.fill(values)
        positional = dict(zip(self.positions, dynamic, strict=True))
        positional |= {k: v for k, v in self.statics if isinstance(k, int)}
        keywords = keywords | {k: v for k, v in self.statics if isinstance(k, str)}
        return tuple(positional[i] for i in sorted(positional)), keywords


def ties(arguments: Sequence[Leaf], results: Sequence[Leaf]) -> tuple[tuple[int, int], ...]:
    """Which result replaces which donated argument, as pairs of positions.

    A donated argument that comes back as a part of the result (a train state, say) is paired leaf
    by leaf; a leaf with no such partner takes the first free result of its shape and type, as XLA
    would reuse its buffer.
    """
    pairs: dict[int, int] = {}
    free = set(range(len(results)))

    def fits(a: int, r: int) -> bool:
        return (
            r in free
            and results[r].shape == arguments[a].shape
            and results[r].dtype == arguments[a].dtype
        )

    groups: dict[str, list[int]] = {}
    for a, leaf in enumerate(arguments):
        if leaf.donated:
            groups.setdefault(leaf.path[: leaf.path.index("]") + 1], []).append(a)
    for top, members in groups.items():
        found: dict[str, dict[int, int]] = {}
        for a in members:
            inner = arguments[a].path[len(top) :]
            for r, result in enumerate(results):
                if result.path.endswith(inner) and fits(a, r):
                    place = result.path[: len(result.path) - len(inner)]
                    found.setdefault(place, {}).setdefault(a, r)
        if found:
            best = max(found.values(), key=len)
            pairs |= best
            free -= set(best.values())
    for a, leaf in enumerate(arguments):
        if leaf.donated and a not in pairs:
            partner = next((r for r in range(len(results)) if fits(a, r)), None)
            if partner is not None:
                pairs[a] = partner
                free.discard(partner)
    return tuple(sorted(pairs.items()))


def array_type(leaf: Any) -> Any:
    """Shape, dtype and weak type of a leaf as JAX takes it; None for what is no array."""
    if isinstance(leaf, (str, bytes)) or leaf is None:
        return None
    try:
        return jax.typeof(leaf)
    except TypeError:
        return None


def is_weak(leaf: Any) -> bool:
    """Whether a leaf takes its type from what it meets."""
    try:
        return bool(leaf.weak_type)
    except AttributeError:
        return type(leaf) in _NUMBERS and type(leaf) is not bool


def result_leaves(leaves: Iterable[tuple[Any, Any]]) -> tuple[Leaf, ...]:
    """Names for the arrays of a result, from pairs of key path and abstract value."""
    made = []
    for keys, aval in leaves:
        path = keystr(keys)
        weak = bool(getattr(aval, "weak_type", False))
        host = getattr(aval, "memory_space", None) is jax.memory.Space.Host
        made.append(Leaf(path, f"result{path}", tuple(aval.shape), aval.dtype, weak, on_host=host))
    return tuple(made)


def _leaf_places(convention: Convention, call: Call) -> list[tuple[str, str, int | str]]:
    """Path, name and top-level argument of every leaf of a call."""
    places: list[tuple[str, str, int | str]] = []
    for keys, _ in tree_flatten_with_path(call.tree.unflatten(call.leaves))[0]:
        inner = keystr(keys[2:])
        if keys[0].idx == 0:
            position = call.positions[keys[1].idx]
            name = convention.argument_name(position)
            places.append((f"[{position}]{inner}", f"{name}{inner}", position))
        else:
            places.append((f"[{keys[1].key!r}]{inner}", f"{keys[1].key}{inner}", keys[1].key))
    return places


def _in_range(numbers: Sequence[int], count: int) -> set[int]:
    return {n % count for n in numbers if -count <= n < count}


def _resolve(
    parameters: Sequence[inspect.Parameter], kind: str, argnums: Argnums, argnames: Argnames
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    fix = "give whole numbers: the positions of arguments, e.g. 0 or (0, 1)"
    nums = several(argnums, int, f"{kind}_argnums", fix=fix)
    fix = "give the names of arguments, e.g. 'state' or ('state', 'batch')"
    names = several(argnames, str, f"{kind}_argnames", fix=fix)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    open_ended = {p.kind for p in parameters}
    if parameters and inspect.Parameter.VAR_KEYWORD not in open_ended:
        known = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        unknown = next((n for n in names if n not in known), None)
        if unknown is not None:
            raise InputError(
                f"{kind}_argnames has {unknown!r}, which is no parameter of the function",
                fix=f"use one of: {', '.join(known)}",
            )
    if parameters and inspect.Parameter.VAR_POSITIONAL not in open_ended:
        count = len(positional)
        beyond = next((n for n in nums if not -count <= n < count), None)
        if beyond is not None:
            raise InputError(
                f"{kind}_argnums has {beyond}, but the function takes {count} positional arguments",
                fix=f"use numbers from {-count} to {count - 1}",
            )
    if argnums is None and argnames is not None:
        nums = tuple(i for i, p in enumerate(positional) if p.name in names)
    elif argnames is None and argnums is not None:
        inside = _in_range(nums, len(positional)) if positional else set()
        by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = tuple(
            p.name for i, p in enumerate(positional) if i in inside and p.kind is by_keyword
        )
        if inspect.Parameter.VAR_POSITIONAL not in open_ended:
            nums = tuple(sorted(inside)) if positional else nums
    return nums, names
