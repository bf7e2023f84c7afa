"""What a ``shard_map`` costs: its body is the program of one device, priced op by op as it stands.

Its collectives are those written in it. Mesh axes that a ``shard_map`` leaves automatic split
nothing in its body: it is priced, and run, as a program that is whole along them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.branches import Block, uncounted, weigh
from autoshard.cost_models.protocol import CostModel, MeshAxis, wire_bytes
from autoshard.fusion import fuse
from autoshard.graph import Graph, Op
from autoshard.program import REGION_OPS
from autoshard.reshard import sent_bytes
from autoshard.shardings import MeshShape
from autoshard.work import is_product, whole_work


@dataclass(frozen=True, slots=True)
class BodyCollective:
    """A collective in the body of a ``shard_map``.

    Attributes:
        op: The op of the body; its ``collective`` says what it is.
        block: The block of the body it is in.
        dtype: Element type that moves.
        nbytes: Bytes on one device of its larger side, one execution.
        trips: How often it runs in one execution of the body; 0 in a branch that does not count.
        seconds: Time of one execution [s].
    """

    op: Op
    block: Block
    dtype: str
    nbytes: float
    trips: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BodyCost:
    """One execution of the body of a ``shard_map`` on one device.

    Attributes:
        flops: Of dots and convolutions [FLOP].
        hbm_bytes: Memory traffic [bytes].
        compute_s: Arithmetic time [s].
        hbm_s: Memory time [s].
        seconds: Time of its ops without communication [s].
        collectives: Its collectives.
    """

    flops: float
    hbm_bytes: float
    compute_s: float
    hbm_s: float
    seconds: float
    collectives: tuple[BodyCollective, ...]

    @property
    def communication_s(self) -> float:
        """Time in collectives [s]."""
        return sum(c.seconds * c.trips for c in self.collectives)


def body_cost(body: Graph, mesh: MeshShape, model: CostModel) -> BodyCost:
    """Price the body of a ``shard_map``.

    Args:
        body: The body, with local shapes.
        mesh: The mesh that its collectives run over.
        model: Prices.
    """
    fusion = fuse(body, model.compiler)
    collectives = [_collective(body, op, mesh, model) for op in body.ops if op.collective]
    inner = {op.index: body_cost(op.body, mesh, model) for op in body.ops if op.body is not None}
    works = {op.index: whole_work(body, op, fusion) for op in body.ops if _computes(op)}
    products = {
        index: work.flops[0] * body.ops[index].trips
        for index, work in works.items()
        if is_product(body.ops[index].name, work.matmul, 0)
    }
    moved = ((c.block, _sent_bytes(c)) for c in collectives)
    left_out = uncounted(body, weigh(body, products, moved))
    counted = [op for op in body.ops if (op.parent, op.region) not in left_out]
    flops = hbm_bytes = compute_s = hbm_s = seconds = 0.0
    for op in counted:
        if op.index in inner:
            cost = inner[op.index]
            flops += cost.flops * op.trips
            hbm_bytes += cost.hbm_bytes * op.trips
            compute_s += cost.compute_s * op.trips
            hbm_s += cost.hbm_s * op.trips
            seconds += cost.seconds * op.trips
            block = op.parent, op.region
            collectives += [
                replace(c, block=block, trips=c.trips * op.trips) for c in cost.collectives
            ]
        elif op.index in works:
            work = works[op.index]
            flops += products.get(op.index, 0.0)
            hbm_bytes += float(work.hbm_bytes[0]) * op.trips
            compute_s += float(model.compute_s(work)[0]) * op.trips
            hbm_s += float(model.hbm_s(work)[0]) * op.trips
            runs = any(fusion.materialized[v] for v in op.results)
            one = model.op_s(work) if runs else np.maximum(model.compute_s(work), model.hbm_s(work))
            seconds += float(one[0]) * op.trips
    sent = tuple(replace(c, trips=0) if c.block in left_out else c for c in collectives)
    return BodyCost(flops, hbm_bytes, compute_s, hbm_s, seconds, sent)


def _computes(op: Op) -> bool:
    return not (op.name in REGION_OPS or op.is_alias or op.collective or op.body)


def _collective(body: Graph, op: Op, mesh: MeshShape, model: CostModel) -> BodyCollective:
    written = op.collective
    assert written is not None
    larger = op.results if written.kind == "all_gather" else op.operands
    tensors = [body.values[v] for v in larger]
    size = float(sum(sent_bytes(t.nbytes, t.dtype, model.compiler) for t in tensors))
    axes = tuple(MeshAxis(a, mesh.size((a,))) for a in written.axes)
    seconds = float(model.collective_s(written.kind, np.array([size]), axes)[0])
    return BodyCollective(op, (op.parent, op.region), tensors[0].dtype, size, op.trips, seconds)


def _sent_bytes(collective: BodyCollective) -> float:
    """What one device sends in all executions [bytes]."""
    written = collective.op.collective
    assert written is not None
    return wire_bytes(written.kind, collective.nbytes, written.devices) * collective.trips
