"""Hand-made shardings, as people who train large models write them: rules on logical axes.

A rule says which mesh axes split a logical axis (``{"batch": ("data",), "mlp": ("model",)}``). The
rules of an expert and the logical axes of a workload's arrays give a ``PartitionSpec`` for every
argument, to be used as pins: the activations in between are left to the compiler.

Roles of the mesh axes: axes of size 1 have none; of the others the last one is the *model* axis and
those before it are the *data* axes. A mesh with one such axis uses it in both roles.

Sources of the rules: AI-Hypercomputer/maxtext ``src/maxtext/configs/base.yml`` (logical axis
rules), jax-ml/scaling-book ``training.md`` and ``inference.md``; ZeRO-3 is arXiv:1910.02054,
Megatron's tensor parallelism arXiv:1909.08053; for embedding tables the sharding types of
meta-pytorch/torchrec and AI-Hypercomputer/RecML (large tables by rows, small ones replicated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.experiments.arrays import ArraySpec, PyTree
from autoshard.passes.logical_axes import Rules, sharding_by_rules
from autoshard.shardings import MeshShape, Sharding, to_partition_spec


@dataclass(frozen=True, slots=True)
class Roles:
    """What the axes of a mesh are used for.

    Attributes:
        every: All axes with more than one device.
        data: Those in front of the last.
        model: The last.
    """

    every: tuple[str, ...]
    data: tuple[str, ...]
    model: tuple[str, ...]


def roles(mesh: MeshShape) -> Roles:
    """The roles of the axes of ``mesh``.

    Examples:
        >>> roles(MeshShape(("x", "y", "z"), (2, 2, 2)))
        Roles(every=('x', 'y', 'z'), data=('x', 'y'), model=('z',))
        >>> roles(MeshShape(("x", "y", "z"), (2, 4, 1)))
        Roles(every=('x', 'y'), data=('x',), model=('y',))
        >>> roles(MeshShape(("x",), (8,)))
        Roles(every=('x',), data=('x',), model=('x',))
    """
    used = tuple(n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1)
    return Roles(every=used, data=used[:-1] or used, model=used[-1:])


def data_parallel(axes: Roles) -> Rules:
    """Every device holds all weights and a share of the batch."""
    return {"batch": axes.every}


def fsdp(axes: Roles) -> Rules:
    """ZeRO-3: batch, weights and optimizer state are all split over all devices."""
    return {"batch": axes.every, "embed": axes.every}


def tensor_parallel(axes: Roles) -> Rules:
    """Megatron: heads, hidden units and vocabulary over the model axis, batch over the others."""
    batch = () if axes.data == axes.model else axes.data
    return {"batch": batch, **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), axes.model)}


def fsdp_tensor_parallel(axes: Roles) -> Rules:
    """Tensor parallel over the model axis, FSDP over the others; on one axis it is FSDP."""
    model = () if axes.data == axes.model else axes.model
    split = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), model)
    return {"batch": axes.data, "embed": axes.data, **split}


def expert_parallel(axes: Roles) -> Rules:
    """As ``2d``, with whole experts over the model axis instead of a part of each.

    On one axis the batch and the other weights are split over it as well, as in FSDP.
    """
    return {"experts": axes.model, **fsdp_tensor_parallel(axes)}


def decode_tensor_parallel(axes: Roles) -> Rules:
    """Stationary weights split over all devices; the cache by heads, then by sequences.

    Weights never move, so a step reads each of them once over the whole mesh
    (jax-ml/scaling-book, ``inference.md``).
    """
    split = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), axes.every)
    return {**split, "cache_batch": axes.every}


def decode_2d(axes: Roles) -> Rules:
    """Sequences over the data axes, heads and hidden units over the model axis."""
    return {**tensor_parallel(axes), "cache_batch": tensor_parallel(axes)["batch"]}


def decode_data_parallel(axes: Roles) -> Rules:
    """Every device serves its own sequences with all weights."""
    return {"batch": axes.every, "cache_batch": axes.every}


def context_parallel(axes: Roles) -> Rules:
    """Positions of the prompts over the model axis, prompts over the data axes."""
    batch = () if axes.data == axes.model else axes.data
    return {"batch": batch, "cache_batch": batch, "seq": axes.model}


def table_wise(axes: Roles) -> Rules:
    """Whole tables on one device each, a share of the batch on every device."""
    return {"batch": axes.every, "tables": axes.every}


def row_wise(axes: Roles) -> Rules:
    """Every large table's rows over all devices, a share of the batch on every device."""
    return {"batch": axes.every, "rows": axes.every}


