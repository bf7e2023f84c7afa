"""Published training runs as records, read from tables; what cannot be read is refused by row."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost_models.chips import CHIPS
from autoshard.cost_models.topology import Topology
from autoshard.cost_models.training.policies import recomputed
from autoshard.errors import AutoshardError, InputError


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention layers of one kind.

    Attributes:
        layers: How many.
        window: Keys that a query sees at most; None for all (before it).
        head_dim: Size of a head.
    """

    layers: float
    window: int | None
    head_dim: float


@dataclass(frozen=True, slots=True)
class Latent:
    """Ranks and head sizes of multi-head latent attention."""

    q_rank: int
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run: model, devices, mesh, policy, and what was measured.

    Attributes:
        name: Its name in the table.
        program: The model; runs of one model belong together in every split.
        topology: The slices.
        axes: Devices along each axis of the mesh within a slice.
        stages: Stages of a pipeline over slices; slices beyond that hold copies or shards.
        layers: Decoder layers.
        d_model: Width.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        attention: Attention layers by kind.
        latent: Of multi-head latent attention, else None.
        causal: Whether a query sees earlier keys only.
        skips_blocks: Whether the attention is a kernel known to leave out masked blocks.
        fused_backward: Whether its backward pass is one kernel.
        d_ff: Width of the dense MLP; 0 without.
        dense_layers: Layers with a dense MLP.
        gated: Whether MLPs have a gate.
        vocab: Words; 0 without a vocabulary.
        tied: Whether embedding and logits share weights.
        experts: Experts of a layer; 0 without.
        experts_per_token: Of them for one token.
        expert_d_ff: Width of an expert.
        shared_d_ff: Width of the experts that all tokens take, together.
        capacity: Room in experts over the tokens sent on average; None without dropping.
        sequence: Tokens of a sequence.
        tokens: Tokens per device and step.
        accumulation: Microbatches that a step is cut into.
        dtype: Of the products: ``bf16``, ``int8``, ``fp8``.
        recomputed: Parts of a layer that the backward pass computes again.
        logits_again: Whether it computes the logits again.
        context: How attention is split over the mesh's ``context`` axis: ``gather``,
            ``all_to_all`` or ``ring``.
        step_s: Measured time of a step [s]; None if not known.
        model_flops: Useful work per device and step, causal attention counted half [FLOP]; None if
            the table does not say.
        confidence: ``high``, ``medium`` or ``low``.
        family: ``dense``, ``moe`` or another word.
    """

    name: str
    program: str
    topology: Topology
    axes: Mapping[str, int]
    stages: int
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    attention: tuple[Attention, ...]
    latent: Latent | None
    causal: bool
    skips_blocks: bool
    fused_backward: bool
    d_ff: int
    dense_layers: int
    gated: bool
    vocab: int
    tied: bool
    experts: int
    experts_per_token: int
    expert_d_ff: int
    shared_d_ff: int
    capacity: float | None
    sequence: int
    tokens: float
    accumulation: int
    dtype: str
    recomputed: frozenset[str]
    logits_again: bool
    context: str
    step_s: float | None
    model_flops: float | None
    confidence: str
    family: str

    @property
    def chip(self) -> str:
        """Name of the chip."""
        assert self.topology.chip is not None
        return self.topology.chip.name

    def axis(self, *names: str) -> int:
        """Devices along axes of the mesh, 1 where it has no such axis."""
        return math.prod(self.axes.get(name, 1) for name in names)


def read_recipes(path: str | Path) -> tuple[tuple[Recipe, ...], tuple[tuple[str, str], ...]]:
    """The runs of a table, and the rows that are refused with the reason.

    Args:
        path: A CSV file with the columns of ``points.csv``; columns that a run does not need may be
            missing.

    Raises:
        InputError: The file cannot be read as a table.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"the points in {path} cannot be read: {error}",
            at=str(path),
            fix="give a CSV file with the columns of cost_models/training/points.csv",
        ) from error
    if not rows or "model" not in rows[0] or "chip" not in rows[0]:
        raise InputError(
            f"{path} is no table of runs",
            at=str(path),
            fix="give a CSV file whose first line names columns: id, chip, topology, model, ...",
        )
    found, refused = [], []
    for number, row in enumerate(rows, start=2):
        name = row.get("id") or f"line {number}"
        try:
            found.append(recipe_of(row))
        except AutoshardError as error:
            refused.append((name, error.problem))
    return tuple(found), tuple(refused)


