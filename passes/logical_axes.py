"""Shardings from rules on logical axes, as people who train large models write them.

The logical axes of an array name its dimensions (``embed``, ``mlp``); a rule says which mesh axes
split a logical axis. This is the manner of AI-Hypercomputer/maxtext,
``src/maxtext/configs/base.yml`` (logical axis rules).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.shardings import MeshShape, Sharding

Rules = Mapping[str, tuple[str, ...]]
"""From a logical axis to the mesh axes that split it, major to minor."""


def sharding_by_rules(
    shape: Sequence[int], axes: Sequence[str], rules: Rules, mesh: MeshShape
) -> Sharding:
    """The sharding that ``rules`` give one array.

    A mesh axis is used once in an array: the first rule to claim it wins (in order of the rules,
    as they rank their claims, not of the dimensions). A dimension takes the longest run of its mesh
    axes that divides it, so one that no axis divides stays whole.

    Examples:
        >>> mesh = MeshShape(("data", "model"), (4, 2))
        >>> sharding_by_rules((6, 8), ("kv_heads", "embed"),
        ...                   {"kv_heads": ("data", "model"), "embed": ("model",)}, mesh)
        ((), ('model',))
    """
    chosen: list[tuple[str, ...]] = [()] * len(shape)
    taken: set[str] = set()
    for name, wanted in rules.items():
        for dim in (d for d, axis in enumerate(axes) if axis == name):
            free = tuple(axis for axis in wanted if axis not in taken)
            while free and shape[dim] % mesh.size(free):
                free = free[:-1]
            chosen[dim] = free
            taken.update(free)
    return tuple(chosen)
