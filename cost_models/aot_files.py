"""What XLA leaves behind while it compiles: buffer assignments, schedules, messages on memory.

The formats are those of libtpu 0.0.42 and 0.0.52 and of jaxlib 0.10.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.cost_models.compiled import MemorySizes

_ALLOCATION = re.compile(r"allocation \d+: (?:0x\w+, )?size (\d+)(?:, color (\d+))?(.*)")
_SIZES = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FIELD = re.compile(r" *(\w+): (.*)")


@dataclass(frozen=True, slots=True)
class ScheduledInstruction:
    """One instruction of XLA's schedule; all times are XLA's estimates.

    Attributes:
        name: Of the instruction.
        opcode: E.g. ``fusion`` or ``all-gather-start``.
        op_name: Path of the JAX op that it comes from.
        start_s: When it starts, from the start of its computation [s].
        end_s: When it ends [s].
    """

    name: str
    opcode: str
    op_name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class XlaSchedule:
    """What XLA's latency-hiding scheduler reckons; **estimates**, not times that anyone measured.

    They must not be mixed with other numbers: the scheduler prices matmuls and collectives in a
    scale of its own and counts the body of a loop once.

    Attributes:
        total_s: Length of the scheduled computations, loop bodies once [s].
        wasted_s: Time in which only communication is going on [s].
        instructions: Those that take longer than one cycle, in order.
    """

    total_s: float
    wasted_s: float
    instructions: tuple[ScheduledInstruction, ...]


def buffer_sizes(text: str) -> MemorySizes:
    """Memory of one device from a ``*buffer-assignment.txt``.

    Allocations in main memory (colour 0) count, with the padding of their layouts; what lies in
    VMEM or another memory does not.

    Args:
        text: The file's text.
    """
    argument = output = temp = alias = 0
    for line in text.splitlines():
        found = _ALLOCATION.match(line)
        if not found or (found[2] or "0") != "0":
            continue
        size, rest = int(found[1]), found[3].partition(":")[0]
        if "parameter" in rest:
            argument += size
        if "maybe-live-out" in rest:
            output += size
            alias += size if "parameter" in rest else 0
        elif "parameter" not in rest and "thread-local" not in rest:
            temp += size
    return MemorySizes(argument, output, temp, alias)


def exceeded(message: str) -> tuple[int, int] | None:
    """Bytes that a program needs and bytes that there are, from XLA's message; None if not said.

    Examples:
        >>> exceeded("the total memory (2.00K) exceeds available HBM (1.00K).")
        (2048, 1024)
    """
    found = _SIZES.search(message) or _USED.search(message)
    if found is None:
        return None
    needed, available = (round(float(found[k]) * _UNITS[found[k + 1]]) for k in (1, 3))
    return needed, available


def read_schedule(text: str) -> XlaSchedule | None:
    """The schedule in a ``*.schedule.txt``; None if it holds none.

    Args:
        text: A text proto: the module's instructions with their ids, then times by id.
    """
    names: dict[str, tuple[str, str, str]] = {}
    spans: list[tuple[str, float, float]] = []
    totals = {"total_cycles": 0.0, "total_wasted_cycles": 0.0, "cycles_per_microsecond": 0.0}
    for path, fields in _messages(text):
        if path[:2] == ("hlo_module", "computations") and path[-1] == "instructions":
            names[fields.get("id", "")] = (
                fields.get("name", "").strip('"'),
                fields.get("opcode", "").strip('"'),
                fields.get("metadata.op_name", "").strip('"'),
            )
        elif "start_timestamp_cycles" in fields:
            span = (fields[k] for k in ("start_timestamp_cycles", "end_timestamp_cycles"))
            start, end = map(float, span)
            spans.append((fields.get("id", ""), start, end))
        for key in totals.keys() & fields.keys():
            totals[key] += float(fields[key])
            if key == "cycles_per_microsecond":
                totals[key] = float(fields[key])
    per_s = totals["cycles_per_microsecond"] * 1e6
    if not per_s:
        return None
    return XlaSchedule(
        total_s=totals["total_cycles"] / per_s,
        wasted_s=totals["total_wasted_cycles"] / per_s,
        instructions=tuple(
            ScheduledInstruction(*names[number], start / per_s, end / per_s)
            for number, start, end in spans
            if number in names and end - start > 1.5
        ),
    )


def _messages(text: str) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Every message of a text proto, inner ones first: its path and its plain fields.

    Fields of ``metadata`` are also given to the message around it.
    """
    path: list[str] = []
    fields: list[dict[str, str]] = [{}]
    for line in text.splitlines():
        if line.endswith("{"):
            path.append(line[:-1].strip())
            fields.append({})
        elif line.endswith("}") and line.strip() == "}":
            if not path:
                return
            inner = fields.pop()
            yield tuple(path), inner
            if path.pop() == "metadata":
                fields[-1].update({f"metadata.{key}": value for key, value in inner.items()})
        elif found := _FIELD.match(line):
            fields[-1][found[1]] = found[2]
    yield (), fields[0]
