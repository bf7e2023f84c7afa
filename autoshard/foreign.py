"""Reading a StableHLO module of unknown origin: in a process of its own, which a bad file may kill.

The MLIR parser, its verifier and Shardy's passes can end the process on input they do not expect.
:func:`read` therefore asks a child process, which does all of that to the module and gives back
what is left: one function without calls, static shapes, no annotations but Shardy's.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jax.extend.mlir import deserialize_portable_artifact, ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from autoshard.child import UnsupportedError, ask, serve
from autoshard.errors import InputError
from autoshard.extract import add_rules
from autoshard.program import main_block, normalize, operations, source_of

MAX_BYTES = 2**30
"""Largest module that is read [bytes]."""

DEADLINE_S = 600.0
"""Time after which reading is given up [s]."""

READER = (sys.executable, "-c", "from autoshard.foreign import main; main()")
"""The command that reads a module."""

_BYTECODE = b"ML\xefR"
_DIALECTS = frozenset({"stablehlo", "chlo", "func", "sdy"})
_NAME = re.compile(r'^loc\("([^"]+)"(?:\)|\()')
_MESH = re.compile(r"<@([\w.$-]+),")
_SHARDINGS = ("sharding", "in_shardings", "out_shardings", "sdy.sharding")
_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    "i1": "bool",
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    **{
        f"f{text}": f"float{text[0]}_{text[1:].lower()}"
        for text in ("4E2M1FN", "8E3M4", "8E4M3", "8E4M3FN", "8E5M2", "8E4M3FNUZ", "8E5M2FNUZ")
    },
    "f8E4M3B11FNUZ": "float8_e4m3b11fnuz",
}


@dataclass(frozen=True, slots=True)
class Port:
    """An argument or result of a module.

    Attributes:
        name: From its location in the module; ``arg0``, ``arg1`` where there is none.
        shape: Sizes.
        dtype: Element type by its NumPy name.
        donated: Whether the module says that its buffer may be reused.
        spec: Axes of the module's mesh per dimension, if the module says so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    donated: bool = False
    spec: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """What was read.

    Attributes:
        name: The module's name.
        arguments: Its arguments.
        results: Its results.
        mesh: Axes and sizes of the mesh that its shardings are for; empty if it has none.
        manual: Whether parts of it are written for one device of that mesh.
        ignored: Annotations that were left out, in words.
        module: The module as MLIR bytecode.
    """

    name: str
    arguments: tuple[Port, ...]
    results: tuple[Port, ...]
    mesh: tuple[tuple[str, int], ...]
    manual: bool
    ignored: tuple[str, ...]
    module: bytes


def read(data: bytes, entry: str | None, where: str) -> Foreign:
    """Read a module in another process.

    Args:
        data: Text or bytecode.
        entry: The function to take; None for ``main``, or the only public one.
        where: What to call it in messages.

    Raises:
        InputError: It is no module that can be planned.
    """
    if len(data) > MAX_BYTES:
        raise InputError(
            f"a module of {len(data):,} bytes; {MAX_BYTES:,} are read at most",
            at=where,
            fix="make its large constants arguments",
        )
    try:
        answer = ask(READER, json.dumps({"entry": entry}).encode() + b"\n" + data, DEADLINE_S)
    except UnsupportedError as error:
        raise InputError(
            f"the MLIR parser of this release of JAX fails on the module: {error}",
            at=where,
            fix=_EXPORT,
        ) from error
    head, _, module = answer.partition(b"\n")
    found = json.loads(head)
    if "problem" in found:
        at = f"{where}: {found['at']}" if found["at"] else where
        raise InputError(found["problem"], at=at, fix=found["fix"])
    return Foreign(
        name=found["name"],
        arguments=tuple(map(_port, found["arguments"])),
        results=tuple(map(_port, found["results"])),
        mesh=tuple((name, size) for name, size in found["mesh"]),
        manual=found["manual"],
        ignored=tuple(found["ignored"]),
        module=module,
    )


