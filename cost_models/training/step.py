"""The time of a step: a schedule with a few constants that all recipes share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.chips import CHIPS
from autoshard.cost_models.protocol import Floats
from autoshard.cost_models.training.recipe import Recipe
from autoshard.cost_models.training.work import StepWork, step_work

TPUS = tuple(name for name in CHIPS if CHIPS[name].kind == "tpu")


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of the model, fitted within what is known of it beforehand.

    Attributes:
        name: Its name.
        prior: What it is taken for without measurements.
        spread: Standard deviation of its logarithm beforehand.
        meaning: What it says, with its unit.
    """

    name: str
    prior: float
    spread: float
    meaning: str


CONSTANTS: tuple[Constant, ...] = (
    *(
        Constant(f"peak_share_{name}", 0.8, 0.15, f"share of the peak in large products on {name}")
        for name in TPUS
    ),
    Constant("fill", 200, 0.5, "a product of m, k, n takes 1 + fill (1/m + 1/k + 1/n) of its time"),
    Constant("expert_fill", 1000, 0.4, "the same for products of ragged rows of experts"),
    Constant("narrow_head", 0.85, 0.15, "exponent of the matrix unit's padding of narrow heads"),
    Constant("attention", 1.0, 0.2, "time of attention over that of products of its size"),
    Constant("pair_ops", 8, 0.4, "vector operations per query and key and pass"),
    Constant("unskipped", 2, 0.4, "attention of a kernel not known to skip masked blocks"),
    Constant("unfused", 1.15, 0.1, "all computation of programs with such a kernel"),
    Constant("passes", 15, 0.4, "passes of the residual stream through memory, per layer"),
    Constant("routed_passes", 4, 0.7, "passes of what is sent to experts"),
    Constant("embedding", 0.5, 0.7, "look-up and its gradient, in products of one-hot rows"),
    Constant("exposed", 0.2, 0.7, "share of weight gathers and gradient sums that nothing hides"),
    Constant("exposed_tensor", 0.5, 0.5, "the same of exchanges within layers"),
    Constant("exposed_slices", 1.0, 0.5, "the same of sums over slices"),
    Constant("stragglers", 0.02, 0.5, "time added per doubling of slices"),
    Constant("fp8", 0.95, 0.1, "share of the higher peak reached with fp8"),
    Constant("int8", 0.75, 0.2, "the same with int8 quantised on the fly"),
    Constant("ring", 2, 0.3, "ring attention over the same without: causal work is not balanced"),
    Constant("start_s", 0.05, 0.7, "time of a step in which no device computes [s]"),
)
"""The constants. What is known beforehand is by order of magnitude; see docs/accuracy.md."""

OVERLAP = 3.0
"""Computation and communication that overlap take their 3-norm: the longer one, and a little more
where they are alike."""

FFN_SHARE = 0.3
"""Passes of an MLP's inner results over those of the residual stream."""

