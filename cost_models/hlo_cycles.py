"""XLA:TPU's own estimates of how long each fusion takes, from a program compiled to the end.

They are **estimates**: close to the matrix unit's time for large products, two to three times too
long for what memory bounds, and silent about collectives and about weights that are fetched while
something else runs. Nobody measured them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.cost_models.hlo import Computation, Instruction, parse_module
from autoshard.cost_models.hlo_loops import call_sites, executions

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')

CYCLES_PER_S: Mapping[str, float] = {
    "v4": 1.05e9,
    "v5e": 1.5e9,
    "v5p": 1.75e9,
    "v6e": 1.75e9,
    "v7x": 1.9e9,
}
"""The clock that XLA:TPU reckons with, by chip [cycles/s].

Source: ``cycles_per_microsecond`` in the schedules that libtpu 0.0.42 and 0.0.52 write.
"""


@dataclass(frozen=True, slots=True)
class XlaEstimate:
    """What XLA:TPU reckons that one instruction takes; an estimate.

    Attributes:
        name: Of the instruction.
        opcode: E.g. ``fusion``, ``copy``.
        op_name: Path of the JAX op at its root.
        source: ``file.py:line`` of that op; empty if the program does not say.
        cycles: Of one execution.
        trips: How often it runs in one call of the program.
    """

    name: str
    opcode: str
    op_name: str
    source: str
    cycles: int
    trips: int


def xla_estimates(text: str) -> tuple[XlaEstimate, ...]:
    """The instructions that carry an estimate, the longest in one call first.

    Args:
        text: HLO as ``compiled.as_text()`` gives it. A program that was compiled only until it was
            scheduled carries none.

    Raises:
        InputError: The text is no HLO module.
    """
    module = parse_module(text)
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for name in instruction.called
    }
    found = {
        name: () if name in fused else tuple(_estimates(computation))
        for name, computation in module.computations.items()
    }
    weights = {name: (float(sum(e.cycles for e in of)), 0.0) for name, of in found.items()}
    runs, _ = executions(module, call_sites(module), weights)
    every = [replace(e, trips=times) for name, times in runs.items() for e in found[name]]
    return tuple(sorted(every, key=lambda e: -e.cycles * e.trips))


def _estimates(computation: Computation) -> list[XlaEstimate]:
    found = []
    for instruction in computation.instructions:
        cycles = _cycles(instruction)
        if cycles:
            origin = instruction.op_name, instruction.source
            found.append(XlaEstimate(instruction.name, instruction.opcode, *origin, cycles, 1))
    return found


def _cycles(instruction: Instruction) -> int:
    found = _CYCLES.search(instruction.attributes.get("backend_config", ""))
    return int(found[1]) if found else 0
