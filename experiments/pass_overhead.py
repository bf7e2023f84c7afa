"""What running passes costs: the pass manager's own time, and the passes on a large module.

``python -m autoshard.experiments.pass_overhead`` lowers a chain of unrolled layers with about as
many ops as asked for, and runs passes on it. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from autoshard.cost_models.microbenchmark import processor_name
from autoshard.passes.context import PassContext
from autoshard.passes.manager import run_pipeline
from autoshard.passes.module_state import copy_of, op_counts
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import register_pass
from autoshard.shardings import MeshShape
from autoshard.solvers import SOLVERS

OPS_PER_LAYER = 6
"""Ops that a layer lowers to, about."""

NOTHINGS = 200
"""Passes that do nothing, to time what is around a pass."""

PASSES = "flatten-calls,fold-transpose,mlir:cse"


@register_pass(
    "nothing",
    summary="Does nothing; for timing the pass manager",
    preserves=("numerics", "boundary", "shardings", "effects"),
)
def nothing(module: ir.Module) -> None:
    """Leave the module as it is."""


class TimedSolver:
    """The default solver, with a clock.

    Attributes:
        spent_s: CPU seconds in it so far.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0

    def solve(self, *problem: Any, **options: Any) -> Any:
        """As the default solver."""
        start = time.process_time()
        try:
            return SOLVERS["exact"].solve(*problem, **options)
        finally:
            self.spent_s += time.process_time() - start


@dataclass(frozen=True, slots=True)
class Overhead:
    """What was measured, in CPU seconds.

    Attributes:
        ops: Ops of the module as JAX lowers it.
        manager_s: Of the manager, per pass [s].
        passes_s: Of :data:`PASSES` on the module [s].
        share: Of the pipeline's time that the manager takes, instruments off.
        default_s: Of the default pipeline, solver left out: ``flatten-calls``, then extracting,
            pricing, interpreting and writing the plan [s].
        solve_s: Of the solver, which is not in ``default_s`` [s].
        processor: Where it was measured.
    """

    ops: int
    manager_s: float
    passes_s: float
    share: float
    default_s: float
    solve_s: float
    processor: str


def layers(count: int) -> ir.Module:
    """The module of a chain of unrolled layers."""

    def chain(x: Any, w: Any) -> Any:
        for _ in range(count):
            h = jnp.tanh(x @ w.T)
            x = x + (h * h) @ w
        return x

    shapes = [jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")]
    module = jax.jit(chain).lower(*shapes).compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    return module


def measure(ops: int, mesh: MeshShape) -> Overhead:
    """Run the passes and time them."""
    module = layers(max(1, ops // OPS_PER_LAYER))
    found = op_counts(module).total()
    nothings = Pipeline.parse(",".join(["nothing"] * NOTHINGS))
    run_pipeline(nothings, module)
    manager_s = _spent(lambda: run_pipeline(nothings, module)) / NOTHINGS
    pipeline = Pipeline.parse(PASSES)
    passes_s = _spent(lambda: run_pipeline(pipeline, copy_of(module)))
    solver = TimedSolver()
    context = PassContext(mesh=mesh, solver=solver)
    spent = _spent(lambda: run_pipeline("flatten-calls,shard", module, context))
    return Overhead(
        found,
        manager_s,
        passes_s,
        manager_s * len(pipeline.passes) / passes_s,
        spent - solver.spent_s,
        solver.spent_s,
        processor_name(),
    )


def _spent(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        "python -m autoshard.experiments.pass_overhead", description=__doc__
    )
    parser.add_argument("--ops", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    options = parser.parse_args(words)
    found = measure(options.ops, MeshShape(("data", "model"), (4, 2)))
    if options.json:
        print(json.dumps(asdict(found), indent=1))
        return
    print(f"{found.ops} ops on {found.processor}, CPU time")
    print(f"  the manager: {found.manager_s * 1e6:.1f} us a pass, {found.share:.3%} of {PASSES}")
    print(f"  {PASSES}: {found.passes_s:.2f} s")
    print(f"  default pipeline without the solver: {found.default_s:.2f} s")
    print(f"  the solver: {found.solve_s:.2f} s")


if __name__ == "__main__":
    main()
