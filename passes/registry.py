"""The passes by name: those that come with autoshard, and those that others register.

A pass is a frozen dataclass whose fields are its options, with a method ``run(module, context)``
that edits the module in place; or a function ``f(module, *, option=default)``. The decorator
:func:`register_pass` gives it its name. Passes of other distributions are found by entry points of
the group ``autoshard.passes``; the name of the entry point is the pass's.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar

from jax.extend.mlir import ir

from autoshard.errors import InputError, UnknownNameError
from autoshard.passes.context import PassContext
from autoshard.passes.option_values import (
    OptionError,
    from_python,
    is_option_type,
    to_text,
    type_text,
)

BUILTINS: Mapping[str, str] = {
    "collective-matmul": "autoshard.passes.collective_matmul",
    "collectives": "autoshard.passes.collectives",
    "flatten-calls": "autoshard.passes.flatten_calls",
    "fold-transpose": "autoshard.passes.fold_transpose",
    "pad": "autoshard.passes.pad",
    "partition": "autoshard.passes.partition",
    "quantize": "autoshard.passes.quantize",
    "reassociate": "autoshard.passes.reassociate",
    "shard": "autoshard.passes.shard",
    "shard-expert": "autoshard.passes.shard",
}
"""Pass name to the module that registers it, which is imported on first use."""

GROUP = "autoshard.passes"
"""Entry points of this group are passes of other distributions."""

Property = Literal["numerics", "boundary", "shardings", "effects"]
"""What a pass can promise to keep: values up to rounding; arguments and results of ``main``; the
shardings that are written in the module; callbacks and other effects, in order."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of a pass.

    Attributes:
        name: Its name.
        kind: Its type.
        default: Its default; ``dataclasses.MISSING`` if it must be given.
    """

    name: str
    kind: Any
    default: Any

    def __str__(self) -> str:
        default = "" if self.required else f" = {to_text(self.default)}"
        return f"{self.name}: {type_text(self.kind)}{default}"

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class PassInfo:
    """What is known of a pass by its name.

    Attributes:
        name: As in a pipeline.
        summary: What it does, in one line.
        options: Its options.
        preserves: What it promises to keep.
        not_idempotent: Why running it twice is not the same as once; empty if it is.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    preserves: tuple[str, ...] = ()
    not_idempotent: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "name": self.name,
            "summary": self.summary,
            "options": [
                {
                    "name": option.name,
                    "type": type_text(option.kind),
                    "required": option.required,
                    "default": None if option.required else to_text(option.default),
                }
                for option in self.options
            ],
            "preserves": list(self.preserves),
            "idempotent": not self.not_idempotent,
            "not_idempotent": self.not_idempotent,
        }


