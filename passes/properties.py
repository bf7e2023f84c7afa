"""What a pass may break: the values of a program, its predicted cost, or what a command checks."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from jax.extend.mlir import ir

from autoshard.errors import InfeasibleError, InputError
from autoshard.passes.context import PassContext
from autoshard.passes.evaluate import Array, random_arguments
from autoshard.passes.module_state import to_bytes
from autoshard.passes.numerics import difference, results_of
from autoshard.passes.prediction import predict

Broken: TypeAlias = "Callable[[ir.Module, ir.Module], str]"
"""Told a module before and after a pass (or several), says in words what broke; empty if nothing.
Both are left as they are."""

DEARER = 0.001
"""A program whose predicted time grew by more than this share has become dearer."""

DEADLINE_S = 600.0
"""Time that a command may take for one module [s]."""


def numerics(seed: int = 0) -> Broken:
    """The values of a program, found by running it on small random arguments."""
    known: dict[bytes, tuple[Array, ...]] = {}  # the last module before: mostly it is the same

    def broken(before: ir.Module, after: ir.Module) -> str:
        arguments = random_arguments(before, seed)
        key = to_bytes(before)
        if key not in known:
            known.clear()
            known[key] = results_of(before, arguments)
        if to_bytes(after) == key:
            return ""
        found = difference(known[key], results_of(after, arguments))
        if found.is_small:
            return ""
        return (
            f"result {found.result} differs by {found.error:.2g} of its largest value, "
            f"{found.tolerance:.2g} is rounding"
        )

    return broken


def cost(context: PassContext) -> Broken:
    """The predicted time of a program, under the context's mesh and cost model."""

    def broken(before: ir.Module, after: ir.Module) -> str:
        try:
            old, new = predict(before, context).step_s, predict(after, context).step_s
        except InfeasibleError as error:
            return error.problem
        if new <= old * (1 + DEARER):
            return ""
        return f"the predicted time grew from {old * 1e6:.4g} to {new * 1e6:.4g} us"

    return broken


def command(line: str) -> Broken:
    """What a command finds: it is run with the file of a module, and ends with 0 if all is well.

    Raises:
        InputError: It fails on what the pipeline is given.
    """

    def broken(before: ir.Module, after: ir.Module) -> str:
        if (said := _run(line, before)) is not None:
            raise InputError(
                f"the command fails before the passes as well: {said}",
                at=line,
                fix="give one that ends with 0 on the program as it is",
            )
        said = _run(line, after)
        return "" if said is None else f"the command fails: {said}"

    return broken


def _run(line: str, module: ir.Module) -> str | None:
    """What a command says of a module that it fails on; None if it does not fail."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.mlir"
        path.write_text(str(module.operation.get_asm(enable_debug_info=True)), encoding="utf-8")
        try:
            done = subprocess.run(
                [*shlex.split(line), str(path)],
                capture_output=True,
                text=True,
                check=False,
                timeout=DEADLINE_S,
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"the command cannot be run: {error}", at=line, fix="check its name"
            ) from error
        except subprocess.TimeoutExpired:
            return f"it took more than {DEADLINE_S:g} s"
    if not done.returncode:
        return None
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"status {done.returncode}{''.join(f': {text[:200]}' for text in last)}"
