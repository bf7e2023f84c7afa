"""A cost model from published figures alone: roofline for ops, alpha-beta for collectives."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from autoshard.cost_models.chips import CHIPS, Chip, find_chip
from autoshard.cost_models.collectives import TORUS, TorusAxis, switched_s
from autoshard.cost_models.layout import Layout
from autoshard.cost_models.protocol import CollectiveKind, Compiler, Floats, MeshAxis, Work
from autoshard.cost_models.routes import Route, gpu_levels, route
from autoshard.cost_models.topology import TPU_KINDS
from autoshard.errors import InputError

STREAMED_TILE = 8
"""Rows of the streamed operand that a TPU matrix unit takes at a time.

Source: jax-ml/scaling-book, tpus.md, "What Is a TPU?" (``bf16[8,128] @ bf16[128,128]``); XLA:TPU
pads that side to 8 (ahead-of-time compiles, jax 0.10.2).
"""

FILL_ROWS = 28.0
"""Rows of the streamed operand in whose time a tile of the stationary one is put in place.

A product of few rows, as in decoding, cannot take less. Source: M x 4096 x 4096 took 7341 + 1.031 x
ideal cycles in ahead-of-time compiles for v5e, libtpu 0.0.52; taken for every TPU.
"""

VECTOR_MATMUL_SLOWDOWN = 18.0
"""Cost of a matrix-vector product, as a multiple of that with 8 vectors.

XLA:TPU keeps it off the matrix unit. Source: estimated cycles of ahead-of-time compiles for v5e,
libtpu 0.0.52; taken for every TPU.
"""

ASYNCHRONOUS_TPU: frozenset[CollectiveKind] = frozenset({"permute"})
"""Collectives beside which XLA:TPU lets independent arithmetic run, unless told otherwise.

Source: 115 programs compiled ahead of time with libtpu 0.0.42 for v5e, v5p and v6e: every permute
has a start and a done; no all-reduce, reduce-scatter or all-to-all has."""

ASYNCHRONOUS: dict[str, frozenset[CollectiveKind]] = {"v5e": ASYNCHRONOUS_TPU | {"all_gather"}}
"""Chips on which there are more.

Source: the same programs: on v5e all-gathers are spread over the fusions that run meanwhile
(``async_collective_fusion``, 383 in 64 programs); on v5p and v6e none is, of 1261."""

F32_PASSES = {"default": 1.0, "high": 2.85, "highest": 5.7}
"""Passes through the bf16 matrix unit of a TPU per f32 matmul, by ``jax.lax.Precision``.

