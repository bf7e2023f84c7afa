"""Functions as modules, graphs and plans, and a cost model simple enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh

from autoshard.cost_models.protocol import (
    CollectiveKind,
    Compiler,
    Floats,
    MeshAxis,
    Work,
    wire_bytes,
)
from autoshard.extract import extract
from autoshard.graph import Graph
from autoshard.program import Boundary, normalize
from autoshard.shardings import MeshShape, Sharding

AXES = ("a", "b", "c", "d")
MESH = MeshShape(("a", "b"), (4, 2))


@dataclass(frozen=True)
class Simple:
    """1 ns per FLOP or byte of memory, 1 us per collective and 10 ns per byte sent."""

    name: str = "simple"
    memory_bytes: float | None = None
    compiler: Compiler = "cpu"
    dispatch_s: float = 0.0

    def compute_s(self, work: Work) -> Floats:
        return work.flops * 1e-9

    def hbm_s(self, work: Work) -> Floats:
        return work.hbm_bytes * 1e-9

    def op_s(self, work: Work) -> Floats:
        return self.compute_s(work) + self.hbm_s(work)

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        devices = int(np.prod([axis.size for axis in axes]))
        return 1e-6 + 1e-8 * np.array([wire_bytes(kind, float(n), devices) for n in nbytes])


def shape_of(*sizes: int) -> MeshShape:
    return MeshShape(AXES[: len(sizes)], sizes)


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, AXES[: len(sizes)])


def lowered(fn: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    """A fresh lowering: the function is wrapped, because jit caches modules by function."""

    def program(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(program, keep_unused=True).lower(*args)


def module_of(lowering: jax.stages.Lowered) -> ir.Module:
    module = lowering.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    return module


def boundaries(
    fn: Callable[..., Any],
    *args: Any,
    pins: dict[int, Sharding] | None = None,
    result_pins: dict[int, Sharding] | None = None,
) -> tuple[list[Boundary], list[Boundary]]:
    given = [
        Boundary(f"argument {i}", pin=(pins or {}).get(i))
        for i in range(len(jax.tree.leaves(args)))
    ]
    results = jax.tree.leaves(jax.eval_shape(fn, *args))
    made = [Boundary(f"result {i}", pin=(result_pins or {}).get(i)) for i in range(len(results))]
    return given, made


def graph_of(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshShape = MESH,
    ties: Sequence[tuple[int, int]] = (),
    **pins: Any,
) -> Graph:
    module = module_of(lowered(fn, *args))
    normalize(module)
    return extract(module, mesh, *boundaries(fn, *args, **pins), ties)