_EXPORT = "export it again as StableHLO, for instance with jax.export or torchax"


def _port(found: dict[str, Any]) -> Port:
    spec = found["spec"]
    return Port(
        found["name"],
        tuple(found["shape"]),
        found["dtype"],
        found["donated"],
        None if spec is None else tuple(map(tuple, spec)),
    )


def parse(data: bytes) -> ir.Module:
    """Text, bytecode or a portable artifact as a module of the current context.

    Raises:
        InputError: It is none of them.
    """
    if not data.strip():
        raise InputError("the module is empty", fix=_EXPORT)
    try:
        if data.startswith(_BYTECODE):
            portable = data[4:32].lstrip(bytes(range(32))).startswith(b"StableHLO")
            if portable:
                module: ir.Module = deserialize_portable_artifact(data, ir.Context.current)
            else:
                module = ir.Module.parse(data)
        else:
            module = ir.Module.parse(data.decode())
        module.operation.verify()
    except UnicodeDecodeError as error:
        raise InputError("neither MLIR text nor MLIR bytecode", fix=_EXPORT) from error
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise InputError(f"no valid StableHLO module: {text[:300]}", fix=_EXPORT) from error
    return module


def prepare(module: ir.Module, entry: str | None) -> Foreign:
    """Bring a parsed module into the one shape and read its calling convention; in place.

    Raises:
        InputError: It holds what cannot be planned.
    """
    name = _symbol(module.operation, "program").removeprefix("jit_")
    _choose(module, entry)
    for operation in operations(module.body):
        _check(operation)
    _check_calls(module)
    ignored: dict[str, int] = {}
    mesh = _inline_meshes(module, ignored)
    function = main_block(module).owner
    arguments, results = _ports(function, ignored)
    _strip(module, ignored)
    normalize(module)
    manual = any(o.name == "sdy.manual_computation" for o in operations(module.body))
    held = io.BytesIO()
    module.operation.write_bytecode(held)
    add_rules(ir.Module.parse(held.getvalue()))  # what the planner does to it may not fail there
    told = tuple(f"{what} ({count} times)" for what, count in ignored.items())
    return Foreign(name, arguments, results, mesh, manual, told, held.getvalue())


def _symbol(operation: ir.Operation, default: str = "") -> str:
    if "sym_name" not in operation.attributes:
        return default
    return str(ir.StringAttr(operation.attributes["sym_name"]).value)


def _choose(module: ir.Module, entry: str | None) -> None:
    """Make the chosen function ``main``."""
    functions = {
        _symbol(op.operation): op.operation
        for op in module.body.operations
        if op.operation.name == "func.func" and len(op.operation.regions[0].blocks)
    }
    public = [
        name
        for name, f in functions.items()
        if "sym_visibility" not in f.attributes or '"public"' in str(f.attributes["sym_visibility"])
    ]
    chosen = entry or ("main" if "main" in functions else public[0] if len(public) == 1 else None)
    if chosen is None or chosen not in functions:
        raise InputError(
            f"the module has no function {chosen or 'main'}",
            at=f"functions: {', '.join(functions) or 'none'}",
            fix="name one with from_stablehlo(..., entry=...)" if functions else _EXPORT,
        )
    if chosen != "main":
        table = ir.SymbolTable(module.operation)
        renamed = {"main": "main_of_module", chosen: "main"}
        for old, new in renamed.items():
            if old in functions:
                ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
                table.set_symbol_name(functions[old].opview, new)


