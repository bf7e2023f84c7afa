"""``shard`` and ``shard-expert``: a plan is made for the module and written into it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jax.extend.mlir import ir

from autoshard.cost_models import COST_MODELS
from autoshard.errors import InputError
from autoshard.module_text import state_boundary
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.logical_axes import Rules, sharding_by_rules
from autoshard.passes.option_values import Bytes
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.registry import register_pass
from autoshard.plan import Plan
from autoshard.planner import plan_module
from autoshard.program import Boundary, arrays, main_block, shape_of, terminator
from autoshard.rewrite import rewrite
from autoshard.shardings import MeshShape, replicated

DEFAULT = "flatten-calls,shard"
"""The pipeline of ``autoshard(fn, mesh)``."""

_TWICE = "a sharded module already holds a sharding for every value"


@runtime_checkable
class Sharder(Protocol):
    """A pass that decides where everything lives: the one of its kind in a pipeline."""

    def plan(self, module: ir.Module, context: PassContext) -> Plan:
        """Plan the module, which is brought into the planner's shape; nothing is written."""
        ...


@register_pass(
    "shard",
    summary="Chooses a sharding for every value with a solver, and writes it into the module",
    preserves=("numerics", "boundary", "effects"),
    not_idempotent=_TWICE,
)
@dataclass(frozen=True, slots=True)
class Shard:
    """The planner as a pass.

    Attributes:
        memory: What one device may hold at its peak; none: the context's limit.
        solver: Name of a solver; none: the default one.
    """

    memory: Bytes | None = None
    solver: str | None = None

    def plan(self, module: ir.Module, context: PassContext) -> Plan:
        """The cheapest plan found."""
        return _planned(module, context, context.boundaries_of(module), self.memory, self.solver)

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Plan, or take the plan that the context has, and write it into the module."""
        _write(self, "shard", module, context)


@register_pass(
    "shard-expert",
    summary="Shards arguments and results by rules on logical axes; what is between them follows",
    preserves=("numerics", "boundary", "effects"),
    not_idempotent=_TWICE,
)
@dataclass(frozen=True, slots=True)
class ShardExpert:
    """A plan by hand.

    Arguments and results that no entry of ``axes`` names are held whole by every device. Values in
    between are sharded as the solver finds cheapest under that, as for a plan with pins.

    Attributes:
        rules: Logical axis to mesh axes, the first claim first: ``[batch:data,mlp:model+data]``.
        axes: Names of arguments and results (``*`` stands for anything) to the logical axes of
            their dimensions, ``_`` for none: ``["params['w1']:embed+mlp",x:batch+_]``.
    """

    rules: tuple[str, ...]
    axes: tuple[str, ...]

    def plan(self, module: ir.Module, context: PassContext) -> Plan:
        """The plan that the rules mean."""
        mesh = context.needed_mesh("shard-expert")
        block, given = main_block(module), context.boundaries_of(module)
        rules = _rules(self.rules, mesh)
        named = [_pair(entry, "axes") for entry in self.axes]
        sides = (
            (given.arguments, arrays(block.arguments)),
            (given.results, arrays(terminator(block).operands)),
        )
        used: set[str] = set()
        pinned = tuple(
            tuple(
                _pinned(boundary, shape_of(value), named, rules, mesh, used)
                for boundary, value in zip(boundaries, values, strict=True)
            )
            for boundaries, values in sides
        )
        unused = [name for name, _ in named if name not in used]
        if unused:
            known = ", ".join(b.name for b in (*given.arguments, *given.results)[:8])
            raise InputError(
                f"no argument or result is called {unused[0]}",
                at="option axes of shard-expert",
                fix=f"they are called {known}; * stands for anything",
            )
        wanted = Boundaries(pinned[0], pinned[1], given.ties)
        return _planned(module, context, wanted, None, None)

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Plan, or take the plan that the context has, and write it into the module."""
        _write(self, "shard-expert", module, context)


def around_sharder(pipeline: Pipeline) -> tuple[Pipeline, Sharder, Pipeline]:
    """The passes before the one that shards, that one, and those after it.

    Raises:
        InputError: None shards, or more than one does.
    """
    found = [i for i, each in enumerate(pipeline.passes) if isinstance(each, Sharder)]
    if len(found) != 1:
        raise InputError(
            f"{len(found) or 'no'} passes of the pipeline shard the program",
            at=f"pipeline {pipeline}",
            fix=f"have one of shard and shard-expert in it; the default is {DEFAULT}",
        )
    sharder = pipeline.passes[found[0]]
    assert isinstance(sharder, Sharder)
    before, after = pipeline.passes[: found[0]], pipeline.passes[found[0] + 1 :]
    return Pipeline(before), sharder, Pipeline(after)


def _planned(
    module: ir.Module,
    context: PassContext,
    boundaries: Boundaries,
    memory: int | None,
    solver: str | None,
) -> Plan:
    """A plan; what the context says goes before the options of the pass."""
    model = context.cost_model
    return plan_module(
        module,
        boundaries.arguments,
        boundaries.results,
        context.needed_mesh("shard"),
        ties=boundaries.ties,
        memory_limit=memory if context.memory_limit is None else context.memory_limit,
        cost_model=COST_MODELS["cpu"]() if model is None else model,
        solver=solver if context.solver is None else context.solver,
        time_limit_s=context.time_limit_s,
        progress=context.progress,
    )


def _write(sharder: Sharder, name: str, module: ir.Module, context: PassContext) -> None:
    if any(key in context.results for key in ("shard", "shard-expert")):
        raise InputError(
            "the module is sharded already", at=f"pass {name}", fix="have one sharding pass"
        )
    plan = sharder.plan(module, context) if context.plan is None else context.plan
    rewrite(module, plan)
    state_boundary(module, plan)
    context.publish(name, plan)


def _pinned(
    boundary: Boundary,
    shape: tuple[int, ...],
    named: Sequence[tuple[str, tuple[str, ...]]],
    rules: Rules,
    mesh: MeshShape,
    used: set[str],
) -> Boundary:
    for name, axes in named:
        if boundary.name == name or fnmatch.fnmatchcase(boundary.name, name.replace("[", "[[]")):
            used.add(name)
            if len(axes) != len(shape):
                raise InputError(
                    f"{boundary.name} has {len(shape)} dimensions, {len(axes)} logical axes are "
                    "given",
                    at=f"{name}:{'+'.join(axes)}",
                    fix="name every dimension, by _ those that stay whole",
                )
            return replace(boundary, pin=sharding_by_rules(shape, axes, rules, mesh))
    return boundary if boundary.required else replace(boundary, pin=replicated(len(shape)))


def _rules(given: Sequence[str], mesh: MeshShape) -> Rules:
    rules = dict(_pair(entry, "rules") for entry in given)
    unknown = [axis for axes in rules.values() for axis in axes if axis not in mesh.names]
    if unknown:
        raise InputError(
            f"the mesh {mesh} has no axis {unknown[0]!r}",
            at="option rules of shard-expert",
            fix=f"its axes: {', '.join(mesh.names)}",
        )
    return rules


def _pair(entry: str, option: str) -> tuple[str, tuple[str, ...]]:
    name, colon, listed = entry.rpartition(":")
    if not colon or not name:
        raise InputError(
            f"cannot read {entry!r}",
            at=f"option {option} of shard-expert",
            fix="write NAME:AXIS+AXIS, as in rules=[batch:data,mlp:model]",
        )
    return name, tuple(axis for axis in listed.split("+") if axis)
