"""Any pass that MLIR knows by name, as ``mlir:NAME{options}``.

Passes of Shardy end the whole process where an invariant of theirs fails, and nobody promises that
others don't. So a pass runs in a child process unless it is one of the few that are known to be
safe on any verified module.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import jax
from jax.extend.mlir import ir, passmanager

from autoshard.child import UnsupportedError, ask, serve
from autoshard.errors import InputError, UnknownNameError
from autoshard.passes.context import PassContext
from autoshard.passes.registry import PassInfo

SAFE = frozenset({"canonicalize", "cse", "symbol-dce", "sdy-flatten-call-graph"})
"""Passes that run in this process."""

DEADLINE_S = 120.0
"""Time that the child may take for one pass [s]."""

CHILD = (sys.executable, "-c", "from autoshard.passes.mlir_pass import main; main()")
"""The command that runs a pass on a module."""

_ANCHORS = ("builtin.module({})", "builtin.module(func.func({}))")


@dataclass(frozen=True, slots=True)
class MlirPass:
    """A pass of MLIR, of StableHLO or of Shardy.

    Attributes:
        name: As MLIR knows it, e.g. ``canonicalize``.
        options: Its options as MLIR reads them, e.g. ``top-down=false max-iterations=1``.
    """

    name: str
    options: str = ""

    def __post_init__(self) -> None:
        with ir.Context():
            _pipeline(self.name, self.options)

    @property
    def pass_info(self) -> PassInfo:
        """What is known of it by its name."""
        return PassInfo(
            f"mlir:{self.name}",
            f"MLIR's pass {self.name}",
            not_idempotent="nobody at autoshard has checked",
        )

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Run it, in a child process if it may end the process.

        Raises:
            InputError: It failed, or ended the process it ran in.
        """
        with module.context:
            text = _pipeline(self.name, self.options)
        if self.name in SAFE:
            try:
                passmanager.PassManager.parse(text, module.context).run(module.operation)
            except ir.MLIRError as error:
                raise _failed(self.name, str(error)) from error
            return
        held = io.BytesIO()
        module.operation.write_bytecode(held)
        try:
            answer = ask(CHILD, text.encode() + b"\n" + held.getvalue(), DEADLINE_S)
        except UnsupportedError as error:
            raise _failed(self.name, str(error)) from error
        replace_module(module, answer)


def replace_module(module: ir.Module, data: bytes | str) -> None:
    """Put the ops of a module given as text or bytecode in the place of those of ``module``."""
    with module.context:
        new = ir.Module.parse(data)
    for op in reversed(list(module.body.operations)):
        op.operation.erase()
    for op in list(new.body.operations):
        op.operation.detach_from_parent()
        module.body.append(op.operation)
    for name in list(module.operation.attributes):
        del module.operation.attributes[str(name)]
    for name in new.operation.attributes:
        module.operation.attributes[str(name)] = new.operation.attributes[str(name)]


def _pipeline(name: str, options: str) -> str:
    """The text by which MLIR's pass manager of the current context finds a pass."""
    told = f"{name}{{{options}}}" if options else name
    reasons = []
    for anchor in _ANCHORS:
        try:
            passmanager.PassManager.parse(anchor.format(told))
        except ValueError as error:
            reasons.append(" ".join(str(error).split()))
        else:
            return anchor.format(told)
    if all("does not refer to a registered" in reason for reason in reasons):
        raise UnknownNameError(
            f"MLIR has no pass called {name!r}",
            fix="the passes that come with JAX are canonicalize, cse, symbol-dce, inline, sccp, "
            "loop-invariant-code-motion, and Shardy's, sdy-…",
        )
    raise InputError(
        f"MLIR cannot read the options of {name}: {reasons[0][:300]}",
        at=f"mlir:{told}",
        fix="write them as MLIR does: mlir:canonicalize{top-down=false max-iterations=1}",
    )


def _failed(name: str, reason: str) -> InputError:
    return InputError(
        f"MLIR's pass {name} failed: {reason[:500]}", fix="leave it out, or run it elsewhere"
    )


def _answer(message: bytes, context: ir.Context) -> bytes:
    text, _, bytecode = message.partition(b"\n")
    module = ir.Module.parse(bytecode, context)
    passmanager.PassManager.parse(text.decode(), context).run(module.operation)
    held = io.BytesIO()
    module.operation.write_bytecode(held)
    return held.getvalue()


def main() -> None:
    """Answer requests until there are no more."""
    traced = jax.jit(lambda x: x).trace(jax.ShapeDtypeStruct((), "float32"))
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    assert module is not None
    shared: ir.Context = module.context
    serve(lambda message: _answer(message, shared))
