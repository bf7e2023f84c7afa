"""What every command does alike: meshes as they are typed, signs of life, JSON, exit statuses."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autoshard.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from autoshard.shardings import MeshShape

EXIT_NO_RESULT = 1
"""Exit status when the command ran but what was asked for does not exist or does not hold."""

EXIT_USER_ERROR = 2
"""Exit status for what the user can mend; argparse's own."""


def cpu_mesh(shape: MeshShape) -> Mesh:
    """A mesh of virtual CPU devices of this process.

    Raises:
        InputError: JAX has started with fewer devices.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    # Accepted only before JAX's backend starts; afterwards the count below decides.
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", shape.devices)
    devices = jax.devices()
    if len(devices) < shape.devices:
        raise InputError(
            f"the mesh {shape} needs {shape.devices} devices; JAX has started with {len(devices)}",
            fix="run the command in a fresh process",
        )
    auto = (jax.sharding.AxisType.Auto,) * len(shape.names)
    return jax.make_mesh(shape.sizes, shape.names, auto, devices=devices[: shape.devices])


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is going on; silent where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(what) as status:
        yield lambda stage: status.update(f"{what}: {stage}")


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Print warnings that autoshard raises itself without the line of autoshard that did."""
    usual, inside = warnings.formatwarning, str(Path(__file__).parent)

    def told(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        line: str | None = None,
    ) -> str:  # fmt: skip
        if filename.startswith(inside):
            return f"{category.__name__}: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = usual


def print_json(value: object) -> None:
    """A result on standard output as JSON, without numbers that JSON does not have."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """The same value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_folder(path: Path | None) -> None:
    """Refuse a place for a file before the work for it is done."""
    if path is not None and not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} for {path.name}",
            at=str(path),
            fix="make the folder first",
        )
    if path is not None and path.is_dir():
        raise InputError("this is a folder", at=str(path), fix="give the name of a file in it")
