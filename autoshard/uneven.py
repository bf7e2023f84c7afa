"""What a plan says of dimensions that the mesh does not divide: padded, whole, or loosened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.graph import Graph
from autoshard.shardings import (
    MeshShape,
    Sharding,
    divides,
    local_bytes,
    pads,
    splitting,
)


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A value on its way between arguments and results that is split unevenly.

    Attributes:
        name: What people call it.
        shape: Global shape.
        dtype: Element type.
        sharding: Mesh axes per dimension.
        waste_bytes: Padding that each device holds [bytes]; 0 for a value that is fused away.
        waste_flops: What a device computes, in one call, beyond an even share of the op that makes
            the value [FLOP]; 0 for a copy in another sharding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    waste_bytes: int
    waste_flops: float


@dataclass(frozen=True, slots=True)
class WholeDimension:
    """A size that mesh axes do not divide, so that values are not split along them.

    Attributes:
        size: The size.
        axes: The mesh axes that do not divide it and split nothing else of these values.
        ways: Into how many parts the dimension would be split with them.
        pad_to: The next larger size that they divide.
        nbytes: What a device holds of these values [bytes].
        values: Their names, the largest first.
    """

    size: int
    axes: tuple[str, ...]
    ways: int
    pad_to: int
    nbytes: int
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Uneven:
    """All that is uneven in a plan.

    Attributes:
        padded: Values that are split unevenly, the most wasteful first. Arguments and results never
            are.
        whole: Dimensions that stay whole along mesh axes that do not divide them, the largest
            first.
        loosened: Shardings that the function prescribes and that its dimensions do not allow, each
            with what is carried out instead.
    """

    padded: tuple[PaddedValue, ...] = ()
    whole: tuple[WholeDimension, ...] = ()
    loosened: tuple[str, ...] = ()

    @property
    def waste_bytes(self) -> int:
        """Padding of all values [bytes on one device], whether live at one time or not."""
        return sum(p.waste_bytes for p in self.padded)

    @property
    def waste_flops(self) -> float:
        """What one device computes on padding in one call [FLOP]."""
        return sum(p.waste_flops for p in self.padded)


@dataclass(slots=True)
class _Held:
    nbytes: int = 0
    values: dict[str, int] = field(default_factory=dict)


def uneven_of(
    graph: Graph,
    mesh: MeshShape,
    arguments: Sequence[Sharding],
    results: Sequence[Sharding],
    made: Mapping[int, Sharding],
    stored: Sequence[bool],
    copies: Iterable[tuple[int, Sharding]],
    flops: Mapping[int, tuple[float, float]],
    name: Callable[[int], str],
) -> Uneven:
    """Find what is uneven in a plan.

    Args:
        graph: The program.
        mesh: The mesh.
        arguments: Sharding of each argument.
        results: Sharding of each result.
        made: Sharding of each value, as its op makes it.
        stored: Per value, whether it takes memory.
        copies: Other shardings that values take on the way to their readers.
        flops: Per op, what a device computes in one call, and an even share of its work [FLOP].
        name: What people call a value.
    """

    def padded(value: int, sharding: Sharding, waste_flops: float) -> PaddedValue:
        tensor = graph.values[value]
        held = local_bytes(tensor.shape, tensor.nbytes, sharding, mesh)
        even = tensor.nbytes // mesh.size(a for dim in sharding for a in dim)
        waste = held - even if stored[value] else 0
        return PaddedValue(name(value), tensor.shape, tensor.dtype, sharding, waste, waste_flops)

    found = []
    for value, sharding in made.items():
        tensor = graph.values[value]
        if not divides(tensor.shape, sharding, mesh):
            done, share = flops.get(tensor.op, (0.0, 0.0))
            found.append(padded(value, sharding, done - share))
    found += [
        padded(value, sharding, 0.0)
        for value, sharding in dict.fromkeys(copies)
        if not divides(graph.values[value].shape, sharding, mesh)
    ]
    held: dict[tuple[int, tuple[str, ...], int], _Held] = {}
    boundary = [
        (info.name, value, sharding)
        for values, infos, shardings in (
            (graph.arguments, graph.argument_info, arguments),
            (graph.results, graph.result_info, results),
        )
        for value, info, sharding in zip(values, infos, shardings, strict=True)
    ]
    ends = {*graph.arguments, *graph.results}
    inside = [(name(v), v, s) for v, s in made.items() if stored[v] and v not in ends]
    for label, value, sharding in boundary + inside:
        tensor = graph.values[value]
        nbytes = local_bytes(tensor.shape, tensor.nbytes, sharding, mesh)
        for key in _undivided(tensor.shape, sharding, mesh, value not in ends):
            entry = held.setdefault(key, _Held())
            entry.nbytes += nbytes
            entry.values[label] = max(nbytes, entry.values.get(label, 0))
    whole = [
        WholeDimension(
            size,
            axes,
            ways,
            -(-size // ways) * ways,
            entry.nbytes,
            tuple(sorted(entry.values, key=lambda v: -entry.values[v])),
        )
        for (size, axes, ways), entry in held.items()
    ]
    return Uneven(
        padded=tuple(sorted(found, key=lambda p: (-p.waste_bytes, -p.waste_flops))),
        whole=tuple(sorted(whole, key=lambda w: -w.nbytes)),
        loosened=graph.loosened,
    )


def _undivided(
    shape: tuple[int, ...], sharding: Sharding, mesh: MeshShape, may_pad: bool
) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Dimensions that axes without work in this value do not divide: size, axes, parts."""
    used = {a for dim in sharding for a in dim}
    idle = [a for a in splitting((mesh.names,), mesh)[0] if a not in used]
    for size, axes in zip(shape, sharding, strict=True):
        now = mesh.size(axes)
        wrong = tuple(a for a in idle if size % (now * mesh.size((a,))))
        ways = now * mesh.size(wrong)
        if (
            size > 1
            and wrong
            and 2 * size >= -(-size // ways) * ways
            and not (may_pad and pads(size, ways))
        ):
            yield size, wrong, ways
