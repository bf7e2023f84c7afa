"""Comparisons that practitioners published: which of two ways is faster, called by the model."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost_models.chips import find_chip
from autoshard.cost_models.collectives import TorusAxis, all_gather_s, permute_s
from autoshard.cost_models.topology import Topology
from autoshard.cost_models.training.accuracy import shipped_points
from autoshard.cost_models.training.fitting import fit
from autoshard.cost_models.training.policies import recomputed
from autoshard.cost_models.training.recipe import (
    Attention,
    Recipe,
    context_parallelism,
    dtype_of,
    mesh_axes,
)
from autoshard.cost_models.training.step import Steps
from autoshard.errors import AutoshardError, InputError

REPEATABLE = 0.05
"""Two runs of one recipe differ by up to that much: what is closer is a tie.

Source: rows N01 and N02 of ``rankings.csv`` (5% and 4%).
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One comparison as the model calls it.

    Attributes:
        name: Its name in the table.
        better: What was measured to be better: ``A``, ``B`` or ``either``.
        measured: Speed of A over that of B; None if not published.
        predicted: The same, predicted.
        right: Whether the better one is predicted to be better, or measured and predicted speeds
            are both within :data:`REPEATABLE` of each other.
        same_sign: Whether it is right however close the two are.
    """

    name: str
    better: str
    measured: float | None
    predicted: float
    right: bool
    same_sign: bool


@dataclass(frozen=True, slots=True)
class Rankings:
    """The comparisons of a table.

    Attributes:
        calls: Those that the model calls.
        not_called: The others, with the reason.
    """

    calls: tuple[Call, ...]
    not_called: tuple[tuple[str, str], ...]


def call_rankings(path: str | Path | None = None) -> Rankings:
    """Call every comparison of a table.

    Constants are fitted to published runs of programs other than the one compared.

    Args:
        path: A CSV file with the columns of ``rankings.csv``; None for the shipped one.

    Raises:
        InputError: The file cannot be read.
    """
    calls, skipped = [], []
    for number, row in enumerate(_rows(path), start=2):
        name = row.get("id") or f"line {number}"
        try:
            calls.append(_call(name, row))
        except AutoshardError as error:
            skipped.append((name, error.problem))
    return Rankings(tuple(calls), tuple(skipped))


def _rows(path: str | Path | None) -> list[dict[str, str]]:
    try:
        if path is None:
            folder = resources.files("autoshard.cost_models.training")
            lines = folder.joinpath("rankings.csv").read_text("utf-8").splitlines()
        else:
            lines = Path(path).read_text("utf-8-sig").splitlines()
        rows = [
            {k: v or "" for k, v in row.items() if isinstance(v, str | None) and k}
            for row in csv.DictReader(lines)
        ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"the rankings in {path} cannot be read: {error}",
            at=str(path),
            fix="give a CSV file with the columns of cost_models/training/rankings.csv",
        ) from error
    if not rows or "option_a" not in rows[0] or "better" not in rows[0]:
        raise InputError(
            f"{path} is no table of comparisons",
            at=str(path),
            fix="give a CSV file whose first line names id, option_a, option_b, better, ...",
        )
    return rows


def _call(name: str, row: Mapping[str, str]) -> Call:
    better = row["better"].split(" ")[0]
    if row.get("kind") == "theory":
        raise _no("it is a statement of theory, not a measurement")
    if better not in ("A", "B", "either") or row.get("clean_pair", "").startswith("NO"):
        raise _no("it says of no two comparable ways which one is better")
    if row.get("measured_a") and row.get("measured_b"):
        a, b = (_number(row[f"measured_{side}"]) for side in "ab")
        measured = a / b if _is_rate(row.get("unit", "")) else b / a
    elif "near tie" in row.get("notes", "") or better == "either":
        measured = 1.0
    else:
        measured = None
    predicted = _predicted(row)
    sign = better == "either" or (predicted > 1) == (better == "A")
    close = max(abs(math.log(predicted)), abs(math.log(measured or math.inf)))
    return Call(name, better, measured, predicted, sign or close <= REPEATABLE, sign)


def _no(problem: str) -> InputError:
    return InputError(problem, fix="compare two training steps of a model that is known")


def _number(text: str) -> float:
    found = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)]
    if not found:
        raise _no(f"{text!r} is no measurement")
    return sum(found) / len(found)


def _is_rate(unit: str) -> bool:
    return any(word in unit for word in ("FLOP", "MFU", "tok"))


def _predicted(row: Mapping[str, str]) -> float:
    """Speed of A over that of B: useful work of a device in a second, or steps of equal work."""
    if "sampling" in row.get("same_program", ""):
        return _sampling(row)
    one, other = (_recipe(row, side) for side in "ab")
    seconds = Steps([one, other]).seconds(_constants(*sorted({one.program, other.program})))
    work = np.array([recipe.tokens for recipe in (one, other)])
    a, b = work / seconds
    return float(a / b)


@cache
def _shipped() -> Steps:
    return Steps(shipped_points())


@cache
def _constants(*programs: str) -> Any:
    """Fitted to published runs of other programs than these."""
    steps = _shipped()
    others = [i for i, recipe in enumerate(steps.recipes) if recipe.program not in programs]
    return fit(steps, others)


def _sampling(row: Mapping[str, str]) -> float:
    """Attention over a sequence that devices share, as its exchange goes; or more devices."""
    a, b = row["option_a"].lower(), row["option_b"].lower()
    devices = [re.search(r"on (\d+) devices", option) for option in (a, b)]
    if devices[0] and devices[1]:
        return int(devices[0][1]) / int(devices[1][1])
    size = re.search(r"context=(\d+)", row["chip_slice"])
    if not size or "ring" not in a + b or "gathered" not in a + b:
        raise _no("only exchanges of keys and values are known of sampling")
    chip = find_chip(_chip_name(row["chip_slice"]))
    link = TorusAxis(int(size[1]), chip.value("ici_oneway_effective"), wrapped=False)
    each = 1e8  # keys and values of one device, some tens of MB
    start = chip.value("collective_fixed_s")
    hops = int(size[1]) - 1
    ring = hops * (float(permute_s(each, (link,))) + start)
    gathered = float(all_gather_s(each * int(size[1]), (link,))) + start
    return ring / gathered if "gathered" in a else gathered / ring


def _recipe(row: Mapping[str, str], side: str) -> Recipe:
    """The recipe of one side: of the published run that is named, else built from the texts."""
    points = {recipe.name: recipe for recipe in shipped_points()}
    named = re.search(r"points\.csv (\S+) / (\S+)", row.get("source", ""))
    if named and named["ab".index(side) + 1] in points:
        return points[named["ab".index(side) + 1]]
    text, option = row["model_config"], row[f"option_{side}"]
    base = model_named(text, _chip_name(row["chip_slice"]))
    topology = _slices(row["chip_slice"], "ab".index(side), base.topology)
    mesh = option if "=" in option else row["chip_slice"] if "=" in row["chip_slice"] else "fsdp=1"
    if "data x " in mesh:
        mesh = mesh.replace("data x ", "")
    axes, stages = mesh_axes(mesh, topology)
    if "=" not in mesh or mesh == "fsdp=1":
        axes = {"fsdp": topology.devices // topology.slices}
    sequence = _after(text, r"seq (\d+)") or base.sequence
    batch = _after(text, r"per-device batch (\d+)")
    policy = base.recomputed
    if "attention context" in option or "recompute attention" in option:
        policy = recomputed("save{context}" if "save" in option else "full")
    return replace(
        base,
        name=f"{row.get('id', '')}{side}",
        topology=topology,
        axes=axes,
        stages=stages,
        sequence=sequence,
        tokens=float(batch * sequence) if batch else base.tokens,
        accumulation=_after(text, r"GA (\d+)") or 1,
        dtype=dtype_of(option),
        recomputed=policy,
        context=context_parallelism(option),
        model_flops=None,
        step_s=None,
    )


def _after(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _chip_name(text: str) -> str:
    found = re.search(r"tpu7x|v\d+[a-z]*", text)
    name = found[0] if found else ""
    return {"v7": "v7x"}.get(name, name)


def _slices(text: str, side: int, usual: Topology) -> Topology:
    """The slices of one side, in the most compact shape of their chips.

    Where none are named, those that the model was published on.
    """
    name = _chip_name(text)
    if not name:
        return usual
    chip = find_chip(name)
    if chip.kind != "tpu":
        raise _no(f"{text!r} names no TPU")
    text = text.replace("tpu7x", "").replace("v7x", "")
    pairs = re.findall(r"(\d+)x\s*(?:v\w+-)?(\d+)", text)
    slices, chips = 1, 0
    counts = re.search(r"(\d+) (?:\w+ )?chips", text)
    cores = re.search(r"v\w+-(\d+)", text)
    meshed = math.prod(int(n) for n in re.findall(r"=(\d+)", text))
    if pairs:
        slices, chips = map(int, pairs[min(side, len(pairs) - 1)])
    elif counts:
        chips = int(counts[1])
    elif cores:
        chips = int(cores[1]) // (1 if len(chip.pod) == 2 else int(chip.value("cores_per_chip")))
    elif meshed > 1:
        chips = max(meshed // chip.devices, 4)
    elif usual.chip == chip:
        return usual
    else:
        raise _no(f"{text!r} does not say how many chips")
    return Topology(f"{slices}*{chip.name}:{compact_shape(chip.pod, chips)}")


def compact_shape(pod: tuple[int, ...], chips: int) -> str:
    """The most compact slice of so many chips.

    Raises:
        InputError: There is none.

    Examples:
        >>> compact_shape((16, 20, 28), 128), compact_shape((16, 16), 128)
        ('4x4x8', '8x16')
    """
    sides = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36)

    def shapes(left: int, axes: int, least: int) -> list[tuple[int, ...]]:
        if axes == 1:
            return [(left,)] if left in sides and left >= least else []
        return [
            (side, *rest)
            for side in sides
            if side >= least and left % side == 0
            for rest in shapes(left // side, axes - 1, side)
        ]

    found = shapes(chips, len(pod), 1)
    if not found:
        raise _no(f"there is no slice of {chips} chips")
    best = min(found, key=lambda shape: (max(shape), -min(shape)))
    # Small slices of a 3D torus are written with their longest sides first.
    return "x".join(map(str, best if min(best) > 1 or len(pod) < 3 else reversed(best)))


@cache
def _models() -> dict[str, Any]:
    text = resources.files("autoshard.cost_models.training").joinpath("models.json")
    read: dict[str, Any] = json.loads(text.read_text("utf-8"))
    return read


def model_named(text: str, chip: str = "") -> Recipe:
    """A recipe of a model that a text names, as one of its runs was published.

    Known are the models of the shipped runs, those of ``models.json``, and MaxText's default
    models, ``maxtext-default-32b``, trained as the shipped one that is nearest in size.

    Args:
        text: Any text.
        chip: The chip on which the run should be, if there is one on it.

    Raises:
        InputError: The text names none of them.
    """
    lower = text.lower()
    wanted = find_chip(chip).name if chip else ""
    runs = sorted(
        (r for r in shipped_points() if r.dtype == "bf16"), key=lambda r: r.chip == wanted
    )
    shipped = {r.program: r for r in runs}
    default = re.search(r"maxtext-default-(\d+)b", lower)
    if default:
        return _maxtext(runs, wanted, int(default[1]))
    for name, entry in _models().items():
        if any(word in lower for word in (name, *entry.get("also", ()))):
            base = shipped[entry["like"]]
            changes: dict[str, Any] = dict(entry["fields"])
            layers, head = (
                changes.get("layers", base.layers),
                changes.get("head_dim", base.head_dim),
            )
            changes["attention"] = tuple(
                replace(kind, layers=kind.layers * layers / base.layers) for kind in base.attention
            )
            if "head_dim" in changes:
                changes["attention"] = (Attention(layers, None, head),)
            if "recomputed" in changes:
                changes["recomputed"] = frozenset(changes["recomputed"])
            return replace(base, program=name, model_flops=None, step_s=None, **changes)
    for program in sorted(shipped, key=len, reverse=True):
        if program.lower() in lower:
            return replace(shipped[program], model_flops=None, step_s=None)
    raise _no(f"no model is known in {text[:60]!r}")


def _maxtext(runs: Sequence[Recipe], chip: str, billions: int) -> Recipe:
    """MaxText's default model of a size.

    Source: AI-Hypercomputer/maxtext@e591f30, ``global_parameter_scale``: doublings go to heads and
    MLP, then the width, then depth, in turn, from a model of 1 B.
    """

    def distance(recipe: Recipe) -> tuple[bool, float]:
        size = int(recipe.program.split("-")[-1].removesuffix("b"))
        return recipe.chip != chip, abs(math.log(size / billions))

    base = min((r for r in runs if r.program.startswith("maxtext-default-")), key=distance)
    doublings = round(math.log2(billions))
    each, rest = divmod(doublings, 3)
    wide, heads = 2 ** (each + (rest > 1)), 2 ** (each + (rest > 0))
    layers = 16 * 2**each
    return replace(
        base,
        program=f"maxtext-default-{billions}b",
        layers=layers,
        dense_layers=layers,
        d_model=2048 * wide,
        heads=16 * heads,
        kv_heads=16 * heads,
        d_ff=7168 * heads,
        attention=(Attention(layers, None, 128),),
        model_flops=None,
        step_s=None,
    )
