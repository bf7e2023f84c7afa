"""A plan's module with its shardings written into it, for other programs to read."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from autoshard.errors import InputError
from autoshard.plan import Plan
from autoshard.plan_parts import BoundaryPlan
from autoshard.program import is_token, main_block, terminator
from autoshard.rewrite import mesh_symbol, rewrite, sharding_text

_SUFFIXES = (".mlir", ".mlirbc")


def stablehlo(plan: Plan, suffix: str) -> bytes:
    """The annotated module as a file of that kind holds it.

    Every argument, result and op has its sharding in Shardy's terms, every reshard is a chain of
    ``sdy.sharding_constraint``. Names are in ``jax.arg_info`` and ``jax.result_info``, donation in
    ``tf.aliasing_output`` and ``jax.buffer_donor``, as JAX writes them.

    Args:
        plan: The plan.
        suffix: ``.mlir`` for text, ``.mlirbc`` for MLIR bytecode.

    Raises:
        InputError: Another suffix, or a plan that does not hold the whole module.
    """
    if suffix not in _SUFFIXES:
        raise InputError(
            f"a module is not written as {suffix or 'a file without suffix'}",
            fix=f"name the file with {' or '.join(_SUFFIXES)}",
        )
    origin = plan.origin
    if origin is None or not origin.whole:
        held = "no module" if origin is None else "the module without its large constants"
        raise InputError(
            f"the plan holds {held}",
            fix="make large constants arguments, or take sharded.lower(...).as_text()",
        )
    if plan.means is None:
        origin.try_out()
    module = origin.open()
    with module.context, ir.Location.unknown():
        rewrite(module, plan)
        symbol = mesh_symbol(module, plan)
        function = main_block(module).owner
        aliases = dict(origin.ties)
        extras = [_donation(a, aliases.get(i)) for i, a in enumerate(plan.arguments)]
        function.attributes["arg_attrs"] = _attributes(
            plan.arguments, extras, symbol, "jax.arg_info"
        )
        function.attributes["res_attrs"] = _attributes(
            plan.results, [""] * len(plan.results), symbol, "jax.result_info"
        )
    if suffix == ".mlir":
        return str(module.operation.get_asm(enable_debug_info=True)).encode()
    held_bytes = io.BytesIO()
    module.operation.write_bytecode(held_bytes)
    return held_bytes.getvalue()


def _donation(argument: BoundaryPlan, result: int | None) -> str:
    if not argument.donated:
        return ""
    return "jax.buffer_donor = true" if result is None else f"tf.aliasing_output = {result} : i32"


def _attributes(
    boundaries: Sequence[BoundaryPlan], extras: Sequence[str], symbol: str, key: str
) -> ir.Attribute:
    """The attributes of a function's arguments or results."""
    told = []
    for boundary, extra in zip(boundaries, extras, strict=True):
        entries = [
            f"{key} = {json.dumps(boundary.name)}",
            f"sdy.sharding = {sharding_text(symbol, boundary.sharding)}",
            *([extra] if extra else []),
        ]
        told.append("{" + ", ".join(entries) + "}")
    return ir.Attribute.parse(f"[{', '.join(told)}]")


def state_boundary(module: ir.Module, plan: Plan) -> None:
    """Write a plan's shardings on those arguments and results of ``main`` that have none."""
    with module.context, ir.Location.unknown():
        symbol = mesh_symbol(module, plan)
        block = main_block(module)
        sides = (
            ("arg_attrs", list(block.arguments), plan.arguments),
            ("res_attrs", list(terminator(block).operands), plan.results),
        )
        for name, values, boundaries in sides:
            _state(block.owner, name, values, boundaries, symbol)


def _state(
    function: Any, name: str, values: list[Any], boundaries: Sequence[BoundaryPlan], symbol: str
) -> None:
    given = [ir.DictAttr.get({})] * len(values)
    if name in function.attributes:
        given = list(map(ir.DictAttr, ir.ArrayAttr(function.attributes[name])))
    left = iter(boundaries)
    told = []
    for value, attribute in zip(values, given, strict=True):
        named = [attribute[k] for k in range(len(attribute))]
        entries = {entry.name: entry.attr for entry in named}
        if not is_token(value):
            stated = ir.Attribute.parse(sharding_text(symbol, next(left).sharding))
            entries.setdefault("sdy.sharding", stated)
        told.append(ir.DictAttr.get(entries))
    function.attributes[name] = ir.ArrayAttr.get(told)
