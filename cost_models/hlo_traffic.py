"""Main-memory traffic of compiled HLO, counted where fusions begin and end.

What a fusion holds between its operands and its results never leaves the chip. Of an operand that
is only sliced, the slice is read; of one that is updated in place, the update is written. Buffers
that the compiler put into another memory (``S(1)``: VMEM on TPU) cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoshard.cost_models.hlo import Computation, Instruction, Shape

_NOTHING = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
        "call", "after-all", "opt-barrier", "partition-id", "replica-id", "add-dependency",
        "async-start", "async-update", "async-done", "domain",
    }
)  # fmt: skip
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def traffic(
    instruction: Instruction, where: Computation, computations: Mapping[str, Computation]
) -> float:
    """Bytes that one execution of an instruction reads from and writes to main memory.

    Args:
        instruction: An instruction of a computation that is no fusion's.
        where: The computation that holds it.
        computations: All computations of the module.
    """
    opcode = instruction.opcode
    if opcode in _NOTHING or opcode.endswith(("-done", "-update")):
        return 0.0
    if opcode == "custom-call" and "AllocateBuffer" in str(instruction.attributes):
        return 0.0
    if opcode == "fusion" and instruction.called:
        callee = computations.get(instruction.called[0])
        if callee is not None:
            return _fusion(callee, instruction, where)
    operands = where.operand_shapes(instruction)
    if opcode in _SLICES:
        return 2.0 * _stored(instruction.shapes)
    if opcode == "dynamic-update-slice":
        return 2.0 * _stored(operands[1:2]) if _stored(instruction.shapes) else 0.0
    results = instruction.shapes
    if opcode.endswith("-start"):  # its result names its operands too, and what it synchronizes
        written = _stored(operands) if opcode == "copy-start" else 0.0
        first = results[: len(operands)]
        rest = results[len(operands) : 2 * len(operands)]
        return _stored(operands) + (_stored(rest) or (0.0 if rest else written or _stored(first)))
    return float(_stored(operands) + _stored(results))


def _stored(shapes: Iterable[Shape]) -> float:
    """Bytes of arrays that are in main memory."""
    return float(sum(shape.nbytes for shape in shapes if shape.memory_space == 0))


def _fusion(inside: Computation, instruction: Instruction, where: Computation) -> float:
    """What a fusion reads and writes."""
    users: dict[str, list[Instruction]] = {}
    for user in inside.instructions:
        for name in user.operands:
            users.setdefault(name, []).append(user)
    operands = [where.by_name.get(name) for name in instruction.operands]
    total = 0.0
    for parameter in inside.instructions:
        if parameter.opcode != "parameter":
            continue
        number = int(parameter.literal)
        given = operands[number] if number < len(operands) else None
        shapes = parameter.shapes if given is None else given.shapes
        if _stored(shapes):
            total += _read(parameter, users, inside.root, _stored(shapes))
    ends = (
        [inside.by_name.get(name) for name in inside.root.operands]
        if inside.root.opcode == "tuple"
        else [inside.root]
    )
    for end, shape in zip(ends, instruction.shapes, strict=False):
        if end is None or shape.memory_space != 0:
            continue
        made = end
        while made.opcode in _VIEWS and made.operands and made.operands[0] in inside.by_name:
            made = inside.by_name[made.operands[0]]
        if made.opcode == "parameter":
            continue  # handed through
        if made.opcode == "dynamic-update-slice":
            update = inside.by_name.get(made.operands[1])
            total += shape.nbytes if update is None else min(shape.nbytes, update.nbytes)
        else:
            total += shape.nbytes
    return total


def _read(
    parameter: Instruction,
    users: Mapping[str, list[Instruction]],
    root: Instruction,
    whole: float,
) -> float:
    """Bytes that a fusion reads of an operand of ``whole`` bytes."""
    read, waiting = 0.0, [parameter.name]
    while waiting:
        name = waiting.pop()
        for user in users.get(name, ()):
            if user.opcode in _VIEWS:
                waiting.append(user.name)
            elif user.opcode in _SLICES and user.operands[0] == name:
                read += user.nbytes
            elif user is root and user.opcode == "tuple":
                continue  # handed through
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # updated in place
            else:
                return whole
    return min(read, whole)
