"""Who reads which value, where and how often: the places at which a reshard can be needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.graph import Graph, Op


@dataclass(frozen=True, slots=True)
class Read:
    """One value read in one place.

    Attributes:
        value: Id of the value.
        op: Index of the op that reads it, or gets it back from its region; the number of ops for
            the end of the program.
        position: Which operand, returned value or result it is.
        returned: Whether it is given back by a region (or the program) rather than an operand.
        block: Where a reshard for it is made: (op that holds the place, region); (-1, 0) at the
            top. A loop's body does not reshard what never changes in it: that is done before it.
        trips: How often such a reshard happens in one call.
        origin: Id of the value that is resharded there: ``value``, or what a loop starts it from.
    """

    value: int
    op: int
    position: int
    returned: bool
    block: tuple[int, int]
    trips: int
    origin: int


def reads(graph: Graph) -> tuple[Read, ...]:
    """Every read of the program, in program order."""
    children: dict[tuple[int, int], list[Op]] = {}
    for op in graph.ops:
        children.setdefault((op.parent, op.region), []).append(op)
    found = list(_block(graph, (-1, 0), children))
    end = len(graph.ops)
    found += [Read(v, end, r, True, (-1, 0), 1, v) for r, v in enumerate(graph.results)]
    return tuple(found)


def _block(
    graph: Graph, block: tuple[int, int], children: dict[tuple[int, int], list[Op]]
) -> Iterator[Read]:
    for op in children.get(block, ()):
        for position, value in enumerate(op.operands):
            yield Read(value, op.index, position, False, *place(graph, value, block, op.trips))
        first = 1 if op.name == "stablehlo.while" else 0
        if first:
            yield from _block(graph, (op.index, 0), children)
        for number, returned in enumerate(op.returned):
            inside = (op.index, number + first)
            yield from _block(graph, inside, children)
            for position, value in enumerate(returned):
                yield Read(
                    value, op.index, position, True, *place(graph, value, inside, op.body_trips)
                )


def place(
    graph: Graph, value: int, block: tuple[int, int], trips: int
) -> tuple[tuple[int, int], int, int]:
    """Where a value that is read in ``block`` is resharded, how often in one call, and from what.

    That is in ``block``, except for what a loop carries unchanged: it is resharded before the loop
    (or before the outermost of several loops), and the loop carries the outcome.
    """
    while block[0] >= 0 and block[1] == 1:
        loop = graph.ops[block[0]]
        if loop.name != "stablehlo.while" or value not in loop.results:
            break
        position = loop.results.index(value)
        if loop.returned[0][position] != value:
            break
        block, trips, value = (loop.parent, loop.region), loop.trips, loop.operands[position]
    return block, trips, value
