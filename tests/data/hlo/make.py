"""Writes the compiled programs beside this file: ``python make.py cpu`` or ``python make.py tpu``.

Backend settings that nothing here reads (cost tables, memory scopes) are cut out of the texts; all
else is as the compiler printed it. ``cpu`` was run with jax 0.10.2, ``tpu`` with jax 0.10.2 and
libtpu 0.0.42.1, ahead of time for a v5e 2x4 slice.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Weights = tuple[jax.Array, jax.Array]

QUIET_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}


def mesh_of(target: str) -> Mesh:
    jax.config.update("jax_platforms", "cpu")
    if target == "tpu":
        os.environ.update(QUIET_TPU)
        chips: list[Any] = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
        devices = sorted(chips, key=lambda chip: chip.coords)
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        devices = jax.devices()
    return Mesh(np.array(devices).reshape(4, 2), ("data", "model"))


def array(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def scan(x: jax.Array, ws: jax.Array) -> jax.Array:
    last: jax.Array = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    return last


def nested(x: jax.Array, ws: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ w), x), None

    return lax.scan(body, x, ws)[0]


def scan_loss(ws: jax.Array, x: jax.Array) -> jax.Array:
    return (scan(x, ws) ** 2).mean()


def branches(p: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    out: jax.Array = lax.cond(p, lambda x: x @ w @ w, lambda x: x @ w, x)
    return out


def until_small(x: jax.Array, w: jax.Array) -> jax.Array:
    last: jax.Array = lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1, lambda x: x @ w * 0.1, x)
    return last


def collectives(x: jax.Array) -> jax.Array:
    x = lax.all_to_all(x, "data", 1, 1, tiled=True)
    y = lax.ppermute(x, "model", [(0, 1), (1, 0)])
    y = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    a, b = lax.psum((x * y, jnp.sum(x)), ("data", "model"))
    z = lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
    total: jax.Array = a + b + lax.all_gather(z, "data", axis=0, tiled=True)
    return total


def convolution(x: jax.Array, k: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    out: jax.Array = lax.conv_general_dilated(x, k, (2, 1), "SAME", dimension_numbers=numbers)
    return out


def convolution_loss(x: jax.Array, k: jax.Array) -> jax.Array:
    return (convolution(x, k) ** 2).sum()


def two_layers(x: jax.Array, ws: Weights) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, ws)[0]


def step(ws: Weights, x: jax.Array) -> Weights:
    grads = jax.grad(lambda ws: (two_layers(x, ws).astype(jnp.float32) ** 2).mean())(ws)
    return ws[0] - 0.1 * grads[0], ws[1] - 0.1 * grads[1]


def batched(x: jax.Array, w: jax.Array, y: jax.Array) -> Weights:
    return jnp.einsum("bsd,bdf->bsf", x, w), x.reshape(-1, 512) @ y


def programs(target: str, mesh: Mesh) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    def at(*spec: str | tuple[str, ...] | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    split = at(None, "data", "model")
    if target == "cpu":
        x, ws, w = array(64, 32), array(3, 32, 32), array(32, 32)
        images, kernel = array(8, 16, 16, 4), array(3, 3, 4, 8)
        yield "cpu_scan", jax.jit(scan, in_shardings=(at("data"), split)), (x, ws)
        yield (
            "cpu_nested_scan",
            jax.jit(nested, in_shardings=(at("data"), at(None, None, "model"))),
            (x, ws),
        )
        yield (
            "cpu_scan_grad",
            jax.jit(jax.grad(scan_loss), in_shardings=(split, at("data")), out_shardings=split),
            (ws, x),
        )
        yield (
            "cpu_cond",
            jax.jit(branches, in_shardings=(at(), at("data"), at(None, "model"))),
            (array(dtype=jnp.bool_), x, w),
        )
        yield (
            "cpu_while",
            jax.jit(until_small, in_shardings=(at("data"), at())),
            (x, w),
        )
        whole = P("data", "model")
        manual = jax.shard_map(collectives, mesh=mesh, in_specs=whole, out_specs=whole)
        yield "cpu_collectives", jax.jit(manual), (x,)
        yield (
            "cpu_convolution_grad",
            jax.jit(
                jax.grad(convolution_loss, argnums=(0, 1)),
                in_shardings=(at("data"), at()),
                out_shardings=(at("data"), at()),
            ),
            (images, kernel),
        )
    else:
        bf16 = partial(array, dtype=jnp.bfloat16)
        pair = (bf16(3, 512, 1024), bf16(3, 1024, 512))
        layout = (split, at(None, "model", "data"))
        yield (
            "tpu_step",
            jax.jit(
                step, in_shardings=(layout, at("data")), out_shardings=layout, donate_argnums=0
            ),
            (pair, bf16(2048, 512)),
        )
        yield (
            "tpu_batched_matmul",
            jax.jit(
                batched,
                in_shardings=(at("data"), at("data", None, "model"), at("model")),
                out_shardings=(at("data", None, "model"), at(("data", "model"))),
            ),
            (bf16(16, 128, 512), bf16(16, 512, 256), bf16(512, 1024)),
        )


def compact(text: str) -> str:
    lines = []
    for line in text.splitlines():
        head, settings, tail = line.partition(", backend_config={")
        keep = "known_trip_count" in tail or "fusion_config" in tail
        lines.append(head + settings + tail if keep else head)
    return re.sub(r'"[^"]*/make.py"', '"make.py"', "\n".join(lines) + "\n")


def main(target: str) -> None:
    for name, function, arguments in programs(target, mesh_of(target)):
        compiled = function.lower(*arguments).compile()
        Path(__file__).with_name(name + ".txt").write_text(compact(compiled.as_text()))
        flops = compiled.cost_analysis()["flops"]
        print(f"{name}: XLA counts {flops:.0f} FLOP, loop bodies once")


if __name__ == "__main__":
    main(sys.argv[1])
