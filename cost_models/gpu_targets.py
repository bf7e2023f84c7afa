"""What XLA:GPU wants to know of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import InputError

_H100: Mapping[str, int | float] = {
    "core_count": 132,
    "fpus_per_core": 128,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "registers_per_block_limit": 65536,
    "registers_per_core_limit": 65536,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "memory_bandwidth": 3_352_320_000_000,
    "device_memory_size": 84_978_434_048,
}
"""Limits and speeds of one H100 SXM5, by XLA's field names; sizes in bytes, speeds in bytes/s.

Source: what the CUDA driver reports, as openxla/xla's tests quote it
(``xla/backends/gpu/autotuner``, "NVIDIA H100 80GB HBM3"); NVIDIA H100 architecture whitepaper.
"""

_KNOWN = {"H100": ((9, 0), "NVIDIA H100 80GB HBM3", _H100)}


def target_config(chip: str) -> str:
    """The text proto that describes a GPU to XLA's ahead-of-time compiler.

    Args:
        chip: Its name, e.g. ``H100``.

    Raises:
        InputError: Nobody has written one down for that GPU.
    """
    if chip not in _KNOWN:
        raise InputError(
            f"what XLA needs to know to compile for {chip} is not known here",
            fix=f"plan without compiling; known: {', '.join(_KNOWN)}",
        )
    (major, minor), name, figures = _KNOWN[chip]
    device = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    return (
        f"gpu_device_info {{\n{device}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{name}"\n'
    )
