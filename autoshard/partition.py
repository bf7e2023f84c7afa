"""The program of one device, written by Shardy and run inside a manual computation.

The module that ``jit`` lowered stays in place, with its arguments, results, donation and layouts;
its body becomes one ``sdy.manual_computation`` over all axes that holds the program of one device
with its collectives. XLA then has nothing left to partition.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from jax.extend.mlir import ir

from autoshard.collectives_lowering import UnsupportedError
from autoshard.global_to_local import Reduction
from autoshard.plan import OpPlan, Plan
from autoshard.program import main_block, terminator
from autoshard.rewrite import mesh_symbol
from autoshard.shardings import Sharding
from autoshard.shardy_passes import UNSUPPORTED, request

DEADLINE_S = 120.0
"""Time that the child may take [s]; a program of ten thousand ops takes it a few seconds."""

CHILD = (sys.executable, "-m", "autoshard.shardy_passes")
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
    reductions = tuple(map(_reduction, (op for op in plan.ops if op.reduced)))
    answer = _ask(request(plan.mesh, reductions) + bytecode.getvalue())
    with module.context, ir.Location.unknown():
        local = ir.Module.parse(answer)
        _enclose(module, main_block(local), plan)


def _reduction(op: OpPlan) -> Reduction:
    if op.partial is None:
        return Reduction(op.reduced)
    before, after = op.partial, op.results[0]
    dim = next(d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a)
    return Reduction(op.reduced, dim)


def _ask(message: bytes) -> bytes:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), JAX_PLATFORMS="cpu")
    try:
        done = subprocess.run(
            CHILD,
            input=message,
            capture_output=True,
            timeout=DEADLINE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"Shardy's passes took more than {DEADLINE_S:g} s") from None
    except OSError as error:
        raise UnsupportedError(f"no child process could be started: {error}") from error
    if done.returncode == 0:
        return done.stdout
    if done.returncode == UNSUPPORTED:
        raise UnsupportedError(done.stdout.decode(errors="replace"))
    raise UnsupportedError(f"Shardy's passes {_death(done.returncode, done.stderr)}")


def _death(status: int, log: bytes) -> str:
    """How a child ended, with what it said last."""
    how = f"ended with status {status}"
    if status < 0:
        how = f"died of {signal.Signals(-status).name}"
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "heck failed" in line] or lines[-1:]
    return f"{how}: {telling[-1].strip()[:300]}" if telling else how


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
