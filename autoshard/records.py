"""Frozen records as JSON values and back, field by field; what does not fit is refused.

A field with ``metadata={"saved": False}`` is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from autoshard.errors import InputError

T = TypeVar("T")


def plain(value: Any) -> Any:
    """A record as JSON values, without what lives in one process only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        saved = (f for f in dataclasses.fields(value) if f.metadata.get("saved", True))
        return {f.name: plain(getattr(value, f.name)) for f in saved}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value


def record(kind: type[T], data: Any, where: str) -> T:
    """Build a frozen record from JSON, field by field, refusing what does not fit."""
    if not isinstance(data, dict):
        raise InputError(f"{where} must be an object", fix="use a file that Plan.save wrote")
    known: Any = kind  # a dataclass
    saved = {f.name for f in dataclasses.fields(known) if f.metadata.get("saved", True)}
    hints = {k: hint for k, hint in _hints(kind).items() if k in saved}
    unknown, missing = set(data) - set(hints), set(hints) - set(data)
    if unknown or missing:
        what = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise InputError(f"{where}: {what}", fix="use a file that Plan.save wrote")
    return kind(**{k: _value(hints[k], data[k], f"{where}.{k}") for k in hints})


def _hints(kind: type[Any]) -> dict[str, Any]:
    # Names that the type checker alone sees belong to fields that are not saved.
    unseen = dict.fromkeys(("Placement", "Solver"), object)
    return get_type_hints(kind, localns=unseen)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        if not isinstance(data, list):
            raise InputError(f"{where} must be a list", fix="use a file that Plan.save wrote")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_value(args[0], d, f"{where}[{i}]") for i, d in enumerate(data))
        if len(args) != len(data):
            raise InputError(
                f"{where} has {len(data)} entries", fix="use a file that Plan.save wrote"
            )
        return tuple(_value(a, d, where) for a, d in zip(args, data, strict=True))
    if origin is Literal:
        if data not in args:
            raise InputError(f"{where} is {data!r}", fix=f"use one of {', '.join(map(str, args))}")
        return data
    if origin is not None and type(None) in args:
        return (
            None
            if data is None
            else _value(next(a for a in args if a is not type(None)), data, where)
        )
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return record(hint, data, where)
    accepted: tuple[type, ...] = (int, float) if hint is float else (hint,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and hint is not bool):
        raise InputError(
            f"{where} is {data!r}, not a {hint.__name__}", fix="use a file that Plan.save wrote"
        )
    return data
