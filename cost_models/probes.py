"""The small programs that a calibration times: one op repeated, on all devices at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cost_models.protocol import CollectiveKind


@dataclass(frozen=True)
class Probe:
    """A program to be timed.

    Attributes:
        name: What runs, e.g. ``all_reduce/4/strided/65536``.
        family: ``dispatch``, ``matmul``, ``elementwise`` or a kind of collective.
        key: Within the family: the element type, or the group size.
        work: What one op does: FLOP, bytes, elements.
        repeats: Ops in one run.
        build: Makes the jitted program and its arguments.
        stage: 0: needed by every calibration; higher: wanted, in this order, if time allows.
        copied_bytes: Memory traffic of one op that is not the collective's own.
    """

    name: str
    family: str
    key: str
    work: Mapping[str, float]
    repeats: int
    build: Callable[[], tuple[Callable[..., Any], tuple[jax.Array, ...]]]
    stage: int
    copied_bytes: float = 0.0


def program(
    mesh: Mesh, body: Callable[..., jax.Array], shapes: Sequence[tuple[int, ...]], dtype: Any
) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """``body`` on every device of ``mesh``; ``shapes`` are those of one device's arguments."""
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    devices = mesh.devices.size
    arguments = tuple(
        jax.device_put(np.full((devices * s[0], *s[1:]), 0.5, dtype), sharding) for s in shapes
    )
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False
    )
    return jax.jit(run), arguments


