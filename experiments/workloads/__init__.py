"""Programs to shard, each from a tiny size for tests to published ones that are only planned."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.experiments.workloads.workload import TOLERANCE, Workload
from autoshard.table import Table

__all__ = ["TOLERANCE", "WORKLOADS", "Workload", "make"]

WORKLOADS: Table[Callable[..., Workload]] = Table(
    "workload",
    {
        "mlp": "autoshard.experiments.workloads.mlp:mlp",
        "llama": "autoshard.experiments.workloads.llama:llama",
        "llama_unrolled": "autoshard.experiments.workloads.llama:llama_unrolled",
        "moe": "autoshard.experiments.workloads.moe:moe",
        "moe_ragged": "autoshard.experiments.workloads.moe_ragged:moe_ragged",
        "llama_prefill": "autoshard.experiments.workloads.llama_prefill:llama_prefill",
        "llama_decode": "autoshard.experiments.workloads.llama_decode:llama_decode",
        "resnet": "autoshard.experiments.workloads.resnet:resnet",
        "conformer": "autoshard.experiments.workloads.conformer:conformer",
        "diffusion_transformer": (
            "autoshard.experiments.workloads.diffusion_transformer:diffusion_transformer"
        ),
        "flax_transformer": "autoshard.experiments.workloads.flax_transformer:flax_transformer",
        "equinox_mixer": "autoshard.experiments.workloads.equinox_mixer:equinox_mixer",
        "haiku_lstm": "autoshard.experiments.workloads.haiku_lstm:haiku_lstm",
        "dlrm": "autoshard.experiments.workloads.dlrm:dlrm",
    },
)
"""From a name to ``(size="tiny", **overrides) -> Workload``."""


def make(name: str, size: str = "tiny", **overrides: object) -> Workload:
    """A workload by name.

    Args:
        name: A row of :data:`WORKLOADS`.
        size: One of the workload's sizes; ``tiny`` and ``small`` exist for all.
        **overrides: Fields of the workload's configuration to change, e.g. ``layers=1``.

    Returns:
        The workload; no array is made.

    Raises:
        UnknownNameError: There is no such workload, size or field.
        InputError: The configuration is contradictory, or a package is missing.
    """
    return WORKLOADS[name](size, **overrides)
