"""What XLA says of an executable: FLOPs, collectives, memory, each with its place in the source.

Everything is per device. A loop's body counts as often as the loop runs; of a conditional's
branches only the costliest counts (most FLOPs, then most bytes sent). Elementwise work is not
counted, nor is a dot that XLA rewrote into a multiplication and a sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from autoshard.cost_models.hlo import Computation, HloModule, Instruction, parse_module
from autoshard.cost_models.hlo_flops import matmul_flops, opaque_target
from autoshard.cost_models.hlo_groups import Groups, permute_groups, replica_groups
from autoshard.cost_models.hlo_loops import CallSites, call_sites, executions
from autoshard.cost_models.hlo_traffic import traffic
from autoshard.cost_models.protocol import CollectiveKind, wire_bytes
from autoshard.shardings import MeshShape

CompiledKind = Literal[CollectiveKind, "broadcast"]
"""Kinds of collective in a compiled program."""

_KINDS: Mapping[str, CompiledKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_WINDOW = re.compile(r"windowed_dot_general_body_(ag|rs)")
_CHAIN = re.compile(r'chain_id="(\w+)"')


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Memory of one device, as XLA allocates it.

    Attributes:
        argument_bytes: Arguments [bytes].
        output_bytes: Results [bytes], those that reuse an argument included.
        temp_bytes: Temporaries [bytes].
        alias_bytes: Results that reuse a donated argument [bytes].
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, results and temporaries together [bytes], reused arguments counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True)
class DotCost:
    """One dot, convolution or matmul call.

    Attributes:
        op_name: Path of the JAX op that it comes from.
        source: ``file.py:line`` of the user's code; empty if the program does not say.
        dtype: Element type of the first operand.
        lhs: Sizes of the first operand on one device.
        rhs: Sizes of the second operand on one device.
        out: Sizes of the result on one device.
        flops: Operations of one execution on one device [FLOP].
        trips: How often it runs in one call of the program.
    """

    op_name: str
    source: str
    dtype: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    flops: float
    trips: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        kind: What it does.
        nbytes: Bytes on one device of its larger side, for one execution: the result of an
            all-gather, the operand of a reduce-scatter, the operand (= result) of the others.
        devices: Devices in each group; of a permute, in the largest set that it connects.
        groups: Device ids of each group.
        trips: How often it runs in one call of the program.
        op_name: Path of the JAX op that it comes from.
        source: ``file.py:line`` of the user's code; empty if the program does not say.
        name: Of the instruction, e.g. ``all-reduce.5``.
    """

    kind: CompiledKind
    nbytes: int
    devices: int
    groups: Groups
    trips: int
    op_name: str
    source: str
    name: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends for it in one call of the program, trips included."""
        return _sent(self) * self.trips


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program in numbers, per device.

    Attributes:
        flops_by_op: Its dots and convolutions.
        collectives: Its collectives.
        memory: Its memory; None if XLA does not say.
        fusions: Fusion instructions in the text.
        unknown_trip_counts: Loops whose trip count the text does not tell; counted once.
        opaque_calls: Targets of custom calls, whose work is not counted.
        hbm_bytes: Bytes read from and written to main memory, counted where fusions begin and end.
    """

    flops_by_op: tuple[DotCost, ...]
    collectives: tuple[Collective, ...]
    memory: MemorySizes | None
    fusions: int
    unknown_trip_counts: tuple[str, ...]
    opaque_calls: tuple[str, ...]
    hbm_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Operations of all dots and convolutions [FLOP]."""
        return sum(dot.flops * dot.trips for dot in self.flops_by_op)

    @property
    def collective_bytes(self) -> float:
        """Bytes that one device sends, were every collective bandwidth-optimal."""
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def argument_bytes(self) -> int | None:
        """Arguments [bytes]; None if XLA does not say."""
        return None if self.memory is None else self.memory.argument_bytes

    @property
    def output_bytes(self) -> int | None:
        """Results [bytes]; None if XLA does not say."""
        return None if self.memory is None else self.memory.output_bytes

    @property
    def temp_bytes(self) -> int | None:
        """Temporaries [bytes]; None if XLA does not say."""
        return None if self.memory is None else self.memory.temp_bytes

    @property
    def alias_bytes(self) -> int | None:
        """Results that reuse a donated argument [bytes]; None if XLA does not say."""
        return None if self.memory is None else self.memory.alias_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Arguments + results + temporaries - reused arguments [bytes]; None if not said."""
        return None if self.memory is None else self.memory.peak_bytes


