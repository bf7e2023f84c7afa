"""Files of JSON from outside: bounded, gzipped or not, and never a traceback for a broken one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError

MOST_BYTES = 1 << 29
"""Text of a file, unpacked, up to which it is read [bytes]; parsing takes about ten times as much
memory. The largest of the contest's public problems has 0.1e9 bytes."""

_GZIP = b"\x1f\x8b"


def read_json(path: str | Path, *, fix: str, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a JSON file; gzipped files are known by their first bytes.

    Args:
        path: The file.
        fix: What to do if it cannot be read, for the error.
        most_bytes: Unpacked text longer than this is refused before it is read whole [bytes].

    Raises:
        InputError: It does not exist, is cut off, too large, no JSON, or nested too deep.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == _GZIP
            if path.suffix == ".gz" and not packed:
                raise InputError("the file is not gzipped, though its name says so", at=str(path),
                                 fix=fix)  # fmt: skip
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    text = unpacked.read(most_bytes + 1)
            else:
                text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise InputError(
                f"the file holds more than {most_bytes:,} bytes of text",
                at=str(path),
                fix="give a smaller problem",
            )
        return json.loads(text, parse_constant=_no_number)
    except FileNotFoundError as error:
        raise InputError("there is no such file", at=str(path), fix="check the path") from error
    except EOFError as error:
        raise InputError(
            "the gzipped file is cut off", at=str(path), fix="copy it again"
        ) from error
    except (OSError, zlib.error) as error:
        raise InputError(f"the file cannot be read: {error}", at=str(path), fix=fix) from error
    except (RecursionError, MemoryError) as error:
        raise InputError(
            "the file is nested too deep or too large to be read", at=str(path), fix=fix
        ) from error
    except InputError:
        raise
    except ValueError as error:  # no JSON, or no UTF-8
        raise InputError(f"the file is no JSON: {error}", at=str(path), fix=fix) from error


def whole_numbers(row: object, where: str, *, cap: int | None = None) -> NDArray[np.int64]:
    """A list of whole numbers as an array.

    Args:
        row: From a JSON file.
        where: What it is called in an error, e.g. ``nodes.costs[3]``.
        cap: Numbers above it are read as it; None: they are refused if 64 bits don't hold them.

    Raises:
        InputError: It is no list, or holds something else.
    """
    if not isinstance(row, list):
        raise not_numbers(row, where)
    if not set(map(type, row)) <= {int}:
        wrong = next(value for value in row if type(value) is not int)
        raise not_numbers(wrong, where)
    try:
        if cap is not None and max(row, default=0) > cap:
            row = [min(value, cap) for value in row]
        return np.array(row, np.int64)
    except OverflowError as error:
        raise InputError(
            f"{where} holds a number that does not fit 64 bits", fix="count in a larger unit"
        ) from error


def whole_pairs(rows: object, where: str) -> NDArray[np.int64]:
    """A list of pairs of whole numbers as an array ``[N, 2]``.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(rows, list):
        raise not_numbers(rows, where)
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 2:
            raise InputError(
                f"{where}[{number}] is {shown(row)}, not a pair", fix="write two whole numbers"
            )
    flat: Sequence[object] = [value for row in rows for value in row]
    return whole_numbers(flat, where).reshape(-1, 2)


def not_numbers(value: object, where: str) -> InputError:
    """The error for a value that should be a whole number, or a list of them."""
    return InputError(
        f"{where}: expected whole numbers, found {shown(value)}",
        fix="write whole numbers, in a smaller unit if need be",
    )


def shown(value: object) -> str:
    """A value from a file, short enough for a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 1 << 99 else "a number"
    return text if len(text) <= 40 else text[:37] + "..."


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
