"""Write a plan into the module it was made for.

Every result of an op is constrained to the sharding its strategy implies, every reshard is written
as a chain of single steps, and values that cost nothing are made anew wherever they are read, in
the sharding that is wanted there. Nothing is left for propagation to decide. Constraint ops are
used throughout because XLA reads a module back from HLO before it propagates, and keeps the
sharding of custom calls alone there: a ``sdy.sharding`` attribute on another op would be dropped.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autoshard.errors import PlanMismatchError
from autoshard.extract import add_rules, read_rule
from autoshard.grouped import is_grouped, regroup
from autoshard.piecewise import run_piecewise
from autoshard.plan import Plan
from autoshard.plan_parts import OpPlan
from autoshard.program import (
    MATERIALS,
    REGION_OPS,
    TERMINATORS,
    arrays,
    carry_captures,
    is_token,
    main_block,
    normalize,
    operations,
    shape_of,
    terminator,
)
from autoshard.shardings import Sharding

Value: TypeAlias = "ir.Value[Any]"

_STEP = "sdy.sharding_constraint"


def rewrite(module: ir.Module, plan: Plan) -> None:
    """Annotate a freshly lowered module in place.

    Args:
        module: As JAX lowers the planned function with the plan's argument and result shardings.
        plan: Its plan.

    Raises:
        PlanMismatchError: The module is not the program that the plan was made for.
    """
    normalize(module)
    with module.context, ir.Location.unknown():
        add_rules(module)
        writer = _Writer(module, plan)
        writer.program(main_block(module))
        if writer.index != writer.count:
            raise _mismatch(f"it has {writer.index} ops, the plan {writer.count}")
        carry_captures(main_block(module), constrain=True)
        for operation in operations(main_block(module)):
            if "sdy.sharding_rule" in operation.attributes:
                del operation.attributes["sdy.sharding_rule"]


class _Writer:
    """Walks the module in the order in which the plan numbers its ops."""

    def __init__(self, module: ir.Module, plan: Plan) -> None:
        self.plan = plan
        self.mesh = mesh_symbol(module, plan)
        self.ops = {op.index: op for op in plan.ops}
        heads = len(plan.arguments)
        self.lines = plan.signature[heads : len(plan.signature) - len(plan.results)]
        self.count = len(self.lines)
        self.index = 0
        self.shardings: dict[Value, Sharding] = {}
        self.free: dict[Value, bool] = {}
        self.made: dict[tuple[Value, ir.Block, Sharding], Value] = {}
        self.roots: dict[Value, Value] = {}  # of a resharded value, what it was made from
        self.unchanged: dict[Value, tuple[Value, ir.Operation]] = {}  # what enters, and the loop
        self.attributes: dict[Sharding, ir.Attribute] = {}
        self.chains = {(r.value, r.chain[-1]): r.chain for r in plan.reshards}
        self.numbers: dict[Value, int] = {}
        self.numbered = 0

    def program(self, block: ir.Block) -> None:
        """The body of ``main``."""
        for argument, boundary in zip(arrays(block.arguments), self.plan.arguments, strict=True):
            self._number(argument)
            self.shardings[argument] = boundary.sharding  # JAX wrote it on the argument
        for token in (a for a in block.arguments if is_token(a)):
            self._number(token)
            self.shardings[token] = ()
        self._block(block, _planned(block), self.plan.result_shardings)

    def _block(
        self,
        block: ir.Block,
        operations: list[ir.Operation],
        returned: tuple[Sharding, ...] | None,
    ) -> None:
        for operation in operations:
            self._op(operation)
        if returned is not None:
            end = terminator(block)
            first = len(end.operands) - len(returned)  # tokens come before a program's results
            for position, wanted in enumerate(returned, first):
                self._read(end, position, wanted)

    def _op(self, operation: ir.Operation) -> None:
        index = self.index
        self.index += 1
        if index >= self.count or not self.lines[index].startswith(f"{operation.name}("):
            there = self.lines[index] if index < self.count else "nothing"
            raise _mismatch(f"op {index} is {operation.name}, the plan has {there}")
        for value in operation.results:
            self._number(value)
        plan = self.ops.get(index)
        if plan is None:
            for value in operation.results:
                self.free[value] = True
            return
        for position, wanted in enumerate(plan.operands):
            self._read(operation, position, wanted)
        if operation.name in REGION_OPS:
            self._regions(operation, plan)
        if plan.piecewise:
            numbers = [self.numbers[value] for value in operation.results]
            made_by = plan.results if plan.partial is None else (plan.partial,)
            operation = run_piecewise(
                operation, self.mesh, self.plan.mesh, plan.operands, made_by, plan.reduced
            )
            self.numbers.update(zip(operation.results, numbers, strict=True))
        elif is_grouped(operation):
            number = self.numbers[operation.results[0]]
            operation = regroup(operation, shape_of(operation.operands[0]))
            self.numbers[operation.results[0]] = number
        for value, sharding in zip(operation.results, plan.results, strict=True):
            natural = plan.partial or sharding
            if operation.name == _STEP:
                operation.attributes["sharding"] = self._attribute(sharding)
                self.shardings[value] = sharding
                continue
            made = self._constrain(value, natural, operation)
            if plan.partial is not None:
                self._constrain(made, sharding, cast(ir.Operation, made.owner))

    def _regions(self, operation: ir.Operation, plan: OpPlan) -> None:
        is_loop = operation.name == "stablehlo.while"
        for number, region in enumerate(operation.regions):
            block = region.blocks[0]
            operations = _planned(block)
            if is_loop:
                inside = []
                for argument, value, sharding in zip(
                    list(block.arguments), operation.results, plan.results, strict=True
                ):
                    self.numbers[argument] = self.numbers[value]
                    inside.append(self._constrain(argument, sharding, None))
                if number == 1:
                    ends = terminator(block).operands
                    for carried, outside, end in zip(inside, operation.operands, ends, strict=True):
                        if carried == end:
                            self.unchanged[carried] = outside, operation
            returned = None if is_loop and number == 0 else plan.results
            self._block(block, operations, returned)

    def _number(self, value: Value) -> None:
        self.numbers[value] = self.numbered
        self.numbered += 1

    def _read(self, reader: ir.Operation, position: int, wanted: Sharding) -> None:
        """Give ``reader`` its operand in the sharding it wants."""
        value = reader.operands[position]
        if value in self.free:
            reader.operands[position] = self._materialize(value, wanted, reader)
            return
        if self.shardings[value] == wanted:
            return
        current, before = self._place(value, reader)
        root = self.roots.get(current, current)
        for step in self._chain(value, wanted):
            key = (root, before.block, step)
            if self.shardings.get(root) == step:
                self.made[key] = root
            if key not in self.made:
                self.made[key] = self._step(current, step, before)
                self.roots[self.made[key]] = root
            current = self.made[key]
        reader.operands[position] = current

    def _place(self, value: Value, reader: ir.Operation) -> tuple[Value, ir.Operation]:
        """The value to reshard for ``reader``, and the op before which to do it.

        What a loop carries unchanged is resharded before the loop (see :mod:`autoshard.reads`).
        """
        before = reader
        while True:
            loop = self.unchanged.get(value)
            if loop is not None and loop[1].regions[1].blocks[0] == before.block:
                value, before = loop
            elif value in self.roots and _maker(value).block != before.block:
                before = cast(
                    ir.Operation, before.parent
                ).operation  # the value is made before an outer loop
            else:
                return value, before

    def _chain(self, value: Value, wanted: Sharding) -> tuple[Sharding, ...]:
        chain = self.chains.get((self.numbers[value], wanted))
        if chain is None:
            raise _mismatch(f"%{self.numbers[value]} needs a reshard to {wanted} the plan lacks")
        return chain

    def _step(self, value: Value, sharding: Sharding, before: ir.Operation) -> Value:
        if not sharding:
            return value  # a scalar is the same on every device
        made = ir.Operation.create(
            _STEP,
            results=[value.type],
            operands=[value],
            attributes={"sharding": self._attribute(sharding)},
            loc=before.location,
            ip=ir.InsertionPoint(before),
        )
        return cast(Value, made.results[0])

    def _constrain(self, value: Value, sharding: Sharding, maker: ir.Operation | None) -> Value:
        """Constrain a value where it is made and have everything read the constrained one."""
        if not sharding:
            self.shardings[value] = sharding
            return value
        first = cast(ir.Block, value.owner).operations[0] if maker is None else maker
        made = ir.Operation.create(
            _STEP,
            results=[value.type],
            operands=[value],
            attributes={"sharding": self._attribute(sharding)},
            loc=first.operation.location,
            ip=ir.InsertionPoint(first),
        )
        if maker is not None:
            made.move_after(maker)
        constrained = cast(Value, made.results[0])
        value.replace_all_uses_except(constrained, [made])
        self.numbers[constrained] = self.numbers[value]
        self.shardings[constrained] = sharding
        return constrained

    def _materialize(self, value: Value, wanted: Sharding, before: ir.Operation) -> Value:
        """A copy of a free value, made on the spot in the wanted sharding."""
        key = (value, before.block, wanted)
        if key not in self.made:
            original = cast(ir.Operation, value.owner)
            copy = original.clone(ir.InsertionPoint(before)).operation
            if original.name not in MATERIALS:
                for position, operand in enumerate(original.operands):
                    shape = tuple(ir.RankedTensorType(operand.type).shape)
                    sharding = read_rule(original).operand_for(wanted, position, shape)
                    copy.operands[position] = self._materialize(operand, sharding, copy)
            self.made[key] = self._step(copy.results[0], wanted, before)
        return self.made[key]

    def _attribute(self, sharding: Sharding) -> ir.Attribute:
        if sharding not in self.attributes:
            self.attributes[sharding] = ir.Attribute.parse(sharding_text(self.mesh, sharding))
        return self.attributes[sharding]


def sharding_text(mesh: str, sharding: Sharding) -> str:
    """A sharding as Shardy's attribute, closed in every dimension."""
    dims = ", ".join("{" + ", ".join(f'"{a}"' for a in d) + "}" for d in sharding)
    return f"#sdy.sharding<@{mesh}, [{dims}]>"


