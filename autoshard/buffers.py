"""Which values of a device's program get a buffer, and what each op then reads from memory.

Elementwise work fuses into what reads it; products, reductions, loops and collectives read and
write memory. The rules were found by comparing programs before and after XLA:CPU's passes (jaxlib
0.10.2); other compilers fuse by the same ones here, without XLA:CPU's copies for products and
collectives. XLA:TPU (libtpu 0.0.42, programs compiled ahead of time) also computes elementwise what
a dot takes in, and what is done to a product before it is written; what several ops read it
computes once more for each instead of keeping it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.cost_models.protocol import Compiler
from autoshard.cost_models.tiling import LANES
from autoshard.kinds import ELEMENTWISE, EXPENSIVE, FUSIBLE, MATERIAL_KINDS, PRODUCTS
from autoshard.local import LOCAL_VIEWS, DotSide, LocalBlock, LocalOp, LocalValue
from autoshard.pooling import with_winners

WINDOW = 32
"""XLA:CPU reduces a dimension longer than this in two passes if the operand is small."""

LARGE = 4096
"""From this many elements on XLA:CPU has a reduction done by a library, which multiplies on the way
but computes nothing else."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that runs at one time and writes buffers.

    Attributes:
        kind: Kind of the op at its root; ``copy`` for an operand that a product wants in order.
        outputs: Values it writes.
        reads: Values it reads from memory, and whether each reaches the result element by element,
            so that the result can be written over it.
        op: The op at its root; None for a copy.
        source: Index of the graph's op.
    """

    kind: str
    outputs: tuple[int, ...]
    reads: dict[int, bool]
    op: LocalOp | None
    source: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """A block as kernels.

    Attributes:
        kernels: In program order.
        root: The value in whose buffer a value is, where that is another one.
        returned: Per value that the block gives back, the buffer it is in; None for a constant.
    """

    kernels: tuple[Kernel, ...]
    root: dict[int, int]
    returned: tuple[int | None, ...]


def kernels(block: LocalBlock, values: list[LocalValue], compiler: Compiler) -> Kernels:
    """Fuse a block.

    Args:
        block: The block.
        values: All values of the program; copies that the compiler makes are added.
        compiler: Whose rules apply.
    """
    return _Fuser(block, values, compiler).run()


def in_post_order(block: LocalBlock) -> tuple[LocalOp, ...]:
    """The ops that the results need, as XLA orders them: after their operands, depth first."""
    maker = {v: op for op in block.ops for v in op.outputs}
    found: dict[int, LocalOp] = {}
    for end in block.returned:
        if end not in maker:
            continue
        stack: list[tuple[LocalOp, int]] = [(maker[end], 0)]
        while stack:
            op, position = stack.pop()
            if op.outputs[0] in found:
                continue
            waiting = None
            while position < len(op.inputs) and waiting is None:
                value = op.inputs[position]
                position += 1
                if value in maker and maker[value].outputs[0] not in found:
                    waiting = maker[value]
            if waiting is None:
                found[op.outputs[0]] = op
            else:
                stack += [(op, position), (waiting, 0)]
    return tuple(found.values())


def needs_copy(shape: tuple[int, ...], side: DotSide, is_lhs: bool) -> bool:
    """Whether XLA:CPU copies a product's operand into another order of dimensions.

    Dimensions of size 1 aside, the left one must read batch, free, contracting, the right one
    batch, contracting, free; without batch, any matrix will do.
    """
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    batch = [d for d in side.batch if d in dims]
    summed = [d for d in side.contracting if d in dims]
    free = [d for d in dims if d not in batch and d not in summed]
    if not batch and len(summed) <= 1 and len(free) <= 1:
        return False
    return dims != batch + (free + summed if is_lhs else summed + free)


def _is_grouped_gradient(op: LocalOp) -> bool:
    """Whether a convolution is the gradient of a kernel with groups (batch groups)."""
    return op.kind == "convolution" and op.window is not None and not op.window.orders[0]


def _is_large(value: LocalValue) -> bool:
    return math.prod(value.shape) >= LARGE and value.dtype[0] in "bf"


class _Fuser:
    def __init__(self, block: LocalBlock, values: list[LocalValue], compiler: Compiler) -> None:
        self.block, self.values, self.cpu = block, values, compiler == "cpu"
        self.tpu = compiler == "tpu"
        self.maker: dict[int, LocalOp] = {}
        self.root: dict[int, int] = {}
        self.reshaped: set[int] = set()
        # Per buffer, how each op reads it: "hard" from memory, "loose" from memory in another
        # shape, "copy" after a copy, "reduce" by a reduction, "soft" by an op that fuses.
        self.readers: dict[int, set[int]] = {}  # by the first result of the reader, -1 for the end
        self.users: dict[int, list[tuple[LocalOp | None, str]]] = {}
        self.reads: dict[int, dict[int, bool]] = {}
        self.known: dict[int, bool] = {}
        self.leaves: dict[int, set[int]] = {}
        self.absorbed: set[int] = set()

    def run(self) -> Kernels:
        ops = in_post_order(self.block) if self.cpu else _needed(self.block)
        if self.cpu:
            ops = tuple(self._with_windows(self._with_transposes(self._with_winners(ops))))
        for op in ops:
            for value in op.outputs:
                self.maker[value] = op
            if op.kind in LOCAL_VIEWS:
                self.root[op.outputs[0]] = self._root(op.inputs[0])
                if op.kind == "reshape" or op.inputs[0] in self.reshaped:
                    self.reshaped.add(op.outputs[0])
        for value in self.block.returned:
            self.users.setdefault(self._root(value), []).append((None, "hard"))
        for op in ops:
            if op.kind not in LOCAL_VIEWS:
                for value in op.inputs:
                    self.readers.setdefault(self._root(value), set()).add(op.outputs[0])
        for value in self.block.returned:
            self.readers.setdefault(self._root(value), set()).add(-1)
        for op in reversed(ops):
            if op.kind in LOCAL_VIEWS:
                continue
            for position, value in enumerate(op.inputs):
                how = self._how(op, position)
                self.users.setdefault(self._root(value), []).append((op, how))
        found: list[Kernel] = []
        copies: dict[object, int] = {}
        for op in ops:
            if op.kind in MATERIAL_KINDS or op.kind in LOCAL_VIEWS:
                continue
            reads = self._reads(op, copies, found)
            if self._is_absorbed(op):
                self.reads[op.outputs[0]] = dict.fromkeys(reads, False)
                self.absorbed.add(op.outputs[0])
                continue
            if op.kind in FUSIBLE:
                self.reads[op.outputs[0]] = reads
                if not self.has_buffer(op):
                    continue
            found.append(Kernel(op.kind, op.outputs, reads, op, op.op))
        returned = tuple(
            None if self._is_material(self._root(v)) else self._root(v) for v in self.block.returned
        )
        return Kernels(tuple(found), self.root, returned)

    def _root(self, value: int) -> int:
        return self.root.get(value, value)

    def _is_material(self, value: int) -> bool:
        return value in self.maker and self.maker[value].kind in MATERIAL_KINDS

    def _with_winners(self, ops: Iterable[LocalOp]) -> Iterable[LocalOp]:
        for op in ops:
            if op.kind == "select_and_scatter":
                yield from with_winners(op, self.values)
            else:
                yield op

    def _with_transposes(self, ops: Iterable[LocalOp]) -> Iterable[LocalOp]:
        """XLA:CPU wants the dimension of a collective outermost, and puts the result back."""
        for op in ops:
            gathered = op.kind in ("all_gather", "reduce_scatter")
            shape = self.values[op.outputs[0]].shape
            if op.kind == "convolution" and not self._is_ordered(op, 2, op.outputs[0]):
                raw = self._like(op.outputs[0])
                yield replace(op, outputs=(raw,))
                yield LocalOp("transpose", (raw,), op.outputs, op.op)
                continue
            if not (gathered and math.prod(shape[: op.dims[0]]) > 1) and op.kind != "all_to_all":
                yield op
                continue
            before, raw = self._like(op.inputs[0]), self._like(op.outputs[0])
            yield LocalOp("transpose", op.inputs, (before,), op.op)
            yield replace(op, inputs=(before,), outputs=(raw,))
            yield LocalOp("transpose", (raw,), op.outputs, op.op)

    def _with_windows(self, ops: Iterable[LocalOp]) -> Iterable[LocalOp]:
        """XLA:CPU reduces long dimensions of small operands in two passes."""
        for op in ops:
            here = self.values[op.inputs[0]] if op.kind == "reduce" else None
            if here is None or len(op.outputs) > 1 or _is_large(here):
                yield op
                continue
            shape = tuple(-(-n // WINDOW) if d in op.dims else n for d, n in enumerate(here.shape))
            if not here.nbytes or all(here.shape[d] <= WINDOW for d in op.dims):
                yield op
                continue
            first = self._like(op.inputs[0])
            nbytes = here.nbytes * math.prod(shape) // math.prod(here.shape)
            self.values[first] = replace(here, shape=shape, nbytes=nbytes)
            yield LocalOp("reduce_window", op.inputs, (first,), op.op)
            yield replace(op, inputs=(first, *op.inputs[1:]))

    def _pad_images(self, copy: int, op: LocalOp) -> None:
        """XLA:TPU tiles what the gradient of a grouped kernel takes in by images alone."""
        assert op.window is not None
        here, kernel = self.values[copy], self.values[op.inputs[1]]
        images = kernel.shape[op.window.orders[1][-2]]
        rows = 2 if here.dtype == "bf16" else 1
        nbytes = rows * here.nbytes * -(-images // LANES) * LANES // images
        self.values[copy] = replace(here, nbytes=nbytes)

    def _is_ordered(self, op: LocalOp, position: int, value: int) -> bool:
        """Whether a convolution has an operand or its result as XLA:CPU's library wants it."""
        assert op.window is not None
        order, shape = op.window.orders[position], self.values[value].shape
        dims = [d for d in order if shape[d] != 1]
        return bool(order) and dims == sorted(dims)

    def _like(self, value: int) -> int:
        self.values.append(self.values[value])
        return len(self.values) - 1

    def _how(self, op: LocalOp, position: int) -> str:
        value = op.inputs[position]
        read = "loose" if value in self.reshaped else "hard"
        if op.kind == "multiply" and self._is_summed(op):
            alone = len(self.readers[self._root(value)]) == 1
            within = self._is_product(value) or self._is_spread(value)
            return "soft" if alone and within else read
        if self.tpu and op.kind == "gather" and not position:
            return read  # XLA:TPU picks rows from memory
        if op.kind in FUSIBLE or (op.kind == "dynamic_update_slice" and position):
            return "soft"
        if op.kind == "reduce":
            whole = self.cpu and _is_large(self.values[value]) and not self._is_product(value)
            return read if whole else "reduce"
        if self.tpu and _is_grouped_gradient(op):
            return "copy"
        if self.tpu and op.kind in PRODUCTS:
            return "soft"  # XLA:TPU computes it as the product takes it in
        if op.kind == "convolution" and self.cpu and not self._is_ordered(op, position, value):
            return "copy"
        if op.sides is not None and self.cpu:
            side, shape = op.sides[position], self.values[value].shape
            if needs_copy(shape, side, position == 0):
                return "copy"
            if len(shape) != (1 if side.batch else 0) + 2:
                return "loose"
        return read

    def _is_product(self, value: int) -> bool:
        maker = self.maker.get(self._root(value))
        return maker is not None and maker.kind == "multiply"

    def _is_summed(self, op: LocalOp) -> bool:
        """Whether a product is computed inside the large reduction that alone reads it."""
        users = self.users.get(op.outputs[0], [])
        if not self.cpu or len(self.readers[op.outputs[0]]) != 1:
            return False
        user, how = users[0]
        if user is not None and user.kind == "multiply":
            return how == "soft" and self._is_summed(user)
        return user is not None and how == "reduce" and _is_large(self.values[user.inputs[0]])

    def _is_absorbed(self, op: LocalOp) -> bool:
        """Whether XLA:TPU computes elementwise what it does to a product before it writes that."""
        if not (self.tpu and op.kind in PRODUCTS):
            return False
        value = op.outputs[0]
        while True:
            users = self.users.get(value, [])
            if len(self.readers.get(value, ())) != 1 or len(users) != 1:
                return False
            user, how = users[0]
            if user is None or how != "soft" or user.kind not in ELEMENTWISE | {"transpose"}:
                return False
            value = user.outputs[0]
            if self.has_buffer(user):
                return True

    def has_buffer(self, op: LocalOp) -> bool:
        """Whether the result of a fusible op is written to memory."""
        value = op.outputs[0]
        if value not in self.known:
            self.known[value] = self._decide(op, value)
        return self.known[value]

    def _decide(self, op: LocalOp, value: int) -> bool:
        users = self.users.get(value, [])
        count = len(self.readers.get(value, ()))
        if any(how in ("hard", "loose") for _, how in users):
            return True
        if op.kind == "pad" and any(
            user is not None and self._is_cut(op, user) for user, _ in users
        ):
            return True
        if count <= 1:
            return False
        if self.tpu and op.kind in ELEMENTWISE:
            # XLA:TPU rather computes it once more for each reader than to write and read it.
            return len(self._leaves(op)) > 1
        if any(how == "reduce" for _, how in users) and op.kind != "broadcast_in_dim":
            return True
        if op.kind in EXPENSIVE:
            return True
        gathering = any(u is not None and u.kind in ("concatenate", "gather") for u, _ in users)
        return gathering and len(self._large(op)) > 1

    def _is_cut(self, pad: LocalOp, user: LocalOp) -> bool:
        """Whether a reshard takes padded pieces for several readers: XLA pads once for all."""
        together = (user.kind, user.op) == ("slice", pad.op)
        return together and len(self.readers.get(user.outputs[0], ())) > 1

    def _large(self, op: LocalOp) -> set[int]:
        nbytes = self.values[op.outputs[0]].nbytes
        return {
            v
            for v in map(self._root, op.inputs)
            if v not in self.maker
            or (
                self.maker[v].kind not in MATERIAL_KINDS | {"broadcast_in_dim"}
                and self.values[v].nbytes >= nbytes
            )
        }

    def _leaves(self, op: LocalOp) -> set[int]:
        """The buffers with as many elements as an op's result that it is computed from."""
        value = op.outputs[0]
        if value not in self.leaves:
            count, found = math.prod(self.values[value].shape), set[int]()
            for read in map(self._root, op.inputs):
                maker = self.maker.get(read)
                if maker is not None and maker.kind in FUSIBLE and not self.has_buffer(maker):
                    found |= self._leaves(maker)
                elif maker is None or maker.kind not in MATERIAL_KINDS:
                    found.add(read)
            self.leaves[value] = {v for v in found if math.prod(self.values[v].shape) >= count}
        return self.leaves[value]

    def _is_cheap(self, op: LocalOp) -> bool:
        """Whether ops that fuse compute it again although it has a buffer."""
        if op.kind not in FUSIBLE or (self.tpu and len(self._leaves(op)) > 1):
            return False
        if op.kind in EXPENSIVE and not (op.kind == "divide" and self._is_spread(op.inputs[1])):
            return False
        if not any(how in ("hard", "reduce") for _, how in self.users[op.outputs[0]]):
            return True
        return sum(not self._is_spread(v) for v in {*map(self._root, op.inputs)}) <= 1

    def _is_spread(self, value: int) -> bool:
        maker = self.maker.get(self._root(value))
        return maker is not None and maker.kind in MATERIAL_KINDS | {"broadcast_in_dim"}

    def _through(self, value: int, soft: bool) -> dict[int, bool]:
        """The buffers that are read where ``value`` is."""
        op = self.maker.get(value)
        if op is None:
            return {value: True}
        if op.kind in MATERIAL_KINDS:
            return {}
        if value in self.absorbed:
            return self.reads[value]
        if op.kind in FUSIBLE and (not self.has_buffer(op) or (soft and self._is_cheap(op))):
            return self.reads[value]
        return {value: True}

    def _reads(
        self, op: LocalOp, copies: dict[object, int], found: list[Kernel]
    ) -> dict[int, bool]:
        reads: dict[int, bool] = {}
        elementwise = op.kind in ELEMENTWISE
        count = math.prod(self.values[op.outputs[0]].shape)
        for position, value in enumerate(op.inputs):
            root = self._root(value)
            how = self._how(op, position)
            if how == "copy":
                key: object = (root, op.sides[position], position) if op.sides else None
                if op.window is not None:
                    key = (root, op.window.orders[position])
                if key not in copies:
                    copies[key] = self._like(root)
                    if self.tpu:
                        self._pad_images(copies[key], op)
                    within = dict.fromkeys(self._through(root, soft=True), False)
                    found.append(Kernel("copy", (copies[key],), within, None, op.op))
                reads[copies[key]] = False
                continue
            fused = op.kind in FUSIBLE and how == "soft"
            for read, same in self._through(root, fused).items():
                same = same and elementwise and math.prod(self.values[read].shape) == count
                if op.kind in ("dynamic_update_slice", "scatter"):
                    same = position < len(op.outputs)
                reads[read] = reads.get(read, True) and same
        return reads


def _needed(block: LocalBlock) -> tuple[LocalOp, ...]:
    """The ops that the results need, in program order."""
    kept = {op.outputs[0] for op in in_post_order(block)}
    return tuple(op for op in block.ops if op.outputs and op.outputs[0] in kept)
