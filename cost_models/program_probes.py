"""Small whole programs that a calibration times, to see how far they are from their parts.

A probe of one op runs it again and again on the same arrays, which are then in a cache; and nothing
else is going on. In a program every weight is read once, buffers change hands, and products,
elementwise work and collectives take turns. What that costs is a factor on the prices of ops, and
another on those of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cost_models.calibrated import CalibratedModel
from autoshard.cost_models.probes import Probe, line, program
from autoshard.cost_models.protocol import CollectiveKind, MeshAxis, Work

AXIS = "all"
"""The only axis of the mesh."""

LAYERS = 6
"""Layers of each program."""

_SIZES = ((32, 128, 0), (64, 256, 0), (32, 512, 1))
"""Rows of activations on a device, their width, stage."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a program does.

    Attributes:
        times: How often.
        matmul: Sizes (m, n, k) of a product; None if it is none.
        collective: Kind and bytes of a collective; None if it is none.
        op: Of elementwise work, its dearest op.
        elements: Of elementwise work, elements computed.
        nbytes: Of elementwise work, bytes read and written.
    """

    times: int
    matmul: tuple[int, int, int] | None = None
    collective: tuple[CollectiveKind, float] | None = None
    op: str = "stablehlo.add"
    elements: float = 0.0
    nbytes: float = 0.0

    def seconds(self, model: CalibratedModel) -> float:
        """What it costs by a model [s]."""
        if self.collective is not None:
            kind, nbytes = self.collective
            axes = (MeshAxis(AXIS, model.devices),)
            return self.times * float(model.collective_s(kind, np.array([nbytes]), axes)[0])
        if self.matmul is not None:
            m, n, k = self.matmul
            sizes = np.array([[1, m, n, k]], np.int64)
            moved = np.array([4.0 * (m * k + k * n + m * n)])
            work = Work("stablehlo.dot_general", "f32", np.array([2.0 * m * n * k]), moved, sizes)
        else:
            work = Work(self.op, "f32", np.array([self.elements]), np.array([self.nbytes]))
        return self.times * float(model.op_s(work)[0])


def _data_parallel(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Forward, backward, and the sum of the gradients over the devices."""
    seen, h = [], x
    for w in weights:
        seen.append(h)
        h = jnp.tanh(h @ w)
    g, total = h, jnp.zeros_like(weights[0])
    for w, h in zip(reversed(weights), reversed(seen), strict=True):
        g = g * (1 - h * h)
        total = total + jax.lax.psum(h.T @ g, AXIS)
        g = g @ w.T
    return total[: x.shape[0]] + g[:, : total.shape[1]]


def _split_layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Two products and a sum over the devices, again and again."""
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        x = jax.lax.psum(jnp.tanh(x @ w) @ v, AXIS)
    return x


def _gathered(x: jax.Array, *pieces: jax.Array) -> jax.Array:
    """Weights gathered before each layer."""
    for piece in pieces:
        x = jnp.tanh(x @ jax.lax.all_gather(piece, AXIS, tiled=True))
    return x


def program_probes(
    devices: Sequence[jax.Device],
) -> Iterator[tuple[Probe, tuple[Part, ...]]]:
    """Programs with their parts: data parallel, split layers, gathered weights, by size."""
    mesh, count = line(devices), len(devices)
    for m, width, stage in _SIZES:
        k = width // count * count  # pieces of weights are whole rows
        tanh = Part(LAYERS, op="stablehlo.tanh", elements=float(m * k), nbytes=8.0 * m * k)
        whole = [(m, k), *[(k, k)] * LAYERS]
        piece = [(m, k), *[(k // count, k)] * LAYERS]
        ways: Mapping[
            str, tuple[Callable[..., jax.Array], Sequence[tuple[int, ...]], tuple[Part, ...]]
        ] = {
            "data parallel": (
                _data_parallel,
                whole,
                (
                    Part(2 * LAYERS, matmul=(m, k, k)),
                    Part(LAYERS, matmul=(k, k, m)),
                    tanh,
                    Part(LAYERS, nbytes=12.0 * m * k),
                    Part(LAYERS, nbytes=12.0 * k * k),
                    Part(LAYERS, collective=("all_reduce", 4.0 * k * k)),
                ),
            ),
            "split layers": (
                _split_layers,
                whole,
                (
                    Part(LAYERS, matmul=(m, k, k)),
                    Part(LAYERS // 2, op=tanh.op, elements=tanh.elements, nbytes=tanh.nbytes),
                    Part(LAYERS // 2, collective=("all_reduce", 4.0 * m * k)),
                ),
            ),
            "gathered weights": (
                _gathered,
                piece,
                (
                    Part(LAYERS, matmul=(m, k, k)),
                    tanh,
                    Part(LAYERS, collective=("all_gather", 4.0 * k * k)),
                ),
            ),
        }
        for name, (body, shapes, parts) in ways.items():
            build: Callable[[], Any] = partial(program, mesh, body, shapes, np.float32)
            yield Probe(f"program/{name}/{m}x{k}", "program", "", {}, 1, build, stage), parts