def read_compiled(compiled: jax.stages.Compiled) -> CompiledProgram:
    """Numbers of a compiled function.

    Args:
        compiled: From ``jax.jit(fn).lower(...).compile()``.

    Returns:
        Its FLOPs, collectives and memory, per device.
    """
    sizes = compiled.memory_analysis()
    memory = None
    if sizes is not None:
        memory = MemorySizes(
            argument_bytes=sizes.argument_size_in_bytes,
            output_bytes=sizes.output_size_in_bytes,
            temp_bytes=sizes.temp_size_in_bytes,
            alias_bytes=sizes.alias_size_in_bytes,
        )
    return read_hlo(compiled.as_text() or "", memory=memory)


def read_hlo(text: str, *, memory: MemorySizes | None = None) -> CompiledProgram:
    """Numbers of a compiled program from its text.

    Args:
        text: HLO after all passes, as ``compiled.as_text()`` gives it.
        memory: Its memory, if known.

    Returns:
        Its FLOPs and collectives, per device.

    Raises:
        InputError: The text is no HLO module.
    """
    module = parse_module(text)
    sites = call_sites(module)
    computations = module.computations
    dots = {name: tuple(_dots(c, sites)) for name, c in computations.items()}
    collectives = _collectives(module, sites)
    weights = {
        name: (sum(d.flops for d in dots[name]), sum(_sent(c) for c in collectives[name]))
        for name in computations
    }
    runs, unknown = executions(module, sites, weights)
    instructions = [i for name in runs for i in computations[name].instructions]
    opaque = (opaque_target(instruction) for instruction in instructions)
    fused = {c for i in instructions if i.opcode == "fusion" for c in i.called}
    return CompiledProgram(
        flops_by_op=tuple(replace(d, trips=n) for name, n in runs.items() for d in dots[name]),
        collectives=tuple(
            replace(c, trips=runs[name])
            for name, found in _without_windows(collectives, runs, sites).items()
            for c in found
        ),
        memory=memory,
        fusions=sum(instruction.opcode == "fusion" for instruction in instructions),
        unknown_trip_counts=unknown,
        opaque_calls=tuple(dict.fromkeys(target for target in opaque if target)),
        hbm_bytes=sum(
            times * traffic(instruction, computations[name], computations)
            for name, times in runs.items()
            if name not in fused
            for instruction in computations[name].instructions
        ),
    )


def axes_of(collective: Collective, mesh: MeshShape) -> tuple[str, ...] | None:
    """The mesh axes that a collective runs over.

    Args:
        collective: A collective of a program for ``mesh``.
        mesh: The mesh; device ids count its devices in row-major order, as ``jit`` does.

    Returns:
        Axis names, major to minor; of a permute, the axes along which data moves. None if its
        groups are no sub-mesh, e.g. because they cut an axis into parts.

    Examples:
        >>> gather = Collective("all_gather", 64, 2, ((0, 2), (1, 3)), 1, "", "")
        >>> axes_of(gather, MeshShape(("x", "y"), (2, 2)))
        ('x',)
    """
    if len({len(group) for group in collective.groups}) != 1:
        return None
    groups = np.array(collective.groups)
    if groups.size != mesh.devices or groups.max() >= mesh.devices:
        return None
    places = np.unravel_index(groups, mesh.sizes)
    varies = [bool((place != place[:, :1]).any()) for place in places]
    axes = tuple(name for name, moves in zip(mesh.names, varies, strict=True) if moves)
    whole = collective.kind == "permute" or mesh.size(axes) == groups.shape[1]
    return axes if whole else None


def _dots(computation: Computation, sites: CallSites) -> Iterator[DotCost]:
    """The products of one computation, each as if it ran once."""
    for instruction in computation.instructions:
        flops = matmul_flops(instruction, computation)
        if flops is not None:
            lhs, rhs = computation.operand_shapes(instruction)[:2]
            op_name, source = _origin(instruction, computation, sites)
            yield DotCost(
                op_name=op_name,
                source=source,
                dtype=lhs.dtype,
                lhs=lhs.dims,
                rhs=rhs.dims,
                out=instruction.shapes[0].dims,
                flops=flops,
                trips=1,
            )


