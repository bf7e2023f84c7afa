"""From a traced program and the caller's wishes to a plan bound to the caller's mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.mlir import ir
from jax.sharding import Mesh

from autoshard import pins
from autoshard.cost_models import COST_MODELS, default_cost_model, named_cost_model
from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InfeasibleError, InputError
from autoshard.execute import Placement
from autoshard.extract import extract
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.keep_boundary import KeepBoundary
from autoshard.passes.manager import run_pipeline
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.shard import DEFAULT, around_sharder
from autoshard.plan import Plan
from autoshard.program import Boundary, normalize
from autoshard.shardings import (
    MeshShape,
    Sharding,
    replicated,
    splitting,
    to_partition_spec,
)
from autoshard.signature import Leaf, ties
from autoshard.solvers import Progress
from autoshard.tracing import Traced, lower_for_planning, module_of


@dataclass(frozen=True, slots=True)
class Options:
    """How to search for a plan.

    Attributes:
        in_shardings: Pins of the arguments (see :mod:`autoshard.pins`).
        out_shardings: Pins of the results.
        memory_limit: What one device may use [bytes]; None for the device's own limit.
        cost_model: A cost model or the name of one; None for the one of the mesh's devices.
        solver: A solver or the name of one; None for the default.
        time_limit_s: Time the solver may take [s].
        progress: Called with signs of life from the solver.
        pipeline: The passes that a program goes through, one of which shards it.
    """

    in_shardings: Any = None
    out_shardings: Any = None
    memory_limit: int | None = None
    cost_model: Any = None
    solver: Any = None
    time_limit_s: float = 60.0
    progress: Callable[[Progress], None] | None = None
    pipeline: Pipeline = field(default_factory=lambda: Pipeline.parse(DEFAULT))


def search(traced: Traced, options: Options, given: Plan | None = None) -> Plan:
    """A plan for a traced program, bound to the caller's trees and mesh.

    Args:
        traced: The program.
        options: How to search.
        given: A plan to use instead of searching; it is checked against the program.
    """
    context = pass_context(traced, options)
    module = module_of(lower_for_planning(traced))
    before, sharder, _ = around_sharder(options.pipeline)
    run_pipeline(before, module, context, (KeepBoundary(),))
    if given is None:
        plan = sharder.plan(module, context)
    elif not isinstance(given, Plan):
        raise InputError(
            f"plan is a {type(given).__name__}, not a Plan",
            fix="pass the result of .plan(...), or autoshard.Plan.load(path)",
        )
    else:
        boundaries = context.boundaries_of(module)
        plan = checked(
            given,
            module,
            boundaries.arguments,
            boundaries.results,
            mesh_shape(traced.mesh),
            ties=boundaries.ties,
            memory_limit=options.memory_limit,
        )
    placement = Placement.of(traced, plan.argument_shardings, plan.result_shardings)
    return replace(plan, placement=placement)


def pass_context(traced: Traced, options: Options) -> PassContext:
    """What the passes of the pipeline are told of a traced program and the caller's wishes."""
    signature, mesh = traced.signature, traced.mesh
    positional, _ = signature.fill(range(len(signature.arguments)), fixed=None)
    arguments = pins.resolve(
        options.in_shardings, signature.arguments, positional, mesh, "in_shardings"
    )
    whole = traced.result_tree.fill(range(len(traced.results)), fixed=None)
    results = pins.resolve(options.out_shardings, traced.results, whole, mesh, "out_shardings")
    return PassContext(
        mesh=mesh_shape(mesh),
        cost_model=_cost_model(options.cost_model, mesh),
        memory_limit=options.memory_limit,
        boundaries=Boundaries(
            _boundaries(signature.arguments, arguments),
            _boundaries(traced.results, results),
            tuple(ties(signature.arguments, traced.results)),
        ),
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        progress=options.progress,
    )


def checked(
    plan: Plan,
    module: ir.Module,
    arguments: Sequence[Boundary],
    results: Sequence[Boundary],
    mesh: MeshShape,
    *,
    ties: Sequence[tuple[int, int]],
    memory_limit: int | None,
) -> Plan:
    """The plan, if it is for this program and mesh; arguments as for ``plan_module``.

    Raises:
        PlanMismatchError: It is not; names the first difference.
        InputError: It breaks a pin, or would move donated state in every call.
        InfeasibleError: It is predicted to need more than the memory limit.
    """
    normalize(module)
    plan.check(extract(module, mesh, arguments, results, ties).signature(), mesh)
    for wanted, planned in zip(
        (*arguments, *results), (*plan.arguments, *plan.results), strict=True
    ):
        if wanted.pin is not None and splitting(wanted.pin, mesh) != planned.sharding:
            raise InputError(
                f"the plan given shards {wanted.name} as {to_partition_spec(planned.sharding)}, "
                f"its pin says {to_partition_spec(wanted.pin)}",
                at=wanted.name,
                fix="remove the pin, or plan again with it",
            )
    for argument, result in ties:
        here, there = plan.arguments[argument], plan.results[result]
        if here.sharding != there.sharding:
            raise InputError(
                f"the plan given was made without donation: {here.name} is sharded as "
                f"{to_partition_spec(here.sharding)}, what replaces it as "
                f"{to_partition_spec(there.sharding)}",
                at=here.name,
                fix="plan again with the same donated arguments",
            )
    if memory_limit is not None and plan.predicted.peak_bytes > memory_limit:
        raise InfeasibleError(
            f"the plan given is predicted to need {plan.predicted.peak_bytes:,} bytes per device, "
            f"the memory limit is {memory_limit:,}",
            fix="raise memory_limit, or plan again under it",
        )
    return plan


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Names and sizes of a mesh's axes."""
    return MeshShape(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape))


def _cost_model(given: Any, mesh: Mesh) -> CostModel:
    if given is None:
        return default_cost_model(mesh.devices, tuple(map(str, mesh.axis_names)))
    if isinstance(given, str):
        shape = mesh_shape(mesh)
        return named_cost_model(given, dict(zip(shape.names, shape.sizes, strict=True)))
    model = given
    if not isinstance(model, CostModel):
        raise InputError(
            f"cost_model is a {type(given).__name__}, which is no cost model",
            fix=f"pass an object with the methods of CostModel, or one of {', '.join(COST_MODELS)}",
        )
    return model


def _boundaries(leaves: Sequence[Leaf], given: Sequence[Sharding | None]) -> tuple[Boundary, ...]:
    """What the planner is told of each argument or result; typed keys stay whole unless pinned."""
    return tuple(
        Boundary(
            leaf.name,
            leaf.donated,
            replicated(leaf.module_rank) if pin is None and leaf.is_key else pin,
            required=pin is None and leaf.is_key,
        )
        for leaf, pin in zip(leaves, given, strict=True)
    )
