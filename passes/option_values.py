"""Values of a pass's options: their types, how they are typed in a pipeline, how they are printed.

The types an option may have are those of this table; any of them may be made optional by
``| None``.

| type | written as |
|---|---|
| ``bool`` | ``true``, ``false`` |
| ``int``, ``float`` | ``4``, ``0.8`` |
| :class:`Bytes` | ``14GiB``, ``512MB``, ``4096`` |
| ``str`` | ``exact``, or ``"two words"`` |
| ``Literal[...]``, an ``Enum`` of strings | one of the words |
| ``tuple[T, ...]`` | ``[a,b]`` |
"""

from __future__ import annotations

import enum
import json
import math
import re
import types
import typing
from typing import Any, Literal, TypeAlias

from autoshard.errors import InputError
from autoshard.given import parse_bytes

Word: TypeAlias = "str | Quoted | tuple[Word, ...]"
"""A value as it stands in a pipeline's text: a word, a quoted text, or a list."""

_BARE = re.compile(r'[^\s,{}\[\]"=]+')
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class Quoted(str):
    """A text that was written in quotes, and so is nothing but a text."""

    __slots__ = ()


class Bytes(int):
    """A number of bytes [bytes], printed in the largest unit that divides it.

    Examples:
        >>> str(Bytes(14 * 2**30)), str(Bytes(1000))
        ('14GiB', '1000')
    """

    __slots__ = ()

    def __str__(self) -> str:
        for size, unit in _BINARY:
            if self and self % size == 0:
                return f"{int(self) // size}{unit}"
        return str(int(self))

    __repr__ = __str__


class OptionError(ValueError):
    """A value that an option's type does not have; its text says which was expected."""


def type_text(kind: Any) -> str:
    """The type of an option, for people.

    Examples:
        >>> type_text(tuple[str, ...] | None), type_text(Literal["a", "b"])
        ('list of text or none', 'a | b')
    """
    inner, optional = _optional(kind)
    return f"{_plain_text(inner)} or none" if optional else _plain_text(inner)


def _plain_text(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {_plain_text(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(str(member.value) for member in kind)
    names = {bool: "true | false", int: "integer", float: "number", str: "text", Bytes: "bytes"}
    return names[kind]


def is_option_type(kind: Any) -> bool:
    """Whether an option may have this type."""
    inner, _ = _optional(kind)
    if typing.get_origin(inner) is tuple:
        args = typing.get_args(inner)
        return len(args) == 2 and args[1] is Ellipsis and is_option_type(args[0])
    if typing.get_origin(inner) is Literal:
        return all(isinstance(word, str) for word in typing.get_args(inner))
    if inner in (bool, int, float, str, Bytes):
        return True
    is_enum = isinstance(inner, type) and issubclass(inner, enum.Enum)
    return is_enum and all(isinstance(member.value, str) for member in inner)


def from_word(word: Word, kind: Any) -> Any:
    """The value that a text means for an option of type ``kind``.

    Raises:
        OptionError: None.
    """
    inner, optional = _optional(kind)
    if typing.get_origin(inner) is tuple:
        if optional and word == "none" and not isinstance(word, Quoted):
            return None
        words = word if isinstance(word, tuple) else (word,)
        return tuple(from_word(each, typing.get_args(inner)[0]) for each in words)
    if isinstance(word, tuple):
        raise OptionError(f"a list where {type_text(kind)} is expected")
    if optional and word == "none" and not isinstance(word, Quoted):
        return None
    wrong = OptionError(f"{json.dumps(word)} is no {type_text(kind)}")
    if typing.get_origin(inner) is Literal or inner is str:
        if inner is not str and word not in typing.get_args(inner):
            raise wrong
        return str(word)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        try:
            return inner(str(word))
        except ValueError as error:
            raise wrong from error
    if inner is bool:
        if word not in ("true", "false"):
            raise wrong
        return word == "true"
    if inner is Bytes:
        try:
            return Bytes(int(word) if word.isdecimal() else parse_bytes(word))
        except InputError as error:
            raise wrong from error
    try:
        number = inner(word)
    except ValueError as error:
        raise wrong from error
    if isinstance(number, float) and not math.isfinite(number):
        raise wrong
    return number


def from_python(value: Any, kind: Any) -> Any:
    """The value, if it is one of type ``kind``; a Bytes may also be given as ``"14GiB"``.

    Raises:
        OptionError: It is none.
    """
    inner, optional = _optional(kind)
    if value is None and optional:
        return None
    if isinstance(inner, type) and issubclass(inner, enum.Enum) and isinstance(value, inner):
        return value
    if typing.get_origin(inner) is tuple and isinstance(value, list | tuple):
        return tuple(from_python(each, typing.get_args(inner)[0]) for each in value)
    if inner is Bytes and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Bytes(value)
    if inner is float and isinstance(value, int | float) and not isinstance(value, bool):
        return from_word(repr(float(value)), float)
    if inner is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if inner is bool and isinstance(value, bool):
        return value
    if isinstance(value, str) and inner not in (int, float, bool):
        return from_word(Quoted(value), inner)
    raise OptionError(f"{value!r} is no {type_text(kind)}")


def to_text(value: Any) -> str:
    """A value as a pipeline prints it; :func:`from_word` reads it back."""
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        return to_text(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{','.join(map(to_text, value))}]"
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value != "none" else json.dumps(value)
    return repr(value) if isinstance(value, float) else str(value)


def _optional(kind: Any) -> tuple[Any, bool]:
    """The type without ``| None``, and whether it had that."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        inner = [each for each in typing.get_args(kind) if each is not types.NoneType]
        if len(inner) == 1:
            return inner[0], True
    return kind, False
