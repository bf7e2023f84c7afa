"""What a caller gives, checked for its kind before anything is done with it."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoshard.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def whole_number(value: Any, what: str, *, least: int, fix: str) -> int:
    """An integer, of Python or of NumPy, that is ``least`` or more.

    Raises:
        InputError: It is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InputError(f"{what} is {_shown(value)}", fix=fix)
    return number


def positive(value: Any, what: str, *, fix: str) -> float:
    """A finite number above zero.

    Raises:
        InputError: It is none.
    """
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{what} is {_shown(value)}", fix=fix)
    return number


def several(value: Any, kind: type, what: str, *, fix: str) -> tuple[Any, ...]:
    """One value of a kind, or several, as a tuple; None is none. Integers may be those of NumPy.

    Raises:
        InputError: One of them is of another kind.
    """
    if value is None:
        return ()
    alone = isinstance(value, str) or not isinstance(value, Iterable)
    found = []
    for item in (value,) if alone else tuple(value):
        try:
            found.append(operator.index(item) if kind is int else item)
        except TypeError:
            found.append(item)
        if not isinstance(found[-1], kind):
            raise InputError(f"{what} has {_shown(item)}", fix=fix)
    return tuple(found)


def file_path(value: Any, what: str) -> Path:
    """The path of a file, which need not exist.

    Raises:
        InputError: It is no path, or that of a folder.
    """
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{what} is {_shown(value)}", fix="give the path of a file")
    path = Path(value)
    if path.is_dir():
        raise InputError(f"{what} is a folder", at=str(path), fix="give the path of a file in it")
    return path


def parse_bytes(text: str) -> int:
    """A number of bytes as it is typed.

    Raises:
        InputError: It cannot be read.

    Examples:
        >>> parse_bytes("14GiB"), parse_bytes("1.5e9"), parse_bytes("512 MB")
        (15032385536, 1500000000, 512000000)
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    try:
        size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    except (ValueError, KeyError):
        size = 0.0
    if size < 1 or size == float("inf"):
        raise InputError(
            f"cannot read {text!r} as a number of bytes", fix="write it as in 14GiB, 512MB or 2e9"
        )
    return int(size)


def _shown(value: Any) -> str:
    """A value as an error names it: itself if that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