def _maker(value: Value) -> ir.Operation:
    return cast(ir.Operation, value.owner).operation


def _planned(block: ir.Block) -> list[ir.Operation]:
    """The ops of a block that a plan numbers, as they are before anything is written."""
    return [op.operation for op in block.operations if op.operation.name not in TERMINATORS]


def mesh_symbol(module: ir.Module, plan: Plan) -> str:
    """Name of the module's mesh; JAX writes one as soon as an argument has a sharding."""
    wanted = list(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    for op in module.body.operations:
        if op.operation.name != "sdy.mesh":
            continue
        mesh = sdy.MeshAttr(op.operation.attributes["mesh"])
        axes = [(a.name, a.size) for a in map(sdy.MeshAxisAttr, mesh.axes)]
        if axes == wanted and not list(mesh.device_ids):
            return str(ir.StringAttr(op.operation.attributes["sym_name"]).value)
    axes_text = ", ".join(f'"{n}"={s}' for n, s in wanted)
    mesh_op = ir.Operation.parse(f"sdy.mesh @planned = <[{axes_text}]>")
    ir.InsertionPoint.at_block_begin(module.body).insert(mesh_op)
    return "planned"


def _mismatch(difference: str) -> PlanMismatchError:
    return PlanMismatchError(
        "the module to rewrite is not the program that was planned",
        at=difference,
        fix="plan and rewrite the same function with the same arguments and JAX settings",
    )
