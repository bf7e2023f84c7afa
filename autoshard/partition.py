"""The program of one device, written by Shardy and run inside a manual computation.

The module that ``jit`` lowered stays in place, with its arguments, results, donation and layouts;
its body becomes one ``sdy.manual_computation`` over all axes that holds the program of one device
with its collectives. XLA then has nothing left to partition.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from typing import Literal

from jax.extend.mlir import ir

from autoshard.child import ask
from autoshard.errors import FallbackWarning
from autoshard.global_to_local import Reduction
from autoshard.plan import Plan
from autoshard.plan_parts import OpPlan
from autoshard.program import main_block, terminator
from autoshard.rewrite import mesh_symbol
from autoshard.shardings import Sharding
from autoshard.shardy_passes import request

Partitioner = Literal["xla", "shardy"]
"""Who writes the program of one device."""

PARTITIONERS: tuple[Partitioner, ...] = ("xla", "shardy")

DEADLINE_S = 120.0
"""Time that the child may take for one program [s]; ten thousand ops take it some seconds."""

CHILD = (sys.executable, "-c", "from autoshard.shardy_passes import main; main()")
"""The command that partitions a module."""


def partition(module: ir.Module, plan: Plan) -> None:
    """Partition a rewritten module with Shardy, in place.

    Args:
        module: As :func:`autoshard.rewrite.rewrite` leaves it; untouched if this fails.
        plan: Its plan.

    Raises:
        UnsupportedError: Shardy cannot, or died, or took too long.
    """
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    summed = [op for op in plan.ops if op.reduced and not op.piecewise]
    reductions = tuple(map(_reduction, summed))
    answer = ask(CHILD, request(plan.mesh, reductions, bytecode.getvalue()), DEADLINE_S)
    with module.context, ir.Location.unknown():
        local = ir.Module.parse(answer)
        _enclose(module, main_block(local), plan)


def warn_of_fallback(name: str, reason: str) -> None:
    """Say why XLA partitions a program that Shardy was to partition."""
    warnings.warn(f"XLA partitions {name}, not Shardy: {reason}", FallbackWarning, stacklevel=4)


def _reduction(op: OpPlan) -> Reduction:
    if op.partial is None:
        return Reduction(op.reduced)
    before, after = op.partial, op.results[0]
    dim = next(d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a)
    return Reduction(op.reduced, dim)


def _enclose(module: ir.Module, local: ir.Block, plan: Plan) -> None:
    """Replace the body of ``main`` by a manual computation over all axes of ``local``."""
    symbol, block = mesh_symbol(module, plan), main_block(module)
    results = [value.type for value in terminator(block).operands]
    location = terminator(block).location
    for op in reversed(list(block.operations)):
        op.operation.erase()
    axes = ", ".join(f'"{name}"' for name in plan.mesh.names)
    attributes = {
        "in_shardings": _per_value(symbol, plan, [a.sharding for a in plan.arguments]),
        "out_shardings": _per_value(symbol, plan, plan.result_shardings),
        "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
    }
    with ir.InsertionPoint(block), location:
        manual = ir.Operation.create(
            "sdy.manual_computation",
            results=results,
            operands=list(block.arguments),
            attributes=attributes,
            regions=1,
        )
        ir.Operation.create("func.return", operands=list(manual.results))
    end = terminator(local)
    with ir.InsertionPoint(end), location:
        ir.Operation.create("sdy.return", operands=list(end.operands))
    end.erase()
    local.append_to(manual.regions[0])


def _per_value(symbol: str, plan: Plan, shardings: Sequence[Sharding]) -> ir.Attribute:
    """Shardings that name every axis: those that split nothing as replicated."""
    texts = []
    for sharding in shardings:
        dims = ", ".join("{" + ", ".join(f'"{a}"' for a in d) + "}" for d in sharding)
        used = {a for d in sharding for a in d}
        rest = ", ".join(f'"{a}"' for a in plan.mesh.names if a not in used)
        texts.append(f"<@{symbol}, [{dims}]{f', replicated={{{rest}}}' if rest else ''}>")
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(texts)}]>")