def _check(operation: ir.Operation) -> None:
    at = f"{operation.name} {source_of(operation)}".strip()
    if any(len(region.blocks) > 1 for region in operation.regions):
        raise InputError("control flow by jumps between blocks", at=at, fix=_EXPORT)
    if operation.name.partition(".")[0] not in _DIALECTS:
        raise InputError(f"{operation.name} is no op of StableHLO", at=at, fix=_EXPORT)
    if operation.name == "stablehlo.custom_call":
        target = str(operation.attributes["call_target_name"])
        if target in ('"SPMDFullToShardShape"', '"SPMDShardToFullShape"'):
            raise InputError(
                "a part of the module is written for one device of a mesh",
                at=at,
                fix="export the program without shard_map, or with Shardy's partitioner",
            )
    if operation.name == "stablehlo.constant" and _is_elided(operation):
        raise InputError(
            "the values of a constant were left out when the module was printed",
            at=at,
            fix="print it whole, or write bytecode",
        )
    types = [value.type for value in operation.results]
    types += [a.type for region in operation.regions for block in region for a in block.arguments]
    for type_ in types:
        text = str(type_)
        if not text.startswith("tensor<") and not text.startswith("!stablehlo.token"):
            raise InputError(f"a value of type {text}, which is no array", at=at, fix=_EXPORT)
        if "?" in text or "bounds" in text:
            raise InputError(
                f"a value of type {text}, whose size is not known before it runs",
                at=at,
                fix="export with static shapes, e.g. torch.export without dynamic_shapes",
            )


def _is_elided(constant: ir.Operation) -> bool:
    try:
        value = constant.attributes["value"]
    except TypeError:  # of complex numbers, which these bindings cannot show; they are there
        return False
    dense = isinstance(value, (ir.DenseElementsAttr, ir.DenseIntElementsAttr))
    return not dense and "__elided__" in str(value)


def _check_calls(module: ir.Module) -> None:
    """Refuse functions that call each other in a circle, and those that are not there."""
    calls: dict[str, set[str]] = {}
    for op in module.body.operations:
        if op.operation.name == "func.func" and len(op.operation.regions[0].blocks):
            body = op.operation.regions[0].blocks[0]
            called = (o for o in operations(body) if o.name == "func.call")
            calls[_symbol(op.operation)] = {
                str(ir.FlatSymbolRefAttr(o.attributes["callee"]).value) for o in called
            }
    done: set[str] = set()
    path: dict[str, Iterator[str]] = {"main": iter(calls["main"])}
    while path:
        current = next(reversed(path))
        name = next(path[current], None)
        if name is None:
            path.pop(current)
            done.add(current)
        elif name not in calls:
            raise InputError(
                f"{current} calls {name}, which is not in the module",
                at=f"func.call @{name}",
                fix="export the whole program",
            )
        elif name in path:
            raise InputError(
                f"{name} calls itself", at=f"func.func @{name}", fix="write the recursion as a loop"
            )
        elif name not in done:
            path[name] = iter(calls[name])


