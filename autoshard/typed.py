"""What is typed on a command line: meshes, shardings, sizes, and names of Python objects."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoshard.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from autoshard.shardings import MeshShape

MAX_VIRTUAL_DEVICES = 512
"""More virtual CPU devices than this are taken for a slip of the pen."""


def parse_mesh(text: str, *, most: int = MAX_VIRTUAL_DEVICES) -> MeshShape:
    """A mesh as it is typed: ``data=4,model=2``.

    Args:
        text: What was typed.
        most: Devices that it may have.

    Raises:
        InputError: Says which part cannot be read.

    Examples:
        >>> parse_mesh("data=4,model=2").devices
        8
    """
    from autoshard.shardings import MeshShape

    fix = "write axes and their sizes as in data=4,model=2"
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not equals:
            raise InputError(
                f"cannot read the mesh axis {part.strip()!r}", at=f"mesh {text!r}", fix=fix
            )
        if not size.isdecimal() or int(size) < 1:
            raise InputError(
                f"mesh axis {name!r} has size {size!r}, which is no positive number",
                at=f"mesh {text!r}",
                fix=fix,
            )
        if name in names:
            raise InputError(
                f"mesh axis {name!r} is there twice", at=f"mesh {text!r}", fix="name each axis once"
            )
        names.append(name)
        sizes.append(int(size))
    if math.prod(sizes) > most:
        raise InputError(
            f"the mesh has {math.prod(sizes)} devices",
            at=f"mesh {text!r}",
            fix=f"use at most {most}"
            + (": they are threads of this machine" if most == MAX_VIRTUAL_DEVICES else ""),
        )
    return MeshShape(tuple(names), tuple(sizes))


def load_object(name: str) -> Any:
    """What ``MODULE:NAME`` or ``FILE.py:NAME`` names; modules of the current folder are found.

    Raises:
        InputError: There is no such module or file, or the name cannot be read.
        UnknownNameError: The module has no such thing.
    """
    place, colon, path = name.rpartition(":")
    if not colon or not place or not path:
        raise InputError(f"cannot read the name {name!r}", fix="write MODULE:NAME or FILE.py:NAME")
    found: Any = load_module(place)
    for step in path.split("."):
        if not hasattr(found, step):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise UnknownNameError(
                f"{place} has no {path}",
                at=name,
                fix=f"it has {', '.join(known[:12]) or 'nothing'}",
            )
        found = getattr(found, step)
    return found


def load_module(place: str) -> ModuleType:
    """The module of that name, or in that file; modules of the current folder are found.

    Raises:
        InputError: There is none.
    """
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise InputError(f"there is no file {place}", fix="check the path")
        name = file.stem
        spec = importlib.util.spec_from_file_location(name, file.resolve())
        assert spec is not None
        assert spec.loader is not None
        if name in sys.modules and getattr(sys.modules[name], "__file__", "") == spec.origin:
            return sys.modules[name]
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise InputError(
            f"there is no module {place}",
            fix="give one that can be imported from here, or the path of its file",
        ) from error


def example(value: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of an example call."""
    if callable(value) and not hasattr(value, "dtype"):
        value = value()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InputError(
                f"{name} is a dictionary whose keys are no names of arguments",
                fix="give a tuple of the positional arguments, e.g. ({...},)",
            )
        return (), dict(value)
    return (tuple(value) if isinstance(value, tuple | list) else (value,)), {}


def check_call(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: str
) -> None:
    """Refuse an example that is no call of the function, before anything is traced.

    Raises:
        InputError: An argument is missing, or one too many or of another name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no Python function: it says itself what it takes
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        told = [f"{len(args)} by position"] if args or not kwargs else []
        told += [f"{', '.join(kwargs)} by keyword"] if kwargs else []
        raise InputError(
            f"{given} gives {' and '.join(told)}, which is no call of {name}{signature}: {error}",
            at=f"--example {given}",
            fix="name a tuple with one entry per argument, or a dictionary by their names",
        ) from error


def positions(text: str | None) -> tuple[int, ...] | None:
    """Numbers of arguments as they are typed: ``0,1``; None for none."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"cannot read the positions {text!r}", fix="write numbers as in 0,1"
        ) from error


def named_pin(text: str) -> tuple[str, PartitionSpec]:
    """A pin as it is typed: ``NAME=SPEC``."""
    name, equals, spec = text.rpartition("=")
    if not equals or not name:
        raise InputError(
            f"cannot read the pin {text!r}", fix="write NAME=SPEC as in \"params['w']=None,model\""
        )
    return name, parse_spec(spec)


def parse_spec(text: str) -> PartitionSpec:
    """A ``PartitionSpec`` as it is typed: mesh axes per dimension, ``None`` for a whole one.

    Raises:
        InputError: It cannot be read.

    Examples:
        >>> parse_spec("None,data*model") == parse_spec("P(None, ('data', 'model'))")
        True
    """
    from jax.sharding import PartitionSpec

    bare = text.strip()
    if bare.startswith(("P(", "PartitionSpec(")) and bare.endswith(")"):
        bare = re.sub(r"\(([^()]*)\)", _joined, bare[bare.index("(") + 1 : -1])
    parts = [part.strip().strip("'\"") for part in bare.split(",")]
    entries: list[str | tuple[str, ...] | None] = []
    for part in parts[: -1 if parts[-1] == "" else None]:
        axes = tuple(axis.strip().strip("'\"") for axis in part.split("*"))
        if part != "None" and not all(axis.isidentifier() for axis in axes):
            raise InputError(
                f"cannot read the sharding {text!r}",
                fix="write mesh axes per dimension as in None,model or data*model",
            )
        entries.append(None if part == "None" else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)


def _joined(match: re.Match[str]) -> str:
    return "*".join(part.strip() for part in match[1].split(",") if part.strip())
