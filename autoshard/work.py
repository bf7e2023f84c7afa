"""What one device does for an op under each of its strategies: arithmetic and memory traffic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.protocol import Work
from autoshard.fusion import Fusion
from autoshard.graph import Graph, Op
from autoshard.kinds import PRODUCTS
from autoshard.padding import masked_dims
from autoshard.reshard import layouts, sent_bytes
from autoshard.shardings import MeshShape
from autoshard.strategies import Strategies


def work_of(graph: Graph, op: Op, strategies: Strategies, fusion: Fusion, mesh: MeshShape) -> Work:
    """What one device does for one execution of ``op`` under each strategy."""

    def local(value: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        tensor = graph.values[value]
        pieces = layouts(len(tensor.shape), mesh).local_bytes(tensor.shape, tensor.nbytes)
        return np.asarray(pieces[ids], np.float64)

    traffic = np.zeros(len(strategies))
    reads = dict(zip(op.operands, strategies.operands, strict=True))
    for value, ids in reads.items():
        if fusion.materialized[graph.values[value].alias]:
            traffic = traffic + _touched(graph, op, value) * local(value, ids)
    for position, (value, ids) in enumerate(zip(op.operands, strategies.operands, strict=True)):
        dims = masked_dims(op, position)
        if dims:  # a copy whose padding is zero is written, and read in place of the operand
            table, shape = layouts(len(graph.values[value].shape), mesh), graph.values[value].shape
            padded = sum(shape[d] % table.splits[ids, d] for d in dims) > 0
            traffic = traffic + 2 * padded * local(value, ids)
    for value, ids in zip(op.results, strategies.results, strict=True):
        if fusion.materialized[value]:
            traffic = traffic + _written(graph, op) * local(value, ids)
    dtype = next((graph.values[v].dtype for v in (*op.operands, *op.results)), "")
    return Work(
        op.name, dtype, op.flops / strategies.splits, traffic, matmul_sizes(op, strategies, mesh)
    )


def work_facts(graph: Graph, op: Op, fusion: Fusion) -> tuple[object, ...]:
    """What :func:`work_of` and :func:`partial_bytes` read of an op besides its strategies.

    Ops that agree in it, and share their strategies, do the same work.
    """
    operands = []
    for value in op.operands:
        tensor = graph.values[value]
        held = fusion.materialized[tensor.alias]
        first = op.operands.index(value)  # a value read twice is read once
        operands.append((tensor.shape, tensor.nbytes, tensor.dtype, held, tensor.free, first))
    results = []
    for value in op.results:
        tensor = graph.values[value]
        results.append((tensor.shape, tensor.nbytes, tensor.dtype, fusion.materialized[value]))
    return op.name, op.flops, op.piecewise, op.rule, *operands, "to", *results


def whole_work(graph: Graph, op: Op, fusion: Fusion) -> Work:
    """What one device does for one execution of ``op`` that nothing splits."""
    nowhere = MeshShape((), ())
    whole = np.zeros(1, np.int64)  # the only layout there is
    strategies = Strategies(
        factor_axes=(((),) * len(op.rule.sizes if op.rule is not None else ()),),
        operands=(whole,) * len(op.operands),
        results=(whole,) * len(op.results),
        splits=np.ones(1),
        reduced=((),),
        scattered=np.zeros(1, np.bool_),
    )
    return work_of(graph, op, strategies, fusion, nowhere)


def _touched(graph: Graph, op: Op, value: int) -> float:
    """Share of an operand that the op really reads: a slice reads only what it returns."""
    if op.kind in ("dynamic_slice", "slice", "gather") and value == op.operands[0]:
        out = sum(graph.values[r].nbytes for r in op.results)
        return min(1.0, out / max(1, graph.values[value].nbytes))
    if op.kind in ("dynamic_update_slice", "scatter") and value == op.operands[0]:
        return 0.0
    return 1.0


def _written(graph: Graph, op: Op) -> float:
    """Share of a result that is written: an in-place update writes only the update.

    A scatter reads what it adds to. One into zeros makes the whole array.
    """
    whole = max(1, graph.values[op.results[0]].nbytes)
    if op.kind == "dynamic_update_slice":
        return graph.values[op.operands[1]].nbytes / whole
    if op.kind == "scatter" and not graph.values[op.operands[0]].free:
        return min(1.0, 2 * graph.values[op.operands[-1]].nbytes / whole)
    return 1.0


def matmul_sizes(op: Op, strategies: Strategies, mesh: MeshShape) -> NDArray[np.int64] | None:
    """Local (batch, m, n, k) of a dot or convolution under each strategy.

    The groups of a convolution are its batch; positions of the result are rows (``m``), positions
    of the kernel are summed over (``k``) with its input features.
    """
    rule = op.rule
    if op.kind not in PRODUCTS or rule is None:
        return None
    if not strategies.factor_axes[0]:
        return None
    lhs, rhs, out = (
        {f for dim in tensor for f in dim} for tensor in (*rule.operands[:2], rule.results[0])
    )
    groups = {}
    for f in range(len(rule.sizes)):
        if f in out:
            groups[f] = 0 if f in lhs & rhs else 2 if f in rhs else 1
        elif f in rhs or op.kind != "convolution":
            groups[f] = 3
    local = np.ones((len(strategies), 4), np.int64)
    for s, factor_axes in enumerate(strategies.factor_axes):
        for f, group in groups.items():
            local[s, group] *= -(-rule.sizes[f] // mesh.size(factor_axes[f]))
    return local


def is_product(name: str, sizes: NDArray[np.int64] | None, row: int) -> bool:
    """Whether XLA runs an op as a product.

    A dot whose local operands are two vectors, or are not summed over, becomes a multiplication and
    a sum (``AlgebraicSimplifier`` in XLA, seen in programs that jax 0.10.2 compiles for CPU).

    Args:
        name: The op.
        sizes: Its local sizes under each strategy, as :func:`matmul_sizes` gives them.
        row: The strategy.
    """
    if name.partition(".")[2] not in PRODUCTS:
        return False
    if name != "stablehlo.dot_general" or sizes is None:
        return True
    _, rows, columns, summed = sizes[row].tolist()
    return bool(summed > 1 and (rows > 1 or columns > 1))


def partial_bytes(
    graph: Graph, op: Op, strategies: Strategies, mesh: MeshShape, compiler: str, result: int = 0
) -> NDArray[np.float64]:
    """Bytes on one device of a partial result before it is combined, ``[S]``."""
    tensor = graph.values[op.results[result]]
    size = sent_bytes(tensor.nbytes, tensor.dtype, compiler)
    pieces = layouts(len(tensor.shape), mesh).local_bytes(tensor.shape, size)
    undo = np.array(
        [
            mesh.size(groups[0]) if scattered else 1
            for groups, scattered in zip(strategies.reduced, strategies.scattered, strict=True)
        ]
    )
    return np.asarray(pieces[strategies.results[result]] * undo, np.float64)
