"""What a cost model answers, and the records it is asked with.

A cost model prices *one execution on one device*. It is asked in bulk: arrays have one entry per
strategy ``[S]`` so that an op with hundreds of strategies is one call. Loops, ties and memory are
not its business; callers multiply by trip counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]

Floats = NDArray[np.float64]

Compiler = Literal["cpu", "tpu", "gpu"]
"""XLA's compilers, by the platform they compile for."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh as a collective sees it.

    Attributes:
        name: Its name in the mesh.
        size: Devices along it.
    """

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one device does for one execution of one op, under each of S strategies.

    Attributes:
        op: Operation name, e.g. ``stablehlo.dot_general``.
        dtype: Element type of the main operand, e.g. ``bf16``.
        flops: Floating-point operations [FLOP], ``[S]``; a multiply-add counts two.
        hbm_bytes: Memory traffic at the fusion boundary [bytes], ``[S]``.
        matmul: Local (batch, m, n, k) of a dot or convolution, ``[S, 4]``; None for other ops.
    """

    op: str
    dtype: str
    flops: Floats
    hbm_bytes: Floats
    matmul: NDArray[np.int64] | None = None


@runtime_checkable
class CostModel(Protocol):
    """Prices of compute, memory traffic and communication on one kind of device."""

    @property
    def name(self) -> str:
        """How it is called on the command line, e.g. ``v5e``."""
        ...

    @property
    def memory_bytes(self) -> float | None:
        """Memory of one device [bytes]; None where no limit applies."""
        ...

    @property
    def dispatch_s(self) -> float:
        """Time to start one call of a program on all devices [s]; 0 where it is hidden."""
        ...

    @property
    def compiler(self) -> Compiler:
        """Which of XLA's compilers makes the program.

        It decides whether an all-reduce followed by a slice becomes a reduce-scatter (on TPU and
        GPU, not on CPU), in which order ops run and what they hold meanwhile.
        """
        ...

    def compute_s(self, work: Work) -> Floats:
        """Time the arithmetic units are busy [s], ``[S]``."""
        ...

    def hbm_s(self, work: Work) -> Floats:
        """Time the memory system is busy [s], ``[S]``."""
        ...

    def op_s(self, work: Work) -> Floats:
        """Time of the op [s], ``[S]``: how compute and memory overlap, plus fixed costs."""
        ...

    def collective_s(
        self, kind: CollectiveKind, nbytes: Floats, axes: tuple[MeshAxis, ...]
    ) -> Floats:
        """Time of a collective over one or several mesh axes [s], same shape as ``nbytes``.

        Args:
            kind: Which collective.
            nbytes: Bytes on one device of the larger side: the result of an all-gather, the
                operand of a reduce-scatter, the operand (= result) of the others.
            axes: The axes it runs over, major to minor.
        """
        ...


@runtime_checkable
class Emits(Protocol):
    """A cost model that knows what its compiler makes of a collective, where that is another."""

    def emitted(self, kind: CollectiveKind, axes: tuple[MeshAxis, ...]) -> CollectiveKind:
        """The collective that is in the compiled program."""
        ...


def emitted(model: CostModel, kind: CollectiveKind, axes: tuple[MeshAxis, ...]) -> CollectiveKind:
    """What becomes of a collective in the compiled program: itself, unless the model says else."""
    return model.emitted(kind, axes) if isinstance(model, Emits) else kind


@runtime_checkable
class Overlaps(Protocol):
    """A cost model that knows which collectives run beside arithmetic, and on what."""

    def is_asynchronous(self, kind: CollectiveKind) -> bool:
        """Whether the compiler lets independent arithmetic run while such a collective does."""
        ...

    def links(self, axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
        """Names of what a collective over mesh axes occupies; two that share one take turns."""
        ...


def is_asynchronous(model: CostModel, kind: CollectiveKind) -> bool:
    """Whether independent arithmetic runs beside a collective: not unless the model says so."""
    return isinstance(model, Overlaps) and model.is_asynchronous(kind)


def links(model: CostModel, axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
    """What a collective occupies: the links along its mesh axes, unless the model says else."""
    named = model.links(axes) if isinstance(model, Overlaps) else tuple(a.name for a in axes)
    return tuple(f"links {name}" for name in named)


def wire_bytes(kind: CollectiveKind, nbytes: float, devices: int) -> float:
    """Bytes that one device sends in a bandwidth-optimal collective of ``devices`` devices.

    ``nbytes`` as in :meth:`CostModel.collective_s`. All-gather, reduce-scatter and all-to-all send
    (n-1)/n of it, an all-reduce twice that, a permute all of it.

    Source:
        Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
        MPICH", section 4 (bandwidth terms of ring algorithms).
    """
    if devices <= 1:
        return 0.0
    share = (devices - 1) / devices
    factor = {"all_reduce": 2 * share, "permute": 1.0}.get(kind, share)
    return factor * nbytes
