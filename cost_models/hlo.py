"""Compiled HLO text as frozen records: module, computations, instructions.

Reads what ``compiled.as_text()`` prints for XLA:CPU, XLA:TPU and XLA:GPU. One pass over the lines,
no recursion; attributes that this module has never heard of are kept as text. The grammar was
taken from the text that jaxlib 0.10.2 and libtpu 0.0.42 print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath

from autoshard.errors import InputError

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TABLE_ROW = re.compile(r"(\d+) (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+).*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]|, ')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_SOURCE_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_OPERAND = re.compile(r"%([^\s,()]+)")
_BITS = re.compile(r"[a-z]+(\d+)")
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One array of an instruction's result.

    Attributes:
        dtype: Element type as HLO writes it, e.g. ``bf16``.
        dims: Sizes on one device, major to minor.
        layout: What stands between the braces, e.g. ``1,0:T(8,128)S(1)``; empty if nothing does.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Size without padding [bytes]; types narrower than a byte are packed."""
        return -(-self.elements * _bits(self.dtype) // 8)

    @property
    def memory_space(self) -> int:
        """``S(n)`` of the layout; 0 is the device's main memory (on TPU, 1 is VMEM)."""
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name without ``%``.
        shapes: The arrays of its result; one unless the result is a tuple (flattened).
        opcode: E.g. ``dot``, ``all-gather-start``.
        operands: Names of its operands, of the same computation.
        literal: The text between the parentheses: a constant's value, a parameter's number.
        attributes: Attribute text by name, e.g. ``{"dimensions": "{0}"}``.
        called: Computations it calls, in the order of its attributes.
        op_name: The path of the JAX op that it comes from; empty if not said.
        source: ``file.py:line`` of the user's code that it comes from; empty if not said.
        root: Whether it is the result of its computation.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: Mapping[str, str]
    called: tuple[str, ...]
    op_name: str
    source: str
    root: bool

    @property
    def nbytes(self) -> int:
        """Size of the whole result [bytes]."""
        return sum(shape.nbytes for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation.

    Attributes:
        name: Its name without ``%``.
        instructions: In the order of the text: the schedule, where the module is scheduled.
        entry: Whether the program starts here.
        by_name: The same instructions by name.
    """

    name: str
    instructions: tuple[Instruction, ...]
    entry: bool
    by_name: Mapping[str, Instruction] = field(repr=False, compare=False)

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Shapes of all operands of one of its instructions, tuples flattened."""
        makers = (self.by_name.get(name) for name in instruction.operands)
        return tuple(shape for maker in makers if maker for shape in maker.shapes)


@dataclass(frozen=True, slots=True)
class HloModule:
    """One compiled module.

    Attributes:
        name: Its name.
        attributes: Attribute text of the head line by name, e.g. ``{"num_partitions": "8"}``.
        computations: By name, callees before callers, as in the text.
        entry: The computation where the program starts.
    """

    name: str
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    entry: Computation

    @property
    def devices(self) -> int:
        """Number of devices the module runs on: replicas times partitions."""
        counts = (self.attributes.get(k, "1") for k in ("replica_count", "num_partitions"))
        return math.prod(int(count) for count in counts)


def parse_module(text: str) -> HloModule:
    """Read one compiled module.

    Args:
        text: As ``jax.stages.Compiled.as_text()`` gives it.

    Returns:
        The module.

    Raises:
        InputError: The text is no HLO module.
    """
    lines = iter(text.splitlines())
    head = next(lines, "")
    if not head.startswith("HloModule "):
        raise InputError(
            "this text is no HLO module: it does not start with 'HloModule'",
            fix="pass what compiled.as_text() returns",
        )
    name, _, rest = head.removeprefix("HloModule ").partition(", ")
    tables: dict[str, dict[str, str]] = {title: {} for title in _TABLES}
    rows: dict[str, str] = {}
    sources: dict[str, str] = {}
    computations: dict[str, Computation] = {}
    for line in lines:
        if line in tables:
            rows = tables[line]
        elif row := _TABLE_ROW.match(line):
            rows[row[1]] = row[2]
        elif line.endswith("{") and (header := _HEADER.match(line)):
            sources = sources or _frame_sources(tables)
            computations[header[2]] = _computation(header, lines, sources)
    if not computations:
        raise InputError(
            "this HLO module holds no computation", fix="pass what compiled.as_text() returns"
        )
    entry = next((c for c in computations.values() if c.entry), [*computations.values()][-1])
    return HloModule(name, _attributes(", " + rest), computations, entry)


def _frame_sources(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """``file.py:line`` of every stack frame, by its id."""
    places: dict[str, str] = {}
    for number, row in tables["FileLocations"].items():
        fields = dict(re.findall(r"(\w+)=(\d+)", row))
        file = tables["FileNames"].get(fields.get("file_name_id", ""), "").strip('"')
        places[number] = f"{PurePath(file).name}:{fields.get('line', '0')}"
    frames = tables["StackFrames"].items()
    location = re.compile(r"file_location_id=(\d+)")
    return {n: places.get(found[1], "") for n, row in frames if (found := location.search(row))}


def _computation(
    header: re.Match[str], lines: Iterator[str], sources: Mapping[str, str]
) -> Computation:
    """The computation that ``header`` opens; takes its lines up to the closing brace."""
    texts: list[str] = []
    for line in lines:
        if line.startswith("}"):
            break
        if _INSTRUCTION.match(line) or not texts:
            texts.append(line)
        else:  # a literal or string that was printed over several lines
            texts[-1] += line
    instructions = tuple(made for text in texts if (made := _instruction(text, sources)))
    by_name = {instruction.name: instruction for instruction in instructions}
    return Computation(header[2], instructions, header[1] is not None, by_name)


def _instruction(text: str, sources: Mapping[str, str]) -> Instruction | None:
    """One instruction; None where the text is none."""
    if "/*" in text:
        text = _INDEX_COMMENT.sub("", text)
    start = _INSTRUCTION.match(text)
    if not start:
        return None
    at = start.end()
    shape_end = _closing(text, at) + 1 if text[at] == "(" else text.find(" ", at)
    opening = text.find("(", shape_end)
    if shape_end <= 0 or opening < 0:
        return None
    opcode = text[shape_end:opening].strip()
    closing = _closing(text, opening)
    literal = text[opening + 1 : closing]
    attributes = _attributes(text[closing + 1 :])
    op_name, source = _metadata(attributes.get("metadata", ""), sources)
    return Instruction(
        name=start[2],
        shapes=_shapes(text[at:shape_end]),
        opcode=opcode,
        operands=() if opcode in ("constant", "parameter") else _operands(literal),
        literal=literal,
        attributes=attributes,
        called=tuple(_called(attributes)),
        op_name=op_name,
        source=source,
        root=start[1] is not None,
    )


@lru_cache(maxsize=65536)
def _shapes(text: str) -> tuple[Shape, ...]:
    """All arrays named in a shape, tuples flattened."""
    return tuple(
        Shape(dtype, tuple(int(size) for size in re.findall(r"\d+", dims)), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _operands(text: str) -> tuple[str, ...]:
    """Names of the operands, whether or not their types stand before them."""
    if "%" in text:
        return tuple(_OPERAND.findall(text))
    return tuple(piece.split()[-1] for piece in _pieces(text) if piece.strip())


def _called(attributes: Mapping[str, str]) -> Iterable[str]:
    """Names of the computations that the attributes call."""
    for key in _CALLS:
        if key in attributes:
            names = attributes[key].strip("{}").split(",")
            yield from (name.strip().lstrip("%") for name in names if name.strip())


def _metadata(text: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """The op's path and source line."""
    if not text:
        return "", ""
    name = _OP_NAME.search(text)
    if frame := _FRAME_ID.search(text):
        source = sources.get(frame[1], "")
    else:
        place = _SOURCE_LINE.search(text)
        source = f"{PurePath(place[1]).name}:{place[2]}" if place else ""
    return name[1] if name else "", source


def _attributes(text: str) -> dict[str, str]:
    """``, key=value, key=value`` as a mapping."""
    found: dict[str, str] = {}
    last = ""
    for piece in _pieces(text):
        key, equals, value = piece.partition("=")
        if key == "device_ids" and last == "replica_groups":  # mesh[...], device_ids=(...) {...}
            found[last] += ", " + piece
        elif equals:
            found[key], last = value, key
    return found


def _pieces(text: str) -> Iterable[str]:
    """``text`` cut at the commas that stand outside all brackets and strings."""
    depth = start = 0
    for token in _BRACKET.finditer(text):
        mark = token[0]
        if mark == ", ":
            if depth == 0:
                yield text[start : token.start()]
                start = token.end()
        elif mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
    yield text[start:]


def _closing(text: str, at: int) -> int:
    """Position of the bracket that closes the one at ``at``; the text's end if none does."""
    depth = 0
    for token in _BRACKET.finditer(text, at):
        mark = token[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0:
                return token.start()
    return len(text)


def _bits(dtype: str) -> int:
    """Bits of one element; 0 for tokens and other types that hold no data."""
    found = _BITS.match(dtype)
    return int(found[1]) if found else 8 * (dtype == "pred")