class Pass(Protocol):
    """A pass with its options."""

    @property
    def pass_info(self) -> PassInfo:
        """What is known of it by its name."""
        ...

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place."""
        ...


_REGISTERED: dict[str, Callable[..., Pass]] = {}


def register_pass(
    name: str,
    *,
    summary: str,
    preserves: tuple[Property, ...] = ("numerics", "boundary"),
    not_idempotent: str = "",
) -> Callable[[F], F]:
    """Make a dataclass or a function a pass that pipelines know by name.

    Args:
        name: Lower-case words joined by ``-``.
        summary: What it does, in one line.
        preserves: What it promises to keep.
        not_idempotent: Why running it twice is not the same as once; empty if it is.

    Raises:
        InputError: The name is taken, or an option has a type that no text can give.

    Examples:
        >>> @register_pass("shout", summary="Tells how often it ran")
        ... def shout(module, *, times: int = 1):
        ...     print("!" * times)
        >>> from autoshard.passes.pipeline import Pipeline
        >>> str(Pipeline.parse("shout{times=3}"))
        'shout{times=3}'
    """

    def register(made: F) -> F:
        is_class = isinstance(made, type)
        cls: Any = made if is_class else _from_function(made)
        if not hasattr(cls, "__dataclass_fields__"):
            raise InputError(
                f"the pass {name} is no dataclass", at=_where(made), fix="decorate it by @dataclass"
            )
        known = _REGISTERED.get(name)
        if known is not None and _where(known) != _where(made):
            raise InputError(
                f"two passes are called {name}",
                at=f"{_where(known)} and {_where(made)}",
                fix="give one of them another name",
            )
        cls.pass_info = PassInfo(name, summary, _options(cls, name), preserves, not_idempotent)
        _REGISTERED[name] = cls
        return made

    return register


def lookup(name: str, /, **options: Any) -> Pass:
    """The pass of that name with these options; those left out have their defaults.

    Raises:
        UnknownNameError: No pass is called so, or it has no such option.
        InputError: An option's value is of another type, or a needed one is missing.
    """
    if name.startswith("mlir:"):
        from autoshard.passes.mlir_pass import MlirPass

        return MlirPass(name.removeprefix("mlir:"), str(options.get("options", "")))
    cls = _load(name)
    info = info_of(name)
    kinds = {option.name: option.kind for option in info.options}
    values = {}
    for key, value in options.items():
        if key not in kinds:
            raise unknown_option(info, key)
        try:
            values[key] = from_python(value, kinds[key])
        except OptionError as error:
            raise InputError(
                f"{name}: {key}: {error}", fix=f"its options: {_shown(info)}"
            ) from error
    check_required(info, values)
    return cls(**values)


def registered() -> tuple[PassInfo, ...]:
    """All passes, in order of their names; importing them is part of it."""
    names = {*BUILTINS, *_REGISTERED, *_entry_points()}
    return tuple(info_of(name) for name in sorted(names))


def info_of(name: str) -> PassInfo:
    """What is known of the pass of that name.

    Raises:
        UnknownNameError: No pass is called so.
    """
    cls: Any = _load(name)
    info: PassInfo = cls.pass_info
    return info


def build(name: str, values: Mapping[str, Any]) -> Pass:
    """The pass with options whose values have been converted already."""
    return _load(name)(**values)


def unknown_pass(name: str, at: str = "") -> UnknownNameError:
    """The error for a name that no pass has."""
    known = sorted({*BUILTINS, *_REGISTERED, *_entry_points()})
    near = difflib.get_close_matches(name, known, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UnknownNameError(
        f"no pass is called {name!r}",
        at=at,
        fix=f"{hint}known: {', '.join(known)}, and mlir:NAME for a pass of MLIR",
    )


def unknown_option(info: PassInfo, key: str, at: str = "") -> UnknownNameError:
    """The error for an option that a pass does not have."""
    near = difflib.get_close_matches(key, [option.name for option in info.options], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UnknownNameError(
        f"the pass {info.name} has no option {key!r}",
        at=at,
        fix=f"{hint}its options: {_shown(info)}",
    )


def check_required(info: PassInfo, values: Mapping[str, Any], at: str = "") -> None:
    """Refuse to make a pass without an option that it needs.

    Raises:
        InputError: One is missing.
    """
    missing = [option for option in info.options if option.required and option.name not in values]
    if missing:
        raise InputError(
            f"the pass {info.name} needs the option {missing[0].name}",
            at=at,
            fix=f"its options: {_shown(info)}",
        )


def _shown(info: PassInfo) -> str:
    return "; ".join(map(str, info.options)) or "none"


def _load(name: str) -> Callable[..., Pass]:
    if name not in _REGISTERED:
        if name in BUILTINS:
            importlib.import_module(BUILTINS[name])
        elif (entry := _entry_points().get(name)) is not None:
            entry.load()
        if name not in _REGISTERED:
            raise unknown_pass(name)
    return _REGISTERED[name]


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _where(made: Any) -> str:
    return f"{made.__module__}.{made.__qualname__}"


def _options(cls: Any, name: str) -> tuple[Option, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for each in dataclasses.fields(cls):
        kind = hints[each.name]
        if not is_option_type(kind):
            raise InputError(
                f"option {each.name} of the pass {name} has the type {kind}",
                at=_where(cls),
                fix="use bool, int, float, str, Bytes, a Literal or Enum of words, a tuple of "
                "these, or one of them | None",
            )
        found.append(Option(each.name, kind, each.default))
    return tuple(found)


def _from_function(made: Callable[..., Any]) -> Any:
    """A dataclass with a function's keywords as fields, that calls it."""
    hints = typing.get_type_hints(made)
    parameters = inspect.signature(made).parameters.values()
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if not 1 <= len(positional) <= 2:
        raise InputError(
            f"{made.__qualname__} takes {len(positional)} arguments by position",
            at=_where(made),
            fix="write def f(module, *, option: int = 4) or def f(module, context, *, ...)",
        )
    with_context = len(positional) == 2
    fields: list[Any] = []
    for each in (p for p in parameters if p.kind is p.KEYWORD_ONLY):
        required = each.default is each.empty
        default = dataclasses.MISSING if required else each.default
        fields.append((each.name, hints[each.name], dataclasses.field(default=default)))

    def run(self: Any, module: ir.Module, context: PassContext) -> None:
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if with_context:
            made(module, context, **given)
        else:
            made(module, **given)

    cls = dataclasses.make_dataclass(made.__name__, fields, frozen=True, namespace={"run": run})
    cls.__module__, cls.__qualname__, cls.__doc__ = made.__module__, made.__qualname__, made.__doc__
    return cls