def _inline_meshes(module: ir.Module, ignored: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Write the mesh into each Shardy annotation, and say which one it is.

    Annotations for more than one mesh contradict each other and are left out.
    """
    meshes = {}
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh":
            meshes[_symbol(op.operation)] = str(op.operation.attributes["mesh"])
            op.operation.erase()
    axes = {
        tuple((n, int(s)) for n, s in re.findall(r'"([^"]+)"=(\d+)', text))
        for name, text in meshes.items()
        if name not in ("empty_mesh", "maximal_mesh")
    }
    keep = len(axes) == 1 and not any("device_ids" in text for text in meshes.values())
    if axes and not keep:
        ignored["annotations of Shardy for several meshes or another order of devices"] = 1
    inline = {
        name: re.sub(r"^#sdy\.mesh<(.*)>$", r"mesh<\1>", text, flags=re.DOTALL)
        for name, text in meshes.items()
    }
    for operation in list(operations(module.body)):
        if not keep and operation.name == "sdy.sharding_constraint":
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
            continue
        for attribute in _SHARDINGS:
            if attribute in operation.attributes:
                text = str(operation.attributes[attribute])
                new = _MESH.sub(lambda m: f"<{inline.get(m[1], '@' + m[1])},", text)
                operation.attributes[attribute] = ir.Attribute.parse(new)
    return next(iter(axes)) if keep else ()


def _ports(function: Any, ignored: dict[str, int]) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    block = function.regions[0].blocks[0]
    inputs = list(block.arguments)
    outputs = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).results
    located = [m[1] if (m := _NAME.match(str(a.location))) else "" for a in inputs]
    sides = []
    for key, types, info, names, default in (
        ("arg_attrs", [a.type for a in inputs], "jax.arg_info", located, "arg{}"),
        ("res_attrs", outputs, "jax.result_info", [""] * len(outputs), "result[{}]"),
    ):
        given = ir.ArrayAttr(function.attributes[key]) if key in function.attributes else None
        told = [_told(given[i], info) if given is not None else "" for i in range(len(types))]
        called = [a or b for a, b in zip(told, names, strict=True)]
        if len(set(called)) < len(called) or not all(called):
            called = [default.format(i) for i in range(len(called))]
        ports = []
        for position, (type_, name) in enumerate(zip(types, called, strict=True)):
            attributes: Any = ir.DictAttr(given[position]) if given is not None else {}
            tensor = ir.RankedTensorType(type_) if str(type_).startswith("tensor<") else None
            if tensor is None or str(tensor.element_type) not in _DTYPES:
                raise InputError(
                    f"{name} is of type {type_}, which is no array of JAX", at=name, fix=_EXPORT
                )
            if "mhlo.sharding" in attributes:
                _count(ignored, "mhlo.sharding of arguments and results")
            ports.append(
                Port(
                    name,
                    tuple(tensor.shape),
                    _DTYPES[str(tensor.element_type)],
                    any(k in attributes for k in ("jax.buffer_donor", "tf.aliasing_output")),
                    _spec(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None,
                )
            )
        sides.append(tuple(ports))
        if given is not None:
            del function.attributes[key]
    return sides[0], sides[1]


def _told(attributes: ir.Attribute, key: str) -> str:
    """What JAX writes about an argument or result."""
    held = ir.DictAttr(attributes)
    return str(ir.StringAttr(held[key]).value) if key in held else ""


def _spec(attribute: ir.Attribute) -> tuple[tuple[str, ...], ...] | None:
    """The axes per dimension; None where an axis is split."""
    dims = map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attribute).dimension_shardings)
    axes = [[sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims]
    if any(axis.sub_axis_info is not None for dim in axes for axis in dim):
        return None
    return tuple(tuple(str(axis.name) for axis in dim) for dim in axes)


def _count(ignored: dict[str, int], what: str) -> None:
    ignored[what] = ignored.get(what, 0) + 1


def _strip(module: ir.Module, ignored: dict[str, int]) -> None:
    """Take out what means nothing outside the program that wrote it."""
    for name in [str(n) for n in module.operation.attributes]:
        if name != "sym_name":
            del module.operation.attributes[name]
    for operation in list(operations(module.body)):
        if operation.name == "func.func":
            for key in ("arg_attrs", "res_attrs"):
                if key in operation.attributes:
                    del operation.attributes[key]
        if "mhlo.sharding" in operation.attributes:
            _count(ignored, "mhlo.sharding of ops")
            del operation.attributes["mhlo.sharding"]
        if (
            operation.name == "stablehlo.custom_call"
            and str(operation.attributes["call_target_name"]) == '"Sharding"'
        ):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()


def _answer(data: bytes) -> Iterator[bytes]:
    head, _, body = data.partition(b"\n")
    try:
        with mlir.make_ir_context():
            found = prepare(parse(body), json.loads(head)["entry"])
    except InputError as error:
        yield json.dumps({"problem": error.problem, "at": error.at, "fix": error.fix}).encode()
        return
    plain = asdict(found)
    module = plain.pop("module")
    yield json.dumps(plain).encode() + b"\n"
    yield module


def main() -> None:
    """The child's side: answers requests until there are no more."""
    serve(lambda data: b"".join(_answer(data)))
