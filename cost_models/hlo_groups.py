"""Which devices a collective joins: the group notations of compiled HLO as tuples of device ids."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]
"""Device ids of each group, in the order in which the collective numbers its members."""

_LIST = re.compile(r"\{([\d,]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? ?\{(.*)\}")
_TRANSPOSED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


@lru_cache(maxsize=4096)
def replica_groups(text: str, devices: int) -> Groups:
    """The groups that a ``replica_groups`` attribute names.

    Args:
        text: A list ``{{0,1},{2,3}}``, a tile of an iota ``[4,2]<=[2,4]T(1,0)``, or axes of a mesh
            ``mesh['a'=4,'b'=2] {'a'}``, whose devices may be permuted
            (``mesh[...], device_ids=([4,2]T(1,0)) {...}``) and whose axes may be cut
            (``'a':(2)2``: size 2, after a major part of 2).
        devices: Devices of the module; ``{}`` means one group of all of them.

    Returns:
        One tuple per group.
    """
    if mesh := _MESH.match(text):
        return _tuples(_mesh_groups(mesh[1], mesh[2], mesh[3]))
    if iota := _IOTA.match(text):
        tile = _ints(iota[1])
        dims = _ints(iota[2]) if iota[2] else (int(np.prod(tile)),)
        return _tuples(_iota(dims, iota[3]).reshape(tile))
    groups = tuple(_ints(group) for group in _LIST.findall(text))
    return groups or (tuple(range(devices)),)


@lru_cache(maxsize=4096)
def permute_groups(text: str) -> Groups:
    """The devices that a permute's ``source_target_pairs`` connect, e.g. each ring of a shift.

    Args:
        text: ``{{0,1},{1,0}}``.

    Returns:
        One sorted tuple per connected set of devices.
    """
    neighbours: dict[int, list[int]] = {}
    for pair in _LIST.findall(text):
        source, target = _ints(pair)
        neighbours.setdefault(source, []).append(target)
        neighbours.setdefault(target, []).append(source)
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start in sorted(neighbours):
        if start in seen:
            continue
        group, frontier = {start}, [start]
        while frontier:
            new = [n for n in neighbours[frontier.pop()] if n not in group]
            group.update(new)
            frontier.extend(new)
        seen |= group
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def _mesh_groups(axes: str, order: str | None, chosen: str) -> NDArray[np.int64]:
    """Groups over the ``chosen`` axes or parts of axes, ``[groups, members]``."""
    names = re.findall(r"'([^']+)'=(\d+)", axes)
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    dims: list[int] = []  # the mesh, with every cut axis as several dimensions
    members: dict[int, int] = {}  # position among the chosen -> dimension
    for name, size_text in names:
        size, before = int(size_text), 1
        cuts = sorted(
            (int(major or 1), int(part or size), position)
            for position, (axis, major, part) in enumerate(parts)
            if axis == name
        )
        for major, part, position in cuts:
            dims.append(major // before)
            members[position] = len(dims)
            dims.append(part)
            before = major * part
        dims.append(size // before)
    count = int(np.prod(dims))
    if order is None:
        ids = np.arange(count)
    elif tile := _TRANSPOSED.match(order):
        ids = _iota(_ints(tile[1]), tile[2])
    else:
        ids = np.array(_ints(order))
    inner = [members[position] for position in sorted(members)]
    outer = [d for d in range(len(dims)) if d not in inner]
    width = int(np.prod([dims[d] for d in inner], dtype=np.int64))
    return ids.reshape(dims).transpose(outer + inner).reshape(-1, width)


def _iota(dims: tuple[int, ...], permutation: str | None) -> NDArray[np.int64]:
    """0, 1, 2, … laid out as ``dims``, transposed, and flattened."""
    ids = np.arange(int(np.prod(dims))).reshape(dims)
    return (ids.transpose(_ints(permutation)) if permutation else ids).ravel()


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _tuples(groups: NDArray[np.int64]) -> Groups:
    return tuple(tuple(group) for group in groups.reshape(-1, groups.shape[-1]).tolist())