def recipe_of(row: Mapping[str, str | None]) -> Recipe:
    """The recipe of one row.

    Raises:
        InputError: Something that is needed is missing or cannot be; says which column.
        UnknownNameError: There is no such chip.
    """
    cells = {key: (value or "").strip() for key, value in row.items() if isinstance(value, str)}

    def number(column: str, default: float | None = None) -> float:
        text = cells.get(column, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = None
        if value is None or not math.isfinite(value) or value < 0:
            raise _refused(column, text)
        return value

    def count(column: str, default: int | None = None) -> int:
        return int(number(column, default))

    topology = _topology(cells.get("chip", ""), count("slices", 1), cells.get("topology", ""))
    axes, stages = mesh_axes(cells.get("mesh", ""), topology)
    layers, heads, head_dim = count("n_layers"), count("n_q_heads"), count("head_dim")
    dims, kind = cells.get("attention_dims", ""), cells.get("attention_kind", "")
    experts = count("n_experts", 0)
    sequence = count("seq_len")
    policy = cells.get("remat_policy", "").lower()
    tiled = "num_vocab_tiling" in cells.get("notes", "") + cells.get("special_flags", "")
    for column, value in (("n_layers", layers), ("head_dim", head_dim), ("seq_len", sequence)):
        if value < 1:
            raise _refused(column, str(value))
    tokens = number("tokens_per_device_per_step", 0) or (
        number("global_batch", 0) * sequence / topology.devices
    )
    if tokens <= 0:
        raise _refused("tokens_per_device_per_step", "")
    peak = _peak(topology)
    flops = number("own_tflop_per_device_step_causal_half", 0) * 1e12 or None
    step = number("measured_step_s", 0) or None
    mfu = number("mfu_causal_half_bf16peak", 0)
    if step is None and flops and mfu:
        step = flops / peak / mfu
    return Recipe(
        name=cells.get("id") or cells.get("model", ""),
        program=cells.get("model") or cells.get("id", ""),
        topology=topology,
        axes=axes,
        stages=stages,
        layers=layers,
        d_model=count("d_model"),
        heads=heads,
        kv_heads=count("n_kv_heads", heads) or heads,
        head_dim=head_dim,
        attention=_attention(dims, layers, head_dim),
        latent=_latent(kind, dims),
        causal="bidirectional" not in kind,
        skips_blocks="flash" in kind and "not stated" not in kind,
        fused_backward="fused bwd" in cells.get("notes", ""),
        d_ff=count("d_ff", 0),
        dense_layers=count("n_dense_layers", 0) if experts else layers,
        gated=cells.get("gated_mlp", "1") not in ("0", "false", "False"),
        vocab=count("vocab", 0),
        tied=cells.get("tie_embeddings", "0") in ("1", "true", "True"),
        experts=experts,
        experts_per_token=count("experts_per_token", 1) if experts else 0,
        expert_d_ff=count("moe_d_ff") if experts else 0,
        shared_d_ff=count("shared_experts", 0) * count("shared_d_ff", 0),
        capacity=_capacity(cells.get("moe_dispatch", "")),
        sequence=sequence,
        tokens=tokens,
        accumulation=max(1, count("grad_accum_steps", 1)),
        dtype=dtype_of(cells.get("compute_dtype", "bf16")),
        recomputed=recomputed(policy),
        logits_again=tiled,
        context=context_parallelism(cells.get("mesh", "")),
        step_s=step,
        model_flops=flops,
        confidence=cells.get("confidence", ""),
        family=cells.get("family", "") or ("moe" if experts else "dense"),
    )


def _refused(column: str, text: str) -> InputError:
    what = f"{column} is {text!r}, which is no use" if text else f"{column} is missing"
    return InputError(what, at=column, fix="give a number above 0")


def _peak(topology: Topology) -> float:
    assert topology.chip is not None
    return topology.chip.value("peak_bf16") / topology.chip.devices


def _topology(chip: str, slices: int, shape: str) -> Topology:
    if not chip:
        raise _refused("chip", "")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise InputError(
            f"topology is {shape!r}, which is no shape", at="topology", fix="say e.g. 16x16"
        )
    topology = Topology(f"{max(1, slices)}*{chip}:{shape}")
    if topology.kind != "tpu" or topology.chip is None or topology.chip.name not in CHIPS:
        raise InputError(
            f"{topology} is no slice of a TPU in the catalogue, which alone are modelled",
            at="chip",
            fix="leave the row out",
        )
    return topology


def mesh_axes(text: str, topology: Topology) -> tuple[dict[str, int], int]:
    """Axes of a mesh within a slice, and pipeline stages over slices.

    Args:
        text: ``ici: fsdp=16,tensor=16; dcn: data=2``, or the first part: ``fsdp=4 x tensor=2``.
        topology: The slices. What the mesh leaves open of one holds copies (``data``).

    Raises:
        InputError: The mesh does not fit.
    """
    parts: dict[str, dict[str, int]] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(";"):
        where = "dcn" if part.strip().startswith("dcn") else "ici"
        parts[where] = {a: int(n) for a, n in re.findall(r"(\w+)=(\d+)", part)}
    inside = {name: size for name, size in parts.get("ici", {}).items() if size > 1}
    devices = topology.devices // topology.slices
    used, stages = math.prod(inside.values()), parts.get("dcn", {}).get("stage", 1)
    if devices % used or topology.slices % stages:
        raise InputError(
            f"mesh {text!r} does not fit the {devices} devices of {topology.name}",
            at="mesh",
            fix="say e.g. ici: fsdp=16,tensor=16; dcn: data=2",
        )
    if used < devices:
        inside["data"] = inside.get("data", 1) * (devices // used)
    return inside, stages


def context_parallelism(mesh: str) -> str:
    """How attention is split over devices that share a sequence, from a mesh's text."""
    lower = mesh.lower()
    if "ring" in lower.replace("ring-of-experts", ""):
        return "ring"
    return "all_to_all" if "ulysses" in lower or "all-to-all" in lower else "gather"


def _attention(dims: str, layers: int, head_dim: int) -> tuple[Attention, ...]:
    found = re.search(r"(\d+) sliding ?\(window=(\d+)\) ?: ?(\d+) global", dims)
    if not found:
        return (Attention(layers, None, head_dim),)
    near, window, far = int(found[1]), int(found[2]), int(found[3])
    other = re.search(r"global head_dim=(\d+)", dims)
    share = near / (near + far)
    return (
        Attention(layers * share, window, head_dim),
        Attention(layers * (1 - share), None, int(other[1]) if other else head_dim),
    )


def _latent(kind: str, dims: str) -> Latent | None:
    if "MLA" not in kind:
        return None
    values = []
    for name in ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v"):
        found = re.search(rf"(?:^|,) ?{name}=(\d+)", dims)
        if not found:
            raise InputError(
                f"attention_dims is {dims!r}, which lacks {name} of latent attention",
                at="attention_dims",
                fix="say q_lora=1536,kv_lora=512,qk_nope=128,qk_rope=64,v=128",
            )
        values.append(int(found[1]))
    return Latent(*values)


def _capacity(dispatch: str) -> float | None:
    found = re.search(r"capacity_factor=([\d.]+)", dispatch)
    return float(found[1]) if found else None


def dtype_of(text: str) -> str:
    """The type of products in a published description; ``bf16`` where it names none."""
    for known in ("fp8", "int8"):
        if known in text.lower():
            return known
    return "bf16"