def column_wise(axes: Roles) -> Rules:
    """Every large table's columns over all devices, a share of the batch on every device."""
    return {"batch": axes.every, "embed": axes.every}


def table_row_wise(axes: Roles) -> Rules:
    """Tables over the data axes, each one's rows over the model axis."""
    tables = () if axes.data == axes.model else axes.data
    return {"batch": axes.every, "tables": tables, "rows": axes.model}


TRAIN_RULES: Mapping[str, Callable[[Roles], Rules]] = {
    "dp": data_parallel,
    "fsdp": fsdp,
    "tp": tensor_parallel,
    "2d": fsdp_tensor_parallel,
}
"""The experts of a train step."""

MOE_RULES: Mapping[str, Callable[[Roles], Rules]] = {**TRAIN_RULES, "ep": expert_parallel}
"""The experts of a train step of a mixture of experts."""

DECODE_RULES: Mapping[str, Callable[[Roles], Rules]] = {
    "dp": decode_data_parallel,
    "tp": decode_tensor_parallel,
    "2d": decode_2d,
}
"""The experts of a decoding step."""

PREFILL_RULES: Mapping[str, Callable[[Roles], Rules]] = {**DECODE_RULES, "cp": context_parallel}
"""The experts of a prefill."""

DLRM_RULES: Mapping[str, Callable[[Roles], Rules]] = {
    "dp": data_parallel,
    "table": table_wise,
    "row": row_wise,
    "column": column_wise,
    "table_row": table_row_wise,
}
"""The experts of a recommendation model: the ways of TorchRec to split embedding tables."""


def sharding_of(spec: ArraySpec, rules: Rules, mesh: MeshShape) -> Sharding:
    """The sharding that ``rules`` give one array.

    See :func:`autoshard.passes.logical_axes.sharding_by_rules`.
    """
    return sharding_by_rules(spec.shape, spec.axes, rules, mesh)


def mesh_shape(mesh: Mesh | AbstractMesh | MeshShape) -> MeshShape:
    """Names and sizes of the axes of any kind of mesh."""
    if isinstance(mesh, MeshShape):
        return mesh
    return MeshShape(tuple(map(str, mesh.axis_names)), tuple(mesh.shape.values()))


@dataclass(frozen=True, slots=True)
class Expert:
    """A hand-made plan of one workload.

    Attributes:
        name: As in the tables above, e.g. ``fsdp``.
        description: What it does, in one sentence.
        rules: From the roles of a mesh's axes to the rules on logical axes.
        arguments: The workload's arguments as a tuple of trees of :class:`ArraySpec`.
        results: The workload's result as such a tree.
    """

    name: str
    description: str
    rules: Callable[[Roles], Rules]
    arguments: tuple[PyTree, ...]
    results: PyTree

    def in_shardings(self, mesh: Mesh | AbstractMesh | MeshShape) -> tuple[PyTree, ...]:
        """A ``PartitionSpec`` for every leaf of the arguments, in trees of their structure."""
        specs: tuple[PyTree, ...] = self._partition_specs(self.arguments, mesh_shape(mesh))
        return specs

    def out_shardings(self, mesh: Mesh | AbstractMesh | MeshShape) -> PyTree:
        """The same for the result; what replaces a donated argument is split as that argument."""
        return self._partition_specs(self.results, mesh_shape(mesh))

    def _partition_specs(self, specs: PyTree, mesh: MeshShape) -> PyTree:
        rules = self.rules(roles(mesh))

        def one(spec: ArraySpec) -> PartitionSpec:
            return to_partition_spec(sharding_of(spec, rules, mesh))

        return jax.tree.map(one, specs)


def experts_of(
    rules: Mapping[str, Callable[[Roles], Rules]], arguments: tuple[PyTree, ...], results: PyTree
) -> Mapping[str, Expert]:
    """One :class:`Expert` for each row of ``rules``."""
    return {
        name: Expert(name, (rule.__doc__ or "").partition("\n")[0], rule, arguments, results)
        for name, rule in rules.items()
    }