Source: estimated cycles of ahead-of-time compiles for v5e, libtpu 0.0.52; one pass by default:
``jax.lax.Precision`` in JAX's documentation.
"""

_PEAKS: dict[str, tuple[str, ...]] = {
    "i8": ("peak_int8", "peak_bf16"),
    "i4": ("peak_int4", "peak_int8", "peak_bf16"),
    "f8": ("peak_fp8", "peak_bf16"),
    "f4": ("peak_fp4", "peak_fp8", "peak_bf16"),
    "bf16": ("peak_bf16",),
    "f16": ("peak_bf16",),
}


class AnalyticModel:
    """Prices on one device of a TPU or GPU, from the figures of its chip.

    An op takes the larger of its arithmetic and its memory traffic, plus a fixed time to start. An
    op without traffic of its own is part of a neighbour's fusion and does not start separately.

    With a layout, collectives run where the axes of the mesh lie. Without one, each is taken to lie
    on a torus axis of its own (TPU), or its devices on as few nodes as can hold them (GPU).

    Args:
        chip: A name (or file) that :func:`~autoshard.cost_models.chips.find_chip` knows, or a chip.
        f32_passes: Passes per f32 matmul on a TPU, see :data:`F32_PASSES`.
        matmul_efficiency: Share of the peak that a large matmul reaches; None: the chip's figure.
        hbm_efficiency: Share of the HBM bandwidth that is reached; None: the chip's figure.
        op_fixed_s: Time to start an op [s]; None: the chip's figure.
        collective_fixed_s: Time to start a collective [s]; None: the chip's figure.
        layout: Where the axes of the mesh lie on a topology of this chip.

    Attributes:
        name: The chip's name in lower case.
        memory_bytes: Memory that a program may use on one device [bytes].
        compiler: The chip's kind.
        dispatch_s: 0: a step is dispatched while the one before it runs.
        chip: The chip.
        layout: As given.
        options: The numbers above as they were given, by name.

    Examples:
        >>> model = AnalyticModel("v5e", matmul_efficiency=1.0, op_fixed_s=0.0)
        >>> dot = np.array([[1, 4096, 8192, 8192]])
        >>> flops = 2.0 * dot.prod(axis=1)
        >>> work = Work("stablehlo.dot_general", "bf16", flops, np.zeros(1), dot)
        >>> model.op_s(work).round(5)
        array([0.00279])
    """

    def __init__(
        self,
        chip: str | Chip,
        *,
        f32_passes: float = F32_PASSES["default"],
        matmul_efficiency: float | None = None,
        hbm_efficiency: float | None = None,
        op_fixed_s: float | None = None,
        collective_fixed_s: float | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.chip = find_chip(chip) if isinstance(chip, str) else chip
        if layout is not None and layout.topology.chip != self.chip:
            raise InputError(
                f"a layout on {layout.topology.name} says nothing of {self.chip.name}",
                fix="give a layout on a topology of the same chip",
            )
        self.layout = layout
        self._routes: dict[tuple[str, ...], Route | None] = {}
        self.name = self.chip.name.lower()
        self.memory_bytes: float | None = self.chip.memory_bytes
        self.compiler: Compiler = self.chip.kind
        self.dispatch_s = 0.0

        self.options: dict[str, float | None] = {
            "f32_passes": f32_passes,
            "matmul_efficiency": matmul_efficiency,
            "hbm_efficiency": hbm_efficiency,
            "op_fixed_s": op_fixed_s,
            "collective_fixed_s": collective_fixed_s,
        }

        def figure(given: float | None, *names: str) -> float:
            return self.chip.value(*names) if given is None else given

        self._f32_passes = f32_passes
        self._matmul_efficiency = figure(matmul_efficiency, "matmul_efficiency")
        self._hbm_efficiency = figure(hbm_efficiency, "hbm_efficiency")
        self._op_fixed_s = figure(op_fixed_s, "op_fixed_s")
        self._collective_fixed_s = figure(collective_fixed_s, "collective_fixed_s", "op_fixed_s")

    def peak_flops(self, dtype: str) -> float:
        """Peak rate of matmuls on one device [FLOP/s].

        A type that the chip has no rate for runs at that of the next wider one. On a TPU an f32
        matmul is ``f32_passes`` bf16 ones; on a GPU it uses TF32, at half the bf16 rate where no
        figure is known. Other types (f64, wide integers) cost as f32 at highest precision.

        Args:
            dtype: A StableHLO element type, e.g. ``bf16``, ``f8E4M3FN``, ``ui8``.
        """
        narrow = dtype.removeprefix("u")
        narrow = narrow[:2] if narrow[:2] in ("f8", "f4") else narrow
        if narrow in _PEAKS:
            return self.chip.value(*_PEAKS[narrow]) / self.chip.devices
        bf16 = self.chip.value("peak_bf16") / self.chip.devices
        if dtype != "f32":
            return bf16 / F32_PASSES["highest"]
        if self.chip.kind == "gpu":
            known = "peak_tf32" in self.chip.figures
            return self.chip.value("peak_tf32") / self.chip.devices if known else bf16 / 2
        return bf16 / self._f32_passes

    def compute_s(self, work: Work) -> Floats:
        """Time the arithmetic units are busy [s], ``[S]``.

        Matmuls and convolutions run on the matrix units, padded to their tiles on a TPU, and so do
        custom calls, with the work that :func:`autoshard.register_rule` was told. All else runs on
        the vector units, convolutions too where that is faster (with many groups).
        """
        peak = self.chip.value("peak_vector", "peak_fp32", "peak_bf16") / self.chip.devices
        vector_s = np.asarray(work.flops / peak, dtype=np.float64)
        if work.op == "stablehlo.custom_call":
            stated = work.flops / (self.peak_flops(work.dtype) * self._matmul_efficiency)
            return np.asarray(stated, dtype=np.float64)
        if work.matmul is None:
            return vector_s
        padding = self._padding(work.matmul) if self.chip.kind == "tpu" else 1.0
        rate = self.peak_flops(work.dtype) * self._matmul_efficiency
        matrix_s = np.asarray(work.flops * padding / rate, dtype=np.float64)
        return np.minimum(matrix_s, vector_s) if work.op == "stablehlo.convolution" else matrix_s

    def _padding(self, matmul: np.typing.NDArray[np.int64]) -> Floats:
        """Padded over useful multiplications, ``[S]``.

        The contracted and the stationary dimension are padded to the width of the matrix unit, the
        streamed one to 8 and to the rows in whose time the stationary side is put in place; which
        operand is streamed is the compiler's choice, so the cheaper way is taken.
        """
        _, m, n, k = (matmul[:, i].astype(np.float64) for i in range(4))
        width = self.chip.value("mxu_dim")

        def up(size: Floats, tile: float) -> Floats:
            return np.ceil(size / tile) * tile

        def streamed(size: Floats) -> Floats:
            return np.where(size > 0, np.maximum(up(size, STREAMED_TILE), FILL_ROWS), 0.0)

        sides = np.minimum(streamed(m) * up(n, width), up(m, width) * streamed(n))
        useful = np.maximum(m * n * k, 1.0)
        vector = np.where(np.minimum(m, n) == 1, VECTOR_MATMUL_SLOWDOWN, 1.0)
        return np.asarray(sides * up(k, width) * vector / useful, dtype=np.float64)

    def hbm_s(self, work: Work) -> Floats:
        """Time the memory system is busy [s], ``[S]``."""
        rate = self.chip.value("hbm_bw") / self.chip.devices * self._hbm_efficiency
        return np.asarray(work.hbm_bytes / rate, dtype=np.float64)

    def op_s(self, work: Work) -> Floats:
        """Time of the op [s], ``[S]``: the larger of arithmetic and traffic, plus its start."""
        started = np.where(work.hbm_bytes > 0, self._op_fixed_s, 0.0)
        return np.maximum(self.compute_s(work), self.hbm_s(work)) + started

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        """Time of a collective over one or several mesh axes [s], same shape as ``nbytes``.

        Args:
            kind: Which collective.
            nbytes: Bytes on one device of the larger side.
            axes: The axes it runs over, major to minor.
        """
        group = math.prod(axis.size for axis in axes)
        if group <= 1:
            return np.zeros_like(nbytes, dtype=np.float64)
        found = self._route(tuple(axis.name for axis in axes))
        if found is not None:
            moving_s = found.seconds(kind, nbytes)
        elif self.chip.kind == "tpu":
            moving_s = self._torus_s(kind, nbytes, axes)
        else:
            node = int(self.chip.value("node"))
            inside = min(group, node)
            levels = gpu_levels(self.chip, inside, math.ceil(group / node))
            moving_s = switched_s(kind, nbytes, levels)
        return np.where(np.asarray(nbytes) > 0, moving_s + self._collective_fixed_s, 0.0)

    def emitted(self, kind: CollectiveKind, axes: tuple[MeshAxis, ...]) -> CollectiveKind:
        """What XLA makes of a collective.

        XLA:TPU leaves a reduce-scatter over all chips of a slice an all-reduce and a slice of its
        result, on three-dimensional slices and on square ones of four by four and more.

        Source:
            Programs compiled with libtpu 0.0.42 for 17 groups on 11 slices of v5e, v5p and v6e: all
            such groups and no other. See docs/decisions.md.
        """
        if kind != "reduce_scatter" or self.chip.kind != "tpu" or self.layout is None:
            return kind
        topology = self.layout.topology
        shape = [size for size in topology.shape if size > 1]
        whole = math.prod(axis.size for axis in axes) == topology.devices
        square = len(shape) == 2 and shape[0] == shape[1] >= 4
        return "all_reduce" if whole and (len(shape) == 3 or square) else kind

    def is_asynchronous(self, kind: CollectiveKind) -> bool:
        """Whether the compiler lets independent arithmetic run beside a collective.

        Args:
            kind: Which collective.
        """
        if self.chip.kind == "gpu":
            return True
        return kind in ASYNCHRONOUS.get(self.chip.name, ASYNCHRONOUS_TPU)

    def links(self, axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
        """What a collective over mesh axes occupies.

        Args:
            axes: The mesh axes. On a TPU slice those lying on one physical axis share its links;
                on GPUs there is one stream of collectives.
        """
        if self.chip.kind == "gpu":
            return ("between GPUs",)
        names = tuple(axis.name for axis in axes)
        if self.layout is None or any(name not in self.layout.sizes for name in names):
            return names
        return tuple(dict.fromkeys(ride.axis for ride in self.layout.rides(names)))

    def _route(self, names: tuple[str, ...]) -> Route | None:
        """Where a collective over mesh axes runs; None if nobody has said."""
        if self.layout is None:
            return None
        if names not in self._routes:
            known = all(name in self.layout.sizes for name in names)
            self._routes[names] = route(self.layout, names) if known else None
        return self._routes[names]

    def _torus_s(self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]) -> Floats:
        # The devices of one chip share its links.
        link = self.chip.value("ici_oneway_effective") / self.chip.devices
        hop_s = self.chip.value("hop_s")
        torus = tuple(
            TorusAxis(axis.size, link, wrapped=self.chip.wraps(axis.size), hop_s=hop_s)
            for axis in axes
        )
        return TORUS[kind](nbytes, torus)


def analytic_model(chip: str) -> AnalyticModel:
    """The analytic model of a chip with all its own figures.

    Args:
        chip: A name from :data:`~autoshard.cost_models.chips.CHIPS`.

    Raises:
        UnknownNameError: There is no such chip.
    """
    return AnalyticModel(chip)


# Rows of COST_MODELS: each is called without arguments.
v2, v3, v4, v5e, v5p, v6e, v7x = (
    partial(analytic_model, name) for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
)
a100, h100, h200, b200, gb200 = (
    partial(analytic_model, name) for name in ("A100-80G", "H100", "H200", "B200", "GB200-NVL72")
)

_GPU_KINDS = {  # the longer name first: a GB200 is not a B200
    "GB200": "GB200-NVL72",
    "B200": "B200",
    "H200": "H200",
    "H100": "H100",
    "A100": "A100-80G",
}


def chip_of_kind(device_kind: str) -> str:
    """The chip that JAX calls ``device_kind``.

    Args:
        device_kind: ``jax.Device.device_kind``, e.g. ``TPU v5 lite`` or ``NVIDIA H100 80GB HBM3``.

    Raises:
        InputError: The kind is not known.

    Source:
        TPU kinds: jax 0.10.2 ``jax/_src/pallas/mosaic/tpu_info.py``.

    Examples:
        >>> chip_of_kind("TPU v5 lite")
        'v5e'
    """
    if device_kind in TPU_KINDS:
        return TPU_KINDS[device_kind]
    for word, chip in _GPU_KINDS.items():
        if word in device_kind:
            return chip
    raise InputError(
        f"no cost model is known for devices of kind {device_kind!r}",
        fix=f"give one: cost_model= one of {', '.join(CHIPS)} in lower case, or your own object",
    )
