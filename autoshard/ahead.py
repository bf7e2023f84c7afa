"""A planned program compiled for devices that nobody has to own."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.cost_models.aot import AheadOfTime, Port, Source, Target, compile_ahead
from autoshard.cost_models.gpu_targets import target_config
from autoshard.cost_models.hlo_cycles import CYCLES_PER_S, xla_estimates
from autoshard.cost_models.planned import PlannedDevice
from autoshard.cost_models.topology import Topology
from autoshard.errors import InputError
from autoshard.estimates import LineEstimate, line_estimates
from autoshard.plan import Plan
from autoshard.program import operations, source_of
from autoshard.shardings import Sharding
from autoshard.signature import Leaf
from autoshard.tracing import Traced, module_of
from autoshard.validate import Validation, compared


def compile_lowered(
    lowered: jax.stages.Lowered,
    traced: Traced,
    plan: Plan,
    *,
    full: bool = False,
    deadline_s: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> AheadOfTime:
    """Compile a rewritten program for the planned devices of its mesh.

    Args:
        lowered: The program with the plan's shardings.
        traced: What it was lowered from.
        plan: Its plan.
        full: As for :func:`~autoshard.cost_models.aot.compile_ahead`, as all below.
        deadline_s: Time after which the compiler is ended [s].
        compiler_options: XLA's options by name.
        folder: Where compilations are kept.
        say: Told how it goes.

    Raises:
        InputError: The mesh is none that can be compiled for, or the compiler is not installed.
    """
    module, bytecode = module_of(lowered), io.BytesIO()
    module.operation.write_bytecode(bytecode)
    # Locations hold the whole call stack; the user's line alone tells one program from another.
    lines = [source_of(op) for op in operations(module.body)]
    text = str(module.operation.get_asm(enable_debug_info=False))
    source = Source(
        bytecode.getvalue(),
        tuple(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        tuple(
            _port(leaf, sharding)
            for leaf, sharding in zip(
                traced.signature.arguments, plan.argument_shardings, strict=True
            )
        ),
        tuple(_port(leaf, ()) for leaf in traced.results),
        "\n".join((text, *lines)).encode(),
    )
    return compile_ahead(
        source,
        target_of(traced.mesh),
        full=full,
        deadline_s=deadline_s,
        compiler_options=compiler_options,
        folder=folder,
        say=say,
    )


def _port(leaf: Leaf, sharding: Sharding) -> Port:
    """An argument or result as the module has it: typed keys are arrays of words there."""
    array: Any = leaf.abstract
    if leaf.is_key:
        array = jax.eval_shape(jax.random.key_data, array)
    return Port(tuple(array.shape), str(array.dtype), sharding)


def validate_ahead(plan: Plan, result: AheadOfTime, partitioner: str, reason: str) -> Validation:
    """A plan held against what the compiler made of it; nothing is run."""
    estimates: tuple[LineEstimate, ...] = ()
    chip = Topology(result.target).chip
    clock = CYCLES_PER_S.get(chip.name) if chip is not None and result.full else None
    if clock and result.hlo:
        estimates = line_estimates(plan, xla_estimates(result.hlo), clock)
    return replace(
        compared(plan, result.program),
        estimates=estimates,
        compile_s=result.compile_s,
        partitioner=partitioner,
        fallback_reason=reason,
        ahead=result,
    )


def target_of(mesh: Mesh) -> Target:
    """The planned devices of a mesh, as XLA's ahead-of-time compilers name them.

    Raises:
        InputError: The mesh is of real devices, or of CPUs.
    """
    first = mesh.devices.flat[0]
    if not isinstance(first, PlannedDevice):
        raise InputError(
            f"the mesh is of {first.platform} devices of this machine",
            fix="plan for a topology's own mesh: Topology('v5e:4x4').mesh({'data': 16})",
        )
    topology = first.topology
    if topology.kind == "tpu":
        return _tpu(topology, mesh)
    if topology.kind == "gpu":
        return _gpu(topology)
    raise InputError(
        f"{topology.name} needs no compiler of its own",
        fix="use a mesh of virtual CPU devices: jax.config.update('jax_num_cpu_devices', 8)",
    )


def _tpu(topology: Any, mesh: Mesh) -> Target:
    assert topology.chip is not None
    name = {"v7x": "tpu7x"}.get(topology.chip.name, topology.chip.name)
    torus = [axis for axis in topology.axes if axis.name in ("x", "y", "z")]
    shape = [axis.size for axis in torus]
    # XLA names the shape of the flat generations by x and y, and wraps nothing unless told.
    options: dict[str, Any] = {"wrap": [a.wrapped for a in torus] + [False] * (3 - len(torus))}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if name == "v4":
        options["chip_config_name"] = "megacore"
    if any(size % 2 for size in shape[:2]):
        options["chips_per_host_bounds"] = [1, 1, 1]
    places = tuple((d.slice_index, *d.coords, d.core_on_chip) for d in mesh.devices.flat)
    text = f"{name}:{'x'.join(map(str, shape))}"
    return Target(topology.name, "tpu", text, tuple(options.items()), places)


def _gpu(topology: Any) -> Target:
    assert topology.chip is not None
    options = (
        ("topology", f"1x{topology.shape[1]}x{topology.shape[0]}"),
        ("target_config", target_config(topology.chip.name)),
    )
    return Target(topology.name, "cuda", "", options)