_INDEX = {constant.name: i for i, constant in enumerate(CONSTANTS)}
PRIORS: Floats = np.log([constant.prior for constant in CONSTANTS])
SPREADS: Floats = np.array([constant.spread for constant in CONSTANTS])


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step.

    Attributes:
        step_s: Its time [s].
        products_s: Time in matrix products alone [s].
        attention_s: Time in attention alone [s].
        memory_s: Time of the other traffic to memory [s].
        collectives_s: Time of all collectives, hidden or not [s].
        mfu: Useful work over what the bf16 peak could do in that time.
    """

    step_s: float
    products_s: float
    attention_s: float
    memory_s: float
    collectives_s: float
    mfu: float


class Steps:
    """Many recipes at once, so that fitting is fast.

    Attributes:
        recipes: The recipes.
        works: What each of them does.
        measured_s: Measured times [s]; NaN where not known.
    """

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        self.recipes = tuple(recipes)
        self.works: tuple[StepWork, ...] = tuple(map(step_work, self.recipes))
        chips = [CHIPS[r.chip] for r in self.recipes]
        self.measured_s = np.array([r.step_s or math.nan for r in self.recipes])
        self._share = np.array([_INDEX[f"peak_share_{chip.name}"] for chip in chips])
        self._peak = np.array([chip.value("peak_bf16") / chip.devices for chip in chips])
        faster = [
            chip.value(f"peak_{r.dtype}", "peak_bf16") / chip.value("peak_bf16")
            for chip, r in zip(chips, self.recipes, strict=True)
        ]
        self._faster = np.array(faster)
        self._hbm = np.array(
            [chip.value("hbm_bw") * chip.value("hbm_efficiency") / chip.devices for chip in chips]
        )
        self._vector = np.array([chip.value("peak_vector") / chip.devices for chip in chips])
        width = np.array([chip.value("mxu_dim") for chip in chips])
        self._dtype = np.array(
            [
                _INDEX.get(r.dtype, -1) if f > 1 else -1
                for r, f in zip(self.recipes, faster, strict=True)
            ]
        )
        self._unskipped = np.array([not r.skips_blocks and r.causal for r in self.recipes])
        self._ring = np.array([r.context == "ring" and r.axis("context") > 1 for r in self.recipes])
        self._slices = np.log2([r.topology.slices for r in self.recipes])
        self._pad_products(width)
        self._pad_attention(width)

        def column(name: str) -> Floats:
            return np.array([getattr(work, name) for work in self.works], dtype=np.float64)

        self._passes = column("activation_bytes") + FFN_SHARE * column("hidden_bytes")
        self._fixed_bytes = column("logits_bytes") + column("optimizer_bytes")
        self._routed = column("routed_bytes")
        self._hidden_s = column("weights_s") + column("copies_s") + column("context_s")
        self._tensor_s = column("tensor_s") + column("expert_s")
        self._slices_s = column("slices_s")
        self._bubble = column("bubble")
        self._useful = column("model_flops")

    def _pad_products(self, width: Floats) -> None:
        most = max((len(work.products) for work in self.works), default=0)
        shape = (len(self.works), most)
        self._flops, self._forward = np.zeros(shape), np.zeros(shape)
        self._inverse, self._padding = np.zeros(shape), np.ones(shape)
        self._expert, self._logits = np.zeros(shape, bool), np.zeros(shape, bool)
        for i, work in enumerate(self.works):
            for j, p in enumerate(work.products):
                self._forward[i, j] = p.forward_flops
                self._flops[i, j] = p.forward_flops * (3 + p.again)
                self._inverse[i, j] = 1 / p.m + 1 / p.k + 1 / p.n
                self._padding[i, j] = _padding(p.k, width[i]) * _padding(p.n, width[i])
                self._expert[i, j] = p.kind == "expert"
                self._logits[i, j] = p.kind == "logits"

    def _pad_attention(self, width: Floats) -> None:
        most = max((len(work.attention) for work in self.works), default=0)
        self._pairs = np.zeros((len(self.works), most))
        self._head, self._head_pad = np.ones_like(self._pairs), np.ones_like(self._pairs)
        for i, work in enumerate(self.works):
            for j, (pairs, head) in enumerate(work.attention):
                self._pairs[i, j] = pairs
                self._head[i, j] = head
                self._head_pad[i, j] = _padding(head, width[i])
        self._attention_passes = np.array([float(w.attention_passes) for w in self.works])
        self._attention_kernels = np.array([float(w.attention_kernels) for w in self.works])

    def parts_s(self, logs: Floats) -> tuple[Floats, Floats, Floats]:
        """Time in products, in attention and of other traffic, each alone [s].

        Args:
            logs: Logarithms of the constants.
        """
        value = np.exp(logs)
        c = {name: float(value[i]) for name, i in _INDEX.items()}
        share = value[self._share] * self._peak
        fill = np.where(self._expert, c["expert_fill"], c["fill"])
        narrow = np.where(self._dtype >= 0, value[self._dtype] * self._faster, 1.0)
        rate = np.where(self._logits, 1.0, narrow[:, None]) * share[:, None]
        flops = self._flops + np.where(self._logits, 2 * self._forward * c["embedding"], 0.0)
        products = (flops * self._padding * (1 + fill * self._inverse) / rate).sum(axis=1)
        pad = self._head_pad ** c["narrow_head"]
        matrix = 2 * (self._pairs * self._head * pad).sum(axis=1) * self._attention_passes
        vector = self._pairs.sum(axis=1) * self._attention_kernels * c["pair_ops"]
        attention = _either(matrix * c["attention"] / share, vector / self._vector)
        attention = attention * np.where(self._ring, c["ring"], 1.0)
        attention = attention * np.where(self._unskipped, c["unskipped"], 1.0)
        nbytes = c["passes"] * self._passes + self._fixed_bytes + c["routed_passes"] * self._routed
        memory = nbytes / self._hbm
        slower = np.where(self._unskipped, c["unfused"], 1.0)
        return products * slower, attention * slower, memory * slower

    def seconds(self, logs: Floats) -> Floats:
        """Time of each step [s].

        Args:
            logs: Logarithms of the constants, in the order of :data:`CONSTANTS`.
        """
        c = {name: math.exp(logs[i]) for name, i in _INDEX.items()}
        products, attention, memory = self.parts_s(logs)
        computing = products + attention + memory
        overlapped = _either(computing, self._hidden_s)
        inside = overlapped + c["exposed"] * self._hidden_s + c["exposed_tensor"] * self._tensor_s
        within_slices = inside * (1 + c["stragglers"] * self._slices)
        whole = within_slices + c["exposed_slices"] * self._slices_s + c["start_s"]
        return np.asarray(whole * self._bubble)

    def useful_s(self) -> Floats:
        """Time that the useful work would take at the bf16 peak [s]."""
        return np.asarray(self._useful / self._peak)

    def predictions(self, constants: Mapping[str, float]) -> tuple[Prediction, ...]:
        """The predicted steps, itemised.

        Args:
            constants: Value of each constant; those left out are at their prior.
        """
        logs = logs_of(constants)
        products, attention, memory = self.parts_s(logs)
        steps = self.seconds(logs)
        moving = self._hidden_s + self._tensor_s + self._slices_s
        useful = self.useful_s()
        return tuple(
            Prediction(*map(float, row))
            for row in zip(steps, products, attention, memory, moving, useful / steps, strict=True)
        )


def logs_of(constants: Mapping[str, float]) -> Floats:
    """Logarithms of the constants in the order of :data:`CONSTANTS`."""
    logs = PRIORS.copy()
    for name, value in constants.items():
        if name in _INDEX:
            logs[_INDEX[name]] = math.log(value)
    return logs


def _padding(size: float, width: float) -> float:
    return math.ceil(size / width) * width / size


def _either(one: Floats, other: Floats) -> Floats:
    return (one**OVERLAP + other**OVERLAP) ** (1 / OVERLAP)


def named(logs: NDArray[np.float64]) -> dict[str, float]:
    """The constants by name."""
    return {constant.name: float(np.exp(logs[i])) for i, constant in enumerate(CONSTANTS)}