def line(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of one axis, ``all``."""
    return Mesh(np.asarray(devices), ("all",))


def _increment(x: jax.Array) -> jax.Array:
    return x + 1


def dispatch_probe(devices: Sequence[jax.Device]) -> Probe:
    """A program that does next to nothing."""
    return Probe(
        name="dispatch",
        family="dispatch",
        key="",
        work={},
        repeats=1,
        build=partial(program, line(devices), _increment, [(8,)], np.float32),
        stage=0,
    )


_DTYPES = (("f32", jnp.float32, 0), ("bf16", jnp.bfloat16, 1))
"""Element type, its JAX name, and how many stages later it is measured."""

# A program should end within a few milliseconds: a longer one is more likely to be interrupted, and
# then for long, where other programs want the cores too.
_MATMULS = (
    # batch, m, n, k, matmuls in a program, stage
    (1, 64, 64, 64, 32, 0),
    (1, 256, 256, 256, 2, 0),
    (1, 256, 512, 512, 1, 1),
    (1, 32, 512, 512, 4, 0),
    (1, 256, 1024, 64, 2, 1),
    (1, 1024, 256, 256, 1, 1),
    (16, 64, 64, 64, 4, 1),
    (1, 128, 128, 128, 16, 2),
    (1, 16, 256, 256, 16, 2),
)


def _matmuls(repeats: int, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    for i in range(repeats):
        x = jnp.matmul(x, v if i % 2 else w)
    return x


def matmul_probes(devices: Sequence[jax.Device]) -> Iterator[Probe]:
    """Chains of matmuls ``((x @ w) @ v) @ w`` of several shapes, in f32 and bf16."""
    for key, dtype, later in _DTYPES:
        size = jnp.dtype(dtype).itemsize
        for batch, m, n, k, repeats, stage in _MATMULS:
            shapes = [(batch, m, k), (batch, k, n), (batch, n, k)]
            yield Probe(
                name=f"matmul/{key}/{batch}x{m}x{n}x{k}",
                family="matmul",
                key=key,
                work={
                    "flops": 2.0 * batch * m * n * k,
                    "bytes": float(size * batch * (m * k + k * n + m * n)),
                },
                repeats=repeats,
                build=partial(program, line(devices), partial(_matmuls, repeats), shapes, dtype),
                stage=stage + later,
            )


_ELEMENTS = ((1024, 1024, 0), (65536, 16, 0), (262144, 4, 1), (1048576, 2, 2))
"""Elements per device, ops in a program, stage."""


def _products(repeats: int, x: jax.Array, w: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, c: c * w + w, x)
    return result


def _tanhs(repeats: int, x: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, c: jnp.tanh(c), x)
    return result


def _powers(repeats: int, x: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, c: c**1.25, x)
    return result


def _transposes(repeats: int, x: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, c: c.T, x)
    return result


_SLOW_ELEMENTS = ((4096, 8, 1), (65536, 1, 2), (589824, 1, 2))


_CONVOLUTIONS = (
    # images, side, features in and out, ops in a program, stage
    (2, 8, 32, 32, 4, 1),
    (4, 16, 32, 32, 1, 1),
    (4, 16, 64, 64, 1, 2),
)
_DEPTHWISE = ((2, 64, 32, 7, 2, 1), (2, 128, 64, 15, 1, 1))
"""Images, positions, channels and taps; ops in a program, stage."""
_POOLED = ((2, 16, 16, 2, 1), (4, 32, 32, 1, 2))
"""Images, side, channels; ops in a program, stage."""


def _convolved(repeats: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x`` [N, W, C] or [N, H, W, C] convolved over and over; one feature a group if 3-D."""
    space = "HW"[4 - x.ndim :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    groups = 1 if x.ndim == 4 else x.shape[-1]
    for _ in range(repeats):
        x = jax.lax.conv_general_dilated(
            x,
            kernel,
            (1,) * len(space),
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
    return x


def _pool(x: jax.Array) -> jax.Array:
    least = np.array(-np.inf, x.dtype)
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    pooled: jax.Array = jax.lax.reduce_window(
        x, least, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), padding
    )
    return pooled


def _pools(repeats: int, x: jax.Array) -> jax.Array:
    for _ in range(repeats):
        x = _pool(x)
    return x


def _unpools(repeats: int, x: jax.Array) -> jax.Array:
    for _ in range(repeats):
        (x,) = jax.vjp(_pool, x)[1](x)
    return x


def window_probes(devices: Sequence[jax.Device]) -> Iterator[Probe]:
    """Convolutions, depthwise ones, poolings and their gradients, in f32 and bf16."""
    for key, dtype, later in _DTYPES:
        size = jnp.dtype(dtype).itemsize

        def probe(
            what: str,
            body: Callable[..., jax.Array],
            shapes: Sequence[tuple[int, ...]],
            work: Mapping[str, float],
            repeats: int,
            stage: int,
            key: str = key,
            dtype: Any = dtype,
            size: int = size,
        ) -> Probe:
            return Probe(
                name=f"elementwise/{key}/{what}/{'x'.join(map(str, shapes[0]))}",
                family="elementwise",
                key=key,
                work={"bytes": 2.0 * size * math.prod(shapes[0]), **work},
                repeats=repeats,
                build=partial(program, line(devices), partial(body, repeats), shapes, dtype),
                stage=stage,
            )

        for images, side, inner, outer, repeats, stage in _CONVOLUTIONS:
            shapes = [(images, side, side, inner), (3, 3, inner, outer)]
            flops = 2.0 * images * side * side * 9 * inner * outer
            work = {"convolutions": 1.0, "convolved": flops}
            yield probe("convolution", _convolved, shapes, work, repeats, stage + later)
        for images, positions, channels, taps, repeats, stage in _DEPTHWISE:
            shape = (images, positions, channels)
            work = {"convolutions": 1.0, "grouped": 2.0 * math.prod(shape) * taps}
            given = [shape, (taps, 1, channels)]
            yield probe("depthwise", _convolved, given, work, repeats, stage + later)
        for images, side, channels, repeats, stage in _POOLED:
            square = (images, side, side, channels)
            elements = float(math.prod(square))
            yield probe("pool", _pools, [square], {"pooled": elements}, repeats, stage + later)
            yield probe(
                "unpool", _unpools, [square], {"unpooled": elements}, repeats, stage + later
            )


def elementwise_probes(devices: Sequence[jax.Device]) -> Iterator[Probe]:
    """Loops of one op: a product and a sum, a tanh, a power, a transpose, in f32 and bf16."""
    mesh = line(devices)
    for key, dtype, later in _DTYPES:
        size = jnp.dtype(dtype).itemsize

        def probe(
            kind: str,
            body: Callable[..., jax.Array],
            shapes: Sequence[tuple[int, ...]],
            slow: str,
            repeats: int,
            stage: int,
            key: str = key,
            dtype: Any = dtype,
            size: int = size,
        ) -> Probe:
            elements = math.prod(shapes[0])
            work = {"bytes": float(size * elements * (len(shapes) + 1))}
            return Probe(
                name=f"elementwise/{key}/{kind}/{elements}",
                family="elementwise",
                key=key,
                work={**work, slow: float(elements)} if slow else work,
                repeats=repeats,
                build=partial(program, mesh, body, shapes, dtype),
                stage=stage,
            )

        for elements, repeats, stage in _ELEMENTS:
            flat, turn = (elements,), stage + later
            yield probe("product", partial(_products, repeats), [flat, flat], "", repeats, turn)
            yield probe("tanh", partial(_tanhs, repeats), [flat], "transcendentals", repeats, turn)
        for elements, repeats, stage in _SLOW_ELEMENTS:
            side, turn = math.isqrt(elements), stage + later
            square = (side, side)
            yield probe("power", partial(_powers, repeats), [square], "powers", repeats, turn)
            yield probe(
                "transpose", partial(_transposes, repeats), [square], "transposes", repeats, turn
            )


KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
)
"""Every kind of collective, the most used first."""

_COLLECTIVE_BYTES = ((8192, 32, 0), (262144, 8, 2), (1048576, 3, 0), (4194304, 1, 3))
"""Bytes per device, ops in a program, stage."""


def _collectives(kind: CollectiveKind, axis: str, n: int, repeats: int, x: jax.Array) -> jax.Array:
    """``repeats`` collectives, each from and to an array of the size of ``x``."""
    for _ in range(repeats):
        match kind:
            case "all_gather":
                x = jax.lax.all_gather(x[: x.shape[0] // n], axis, tiled=True)
            case "reduce_scatter":
                x = jnp.tile(jax.lax.psum_scatter(x, axis, tiled=True), n)
            case "all_reduce":
                x = jax.lax.psum(x, axis)
            case "all_to_all":
                x = jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
            case "permute":
                x = jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
    return x


def collective_probes(devices: Sequence[jax.Device]) -> Iterator[Probe]:
    """Chains of each collective in groups of every size that divides the mesh.

    Groups hold neighbouring devices (``near``) or devices that are far apart (``strided``); all
    groups of the mesh work at once.
    """
    count = len(devices)
    for n in (n for n in range(count, 1, -1) if count % n == 0):
        layouts = [("near", (count // n, n), "y")]
        if n < count:
            layouts.append(("strided", (n, count // n), "x"))
        for layout, shape, axis in layouts:
            mesh = Mesh(np.asarray(devices).reshape(shape), ("x", "y"))
            for kind in KINDS:
                # What carries the result back to the next op's operand: a slice, or copies.
                copied = {"all_gather": 2 / n, "reduce_scatter": 1 + 1 / n}.get(kind, 0.0)
                for nbytes, repeats, stage in _COLLECTIVE_BYTES:
                    elements = nbytes // 4 // n * n
                    body = partial(_collectives, kind, axis, n, repeats)
                    yield Probe(
                        name=f"{kind}/{n}/{layout}/{nbytes}",
                        family=kind,
                        key=str(n),
                        work={"bytes": 4.0 * elements},
                        repeats=repeats,
                        build=partial(program, mesh, body, [(elements,)], np.float32),
                        stage=stage + (n < count) + (layout == "strided"),
                        copied_bytes=copied * 4 * elements,
                    )


def probes(devices: Sequence[jax.Device]) -> tuple[Probe, ...]:
    """Every probe for a mesh of ``devices``, the most needed first."""
    every = [
        dispatch_probe(devices),
        *collective_probes(devices),
        *matmul_probes(devices),
        *elementwise_probes(devices),
        *window_probes(devices),
    ]
    return tuple(sorted(every, key=lambda probe: probe.stage))
