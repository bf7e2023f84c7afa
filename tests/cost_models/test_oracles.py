"""Every worked example of the scaling book and of jax.experimental.roofline, by our functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticModel
from autoshard.cost_models.chips import Chip, Figure
from autoshard.cost_models.collectives import (
    SwitchLevel,
    TorusAxis,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    permute_s,
    reduce_scatter_s,
    switched_s,
)
from autoshard.cost_models.protocol import Work
from autoshard.cost_models.serving import (
    cache_bytes,
    chips_to_hold,
    prefill_servers,
    sequences_that_fit,
    serving_bytes,
    tokens_evicted_per_step,
    tokens_per_s_per_chip,
)
from autoshard.cost_models.topology import Topology
from autoshard.cost_models.training.accuracy import shipped_points
from autoshard.cost_models.training.work import (
    MOMENTS_BYTES,
    WEIGHT_BYTES,
    Product,
    parameters,
    residual_bytes,
)
from autoshard.shardings import MeshShape, local_bytes

FILE = Path(__file__).parents[1] / "data" / "cost_oracles.json"
ENTRIES = {e["id"]: e for e in json.loads(FILE.read_text("utf-8"))["entries"]}

# One number per example that our functions give where the source gives `exact`.
Sum = Callable[..., float]


def ideal(
    flops_per_s: float = 1e30, bytes_per_s: float = 1e30, share: float = 1.0
) -> AnalyticModel:
    """A device of the given rates that starts ops in no time and pads nothing."""
    figures = {
        "peak_bf16": Figure(flops_per_s, ("an example",)),
        "hbm_bw": Figure(bytes_per_s, ("an example",)),
        "hbm_bytes": Figure(1.0, ("an example",)),
        "jax_devices_per_chip": Figure(1, ("an example",)),
    }
    chip = Chip("ideal", "gpu", MappingProxyType(figures))
    return AnalyticModel(
        chip, matmul_efficiency=share, hbm_efficiency=1.0, op_fixed_s=0.0, collective_fixed_s=0.0
    )


def matmul(flops: float = 0.0, nbytes: float = 0.0) -> Work:
    dims = np.ones((1, 4), dtype=np.int64)
    return Work("stablehlo.dot_general", "bf16", np.array([flops]), np.array([nbytes]), dims)


def compute(flops: float, flops_per_s: float, share: float = 1.0) -> float:
    return float(ideal(flops_per_s, share=share).op_s(matmul(flops=flops))[0])


def read(nbytes: float, bytes_per_s: float) -> float:
    return float(ideal(bytes_per_s=bytes_per_s).op_s(matmul(nbytes=nbytes))[0])


def roofline(flops: float, nbytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    return float(ideal(flops_per_s, bytes_per_s).op_s(matmul(flops, nbytes))[0])


def ring(size: int, both_ways_bytes_per_s: float = 1.0) -> tuple[TorusAxis, ...]:
    return (TorusAxis(size, both_ways_bytes_per_s / 2),)


def decode(B: float, kv: float, P: float, n: float, H: float, C: float) -> float:
    return read(B * kv / n, H) + roofline(2 * B * P / n, 2 * P / n, C, H)


def train(tokens_flops: float, n: float, C: float, m: float = 1.0) -> float:
    return compute(tokens_flops / n, C, m)


def one_way(kind: Callable[..., Any], nbytes: float, size: int) -> float:
    return float(kind(nbytes, (TorusAxis(size, 1.0, one_way=True),)))


def product_flops(m: float, k: float, n: float) -> float:
    return Product(m, k, n, 1, 0, "dense").forward_flops


def critical_tokens(C: float, w: float) -> float:
    """Tokens of a device from which computing takes as long as one sum over a wide switch."""
    return float(switched_s("permute", 2.0, (SwitchLevel(8, w),))) / compute(2.0, C)


def fsdp_ways(B: float, F: float, N: float, r: float) -> float:
    """Ways of FSDP among N chips at which gathers of weights and of activations are alike."""
    weights = float(all_gather_s(4 * F / N, ring(4) * round(r)))
    return math.sqrt(float(all_gather_s(4 * B, ring(4))) / weights)


def least_batch(a: float, F: float, m: float) -> float:
    """Tokens per chip from which FSDP and tensor parallelism at their best are hidden."""
    weights, inputs = (float(all_gather_s(4 * n, ring(4) * axes)) for n, axes in ((F, 2), (1, 1)))
    return float((2 * math.sqrt(weights * inputs * 2 / m) / compute(4 * F, a)) ** 2)


def chips_for(B: float, b: float) -> float:
    """Chips over which a batch is spread when gathers over three axes take as long as computing."""
    return compute(4 * B, 3 * b) / float(all_gather_s(4.0, ring(4) * 3))


def one_layer(D: int, F: int) -> float:
    """Parameters of a gated layer with as many heads as its width, without a vocabulary."""
    (llama,) = (r for r in shipped_points() if r.name == "iw-llama31-70b-64-bf16")
    small = replace(llama, layers=1, dense_layers=1, d_model=D, d_ff=F, heads=D // 128)
    return parameters(replace(small, kv_heads=D // 128, vocab=0))[0]


def llama(D: int, F: int, L: int, N: int, K: int, H: int, V: int) -> float:
    (known,) = (r for r in shipped_points() if r.name == "iw-llama31-70b-64-bf16")
    read = (known.d_model, known.d_ff, known.layers, known.heads, known.kv_heads, known.head_dim)
    assert (*read, known.vocab) == (D, F, L, N, K, H, V)
    return parameters(known)[0]


def chips(topology: str, expected: float) -> int:
    """Chips of a topology, which the example has too."""
    assert Topology(topology).chips == expected
    return Topology(topology).chips


def copies(Y: int, Z: int) -> float:
    """Bytes on all devices over those of the array, split along X alone."""
    mesh = MeshShape(("X", "Y", "Z"), (4, Y, Z))
    return mesh.devices * local_bytes((64,), 64, (("X",),), mesh) / 64


def hosts(n: float, per: float) -> float:
    slice = Topology(POD)
    assert (slice.chips, slice.chips_per_host) == (n, per)
    return slice.hosts


POD = "v5p:16x20x28"

# GPUs of a node, nodes of a unit, units.
DGX = (SwitchLevel(8, 450e9), SwitchLevel(32, 400e9, 8), SwitchLevel(4, 12.8e12, 256))

EXAMPLES: dict[str, Sum] = {
    # Rooflines.
    "R01": lambda flops, C: compute(flops, C),
    "R02": lambda flops, C: compute(flops, C),
    "R03": lambda C, H: read(2.0, H) / compute(2.0, C),
    "R05": lambda Ci8, H: read(1.0, H) / compute(2.0, Ci8),
    "T01": lambda P, by, n, H: read(P * by / n, H),
    "T13": lambda by, H: read(by, H),
    "T14": lambda B, D, F, C: compute(2.0 * B * D * F, C),
    "P07": lambda F, n, C, m: train(F, n, C, m) / 86400,
    "L03": lambda f, C: compute(f, C),
    "L05": lambda f, n, C, m: train(f, n, C, m),
    "L15": lambda P, T, n, C, m: train(6 * P * T, n, C, m),
    "X09": lambda h, C, P, T: train(6 * P * T, h, C) / 3600,
    "I01": lambda B, kv, P, n, H: read((B * kv + P) / n, H),
    "I09": lambda P, n, H: read(2 * P / n, H),
    "A05": lambda m, n, H: read(m / n, H),
    "A07": lambda h, H: read(h, H),
    "A14": lambda P, T, n, C, m: train(2 * P * T, n, C, m),
    "G04": lambda B, D, F, H: read(2 * (B * D + D * F + B * F), H),
    "G05": lambda B, D, F, C: compute(2.0 * B * D * F, C),
    "G06": lambda N, H: read(12 * N, H),
    "G07": lambda N, H: read(12 * N, H),
    "G15": lambda P, T, n, C, m: train(6 * P * T, n, C, m) / 86400,
    **{key: decode for key in ENTRIES if key.startswith(("I04_", "I05_"))},
    "T06": lambda C, pcie: read(2.0, pcie) / compute(2.0, C),
    "L02": lambda P: 3 * product_flops(1, P, 1),
    "L10": lambda d, n, k: compute(d * n, k),
    "X10": lambda B, D, F, X, Y: product_flops(B / X, D / Y, F),
    "X05": lambda D: product_flops(1, D, 4 * D) / product_flops(1, D, 2),
    # Slices, and what is laid onto them.
    "T03": lambda n, C: chips("v5e:16x16", n) * C,
    "T04": hosts,
    "P04": lambda b, n: b * chips(POD, n),
    "P17": lambda b, n: b * chips("v5p:16x16x16", n),
    "P18": lambda n, h: chips("v5p:16x16x16", n) * h,
    "L11": lambda m, n: m / chips(POD, n),
    "L12": lambda n: 4 * 1024 * 1024 / chips(POD, n),
    "S03": copies,
    # Parameters and memory.
    "L01": lambda **sizes: llama(**sizes),
    "L07": lambda P: MOMENTS_BYTES * P,
    "L08": lambda D, T, c, L: c * residual_bytes(T, D, L),
    "L09": chips_to_hold,
    "X03": lambda D, F: one_layer(D, 0) / one_layer(D, F),
    "X07": lambda BT, L, D: 20 * residual_bytes(BT, D, L),
    "X08": lambda BT, L, D: residual_bytes(BT, D, L),
    "P01": lambda h: h / (WEIGHT_BYTES + MOMENTS_BYTES),
    "G16": lambda P, h: chips_to_hold((WEIGHT_BYTES + MOMENTS_BYTES) * P, h),
    "X01": lambda S, L, KH: cache_bytes(S, layers=L, kv_heads=1, head_dim=KH, element_bytes=1),
    "X04": lambda L, NH: cache_bytes(1, layers=L, kv_heads=1, head_dim=NH, element_bytes=1),
    "I03": lambda T, K, H, L: cache_bytes(T, layers=L, kv_heads=K, head_dim=H),
    "A02": lambda kv, S: serving_bytes(0, kv, S),
    "A03": lambda P, kv, h: chips_to_hold(serving_bytes(P, kv, 1), h),
    "A04": lambda kv, S, B, P: serving_bytes(P, kv, S * B),
    "A06": lambda B, t, n: tokens_per_s_per_chip(B, t, n),
    "A08": lambda free, kv, S: sequences_that_fit(free, kv, S),
    "A15": lambda B, P, Gn: tokens_evicted_per_step(B, P, Gn),
    "A16": lambda tp, B, tg, s: prefill_servers(tp, B, tg, s),
    # Collectives on a torus.
    "T09": lambda by, w, ports: float(
        permute_s(by / ports, (TorusAxis(4, w, wrapped=False),), shift=3)
    ),
    "T12": lambda by, w, links: float(permute_s(by / links, (TorusAxis(4, w, wrapped=False),))),
    "P05": chips_for,
    "P06": chips_for,
    "P10": fsdp_ways,
    "L14": lambda B, N, F: fsdp_ways(B, F, N, 2),
    "P11": least_batch,
    "P12": least_batch,
    "L13": lambda a, F: least_batch(a, F, 2),
    "S04": lambda V, W: float(all_gather_s(V, ring(4, W))),
    "S05": lambda V, N, w: float(all_gather_s(V, (TorusAxis(N, w, wrapped=False),))),
    "S07": lambda by, w: float(permute_s(by, (TorusAxis(4, w, wrapped=False),))),
    "S08": lambda B, D, Y, W: float(all_gather_s(2 * B * D / Y, ring(4, W))),
    "S09": lambda B, D, W, axes: float(all_gather_s(2 * B * D, ring(4, W) * axes)),
    "S10": lambda B, D, X, Y, W: float(all_reduce_s(2 * B * D / (X * Y), ring(4, W))),
    "S11": lambda B, D, X, Y, W: float(all_gather_s(2 * B * D / (X * Y), ring(4, W))),
    "S12": lambda N, lat: float(all_gather_s(256, (TorusAxis(N, 4.5e10, hop_s=lat),))),
    "S13": lambda w, lat: lat / float(permute_s(1.0, (TorusAxis(4, w),))),
    "S14": lambda w, lat, n: (
        float(all_gather_s(0.0, (TorusAxis(n, w, hop_s=lat, one_way=True),)))
        / float(all_gather_s(1.0, (TorusAxis(n, w, one_way=True),)))
    ),
    # The array has 8 times the bytes that one device exchanges.
    "S15": lambda: float(all_to_all_s(1.0, ring(8))) / float(all_gather_s(8.0, ring(8))),
    "S17": lambda N, D: one_way(all_gather_s, N * N, D),
    "S18": lambda N, D: one_way(all_to_all_s, N * N / D, D),
    "S20": lambda M, K: float(all_gather_s(M, ring(4))) / float(reduce_scatter_s(K, ring(4))),
    "J01": lambda V, A: float(reduce_scatter_s(V, ring(A), split=True)),
    "J02": lambda V, A: float(all_reduce_s(V, ring(A), split=True)),
    "J03": lambda V, N, n: float(all_reduce_s(V, ring(round(N ** (1 / n))) * n, split=True)),
    "J04": lambda V: float(all_to_all_s(V / 4, ring(4))),
    "J05": lambda V, Amax, N: float(all_to_all_s(V / N, ring(Amax) * 2)),
    "J06": lambda S: float(permute_s(S, (TorusAxis(4, 1.0),), shift=2)),
    "M02": lambda V, W: float(reduce_scatter_s(V, ring(2, W))),
    # Where arithmetic and communication take equally long: per unit of D, F or tokens.
    "R04": lambda C, w: float(permute_s(2.0, (TorusAxis(2, w, wrapped=False),))) / compute(1.0, C),
    "S19": lambda alpha: float(all_reduce_s(2.0, ring(4))) / compute(2.0, alpha),
    "P02": lambda C, W: float(all_gather_s(2.0, ring(4, W))) / compute(2.0, C),
    "P08": lambda Y, a: Y * float(all_gather_s(2.0, ring(Y))) / compute(2.0, a),
    "P09": lambda F, a: compute(2.0 * F, a) / float(all_gather_s(2.0, ring(16))),
    "A10": lambda F, ax, a: compute(2.0 * F, a) / float(all_gather_s(2.0, ring(4) * ax)),
    # Switched networks.
    "G03": lambda n, w: n / float(switched_s("permute", 1.0, (SwitchLevel(n, w),))),
    "G08": critical_tokens,
    "G12": critical_tokens,
    "G18": critical_tokens,
    "G10": lambda E, k, a: (
        float(switched_s("permute", 2.0 * E, (SwitchLevel(8, 1.0),))) / compute(2.0 * k, a)
    ),
    "G02": lambda V, N, w: float(switched_s("all_gather", V, (SwitchLevel(N, w),))),
    "G11": lambda a, X: (
        float(switched_s("all_gather", 2.0, (SwitchLevel(X, 1.0),))) / compute(2.0, a)
    ),
    "G13": lambda: 1 / float(switched_s("all_gather", 1.0, DGX)),
    "G14": lambda: 1 / float(switched_s("all_gather", 1.0, (DGX[0], SwitchLevel(2, 400e9, 8)))),
    "G17": lambda B, N, w: float(switched_s("all_to_all", B / N, (SwitchLevel(N, w),))),
}


@pytest.mark.parametrize("key", sorted(ENTRIES))
def test_our_functions_give_the_exact_answer_of_the_worked_example(key: str) -> None:
    entry = ENTRIES[key]
    ours = EXAMPLES[key](**entry["inputs"])
    assert ours == pytest.approx(entry["exact"], rel=1e-9)
    # And so agree with the printed figure to the digits that were printed.
    assert ours == pytest.approx(entry["expected"], rel=max(entry["tolerance"], 1e-9))


def test_every_example_here_has_an_entry() -> None:
    assert set(EXAMPLES) == set(ENTRIES)
