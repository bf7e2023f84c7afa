"""Warn of ops that run whole on every device because nobody said how they may be split."""

from __future__ import annotations

import inspect
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost_models.protocol import wire_bytes
from autoshard.errors import UnknownOpWarning
from autoshard.graph import Graph, Op
from autoshard.plan import Plan
from autoshard.plan_text import nbytes, seconds
from autoshard.program import MANUAL, MATERIALS, REGION_OPS
from autoshard.traps import UNSPLIT

_WRITTEN = frozenset({MANUAL, "sdy.sharding_constraint"}) | REGION_OPS | MATERIALS
"""Ops whose sharding the program or the ops inside them settle."""

_OURS = str(Path(__file__).parent)


def warn_of_unknown_ops(graph: Graph, plan: Plan) -> None:
    """Warn once for each kind of op without a rule: where it is, and what running it whole costs.

    A kind is the name of an op, or what a custom call calls. A callback that returns nothing is
    passed over if nothing need be sent for it.
    """
    kinds: dict[str, list[Op]] = {}
    for op in graph.ops:
        if is_unknown(graph, op):
            kinds.setdefault(op.target or op.name, []).append(op)
    for kind, ops in kinds.items():
        price = _Price.of(ops, plan)
        if price.sent_bytes or any(op.results for op in ops):
            text = _message(graph, kind, ops, price)
            warnings.warn(text, UnknownOpWarning, stacklevel=_frames())


def is_unknown(graph: Graph, op: Op) -> bool:
    """Whether an op could be split but for the lack of a rule."""
    if op.rule is not None or op.is_alias or op.name in _WRITTEN or op.name in UNSPLIT:
        return False
    shapes = [graph.values[v].shape for v in (*op.operands, *op.results)]
    return any(size > 1 for shape in shapes for size in shape) and not any(0 in s for s in shapes)


@dataclass(frozen=True, slots=True)
class _Price:
    """What some ops cost in one call on one device.

    Attributes:
        seconds: Time, communication included [s].
        memory_bytes: Memory traffic [bytes].
        sent_bytes: Bytes sent to gather operands and to send results around.
    """

    seconds: float
    memory_bytes: float
    sent_bytes: float

    @classmethod
    def of(cls, ops: list[Op], plan: Plan) -> _Price:
        indices = {op.index for op in ops}
        planned = [op for op in plan.ops if op.index in indices]
        sent = [c for c in plan.collectives if c.op in indices]
        return cls(
            sum(op.seconds * op.trips for op in planned) + sum(c.seconds * c.trips for c in sent),
            sum(op.hbm_bytes * op.trips for op in planned),
            sum(wire_bytes(c.kind, c.nbytes, c.devices) * c.trips for c in sent),
        )


def _message(graph: Graph, kind: str, ops: list[Op], price: _Price) -> str:
    if any(op.on_one_device for op in ops):
        what = f"{kind} runs on one device, with whole operands; its results go to all others"
        fix = "call it inside jax.shard_map to have each device call it on its own piece"
    else:
        what = f"{kind} runs whole on every device: there is no rule for how it may be split"
        fix = (
            f'if it works on any piece of its operands, say how: autoshard.register_rule("{kind}", '
            f'"{_example(graph, ops[0])}")'
        )
    lines = list(dict.fromkeys(op.source for op in ops if op.source)) or ["no source line"]
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return (
        f"{what}\n"
        f"  at:  {lines[0]}{more}\n"
        f"  costs in a call: {seconds(price.seconds)} on each device, "
        f"{nbytes(price.memory_bytes)} of memory traffic, {nbytes(price.sent_bytes)} sent\n"
        f"  fix: {fix}"
    )


def _example(graph: Graph, op: Op) -> str:
    """A rule of the right form: a leading dimension of one size is shared, all others are whole."""
    names = itertools.count()
    first = graph.values[(*op.operands, *op.results)[0]].shape[:1]
    sides = []
    for side in (op.operands, op.results):
        tensors = []
        for shape in (graph.values[v].shape for v in side):
            batch = ["b"] if shape[:1] == first and shape else []
            rest = [f"d{next(names)}" for _ in shape[len(batch) :]]
            tensors.append(" ".join([*batch, *rest]))
        sides.append(", ".join(tensors))
    return " -> ".join(sides)


def _frames() -> int:
    """The level of the first frame outside this package, as ``warnings.warn`` counts them."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level