def _origin(instruction: Instruction, where: Computation, sites: CallSites) -> tuple[str, str]:
    """Op path and source of an instruction, or of the fusion around it if it has none itself."""
    callers = sites.get(where.name, ())
    if not instruction.op_name and len(callers) == 1 and callers[0][1].opcode == "fusion":
        instruction = callers[0][1]
    return instruction.op_name, instruction.source


def _collectives(module: HloModule, sites: CallSites) -> dict[str, tuple[Collective, ...]]:
    """Collectives of each computation, each as if it ran once.

    XLA:TPU writes a collective that runs beside other work into several fusions, which its
    ``chain_id`` ties together: it counts where it starts.
    """
    starts: dict[str, str] = {}
    for computation in module.computations.values():
        begins = any(
            "AsyncCollectiveStart" in i.attributes.get("custom_call_target", "")
            for i in computation.instructions
        )
        for chain in filter(None, map(_chain, computation.instructions)):
            if begins or chain not in starts:
                starts[chain] = computation.name
    return {
        name: tuple(
            _collective(instruction, computation, module.devices, sites)
            for instruction in computation.instructions
            if instruction.opcode.removesuffix("-start") in _KINDS
            and starts.get(_chain(instruction), name) == name
        )
        for name, computation in module.computations.items()
    }


def _without_windows(
    collectives: Mapping[str, tuple[Collective, ...]], runs: Mapping[str, int], sites: CallSites
) -> dict[str, tuple[Collective, ...]]:
    """The collectives of what runs, with windowed einsums as the collectives they stand for.

    XLA:TPU writes a product whose operand is gathered, or whose result is scattered, as a loop
    that passes pieces around a ring while it multiplies others. One such loop, with the last step
    behind it, is one all-gather or reduce-scatter.
    """
    found = {name: collectives[name] for name in runs}
    for name in runs:
        window = _WINDOW.search(name)
        ring = [c for c in found[name] if c.kind == "permute"]
        if window is None or not ring or name not in sites:
            continue
        around = sites[name][0][0].name
        first = ring[0]
        piece = (first.nbytes, first.groups, first.op_name)
        kind: CompiledKind = "all_gather" if window[1] == "ag" else "reduce_scatter"
        whole = replace(first, kind=kind, nbytes=first.nbytes * first.devices)
        rest = (c for c in found[around] if (c.nbytes, c.groups, c.op_name) != piece)
        found[name] = tuple(c for c in found[name] if c.kind != "permute")
        found[around] = (*rest, whole)
    return found


def _chain(instruction: Instruction) -> str:
    """What ties the parts of one overlapped collective together; empty for others."""
    found = _CHAIN.search(instruction.attributes.get("frontend_attributes", ""))
    return f"{found[1]}/{instruction.attributes.get('channel_id')}" if found else ""


def _collective(
    instruction: Instruction, where: Computation, devices: int, sites: CallSites
) -> Collective:
    """One collective instruction."""
    opcode = instruction.opcode.removesuffix("-start")
    kind = _KINDS[opcode]
    if kind == "permute":
        groups = permute_groups(instruction.attributes.get("source_target_pairs", ""))
    else:
        groups = replica_groups(instruction.attributes.get("replica_groups", "{}"), devices)
    size = max((len(group) for group in groups), default=1)
    operands = where.operand_shapes(instruction)
    if opcode == "ragged-all-to-all":  # its other operands are the output buffer and offsets
        operands = operands[:1]
    nbytes = sum(shape.nbytes for shape in operands)
    if kind == "all_reduce" and _is_scattered(instruction, where):
        kind = "reduce_scatter"
    op_name, source = _origin(instruction, where, sites)
    return Collective(
        kind=kind,
        nbytes=nbytes * size if kind == "all_gather" else nbytes,
        devices=size,
        groups=groups,
        trips=1,
        op_name=op_name,
        source=source,
        name=instruction.name,
    )


def _is_scattered(instruction: Instruction, where: Computation) -> bool:
    """Whether an all-reduce is one with the slice of its result: XLA:TPU's fused reduce-scatter."""
    return where.name.startswith("all-reduce-scatter") and any(
        user.opcode == "dynamic-slice" and user.operands[0] == instruction.name
        for user in where.instructions
    )


def _sent(collective: Collective) -> float:
    """Bytes that one device sends in one execution."""
    if collective.kind == "broadcast":  # like an all-gather: each device passes on all but a share
        return collective.nbytes * (1 - 1 / collective.devices)
    return wire_bytes(collective.kind, collective.nbytes, collective.devices)
