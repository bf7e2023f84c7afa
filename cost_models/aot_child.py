"""Compiles one program for devices that are not there; a script, run by :mod:`.aot`.

It imports nothing of autoshard, so that it starts fast and dies alone. Argument: a folder with
``request.json`` and ``module.mlirbc``. It leaves ``outcome.json``, and of a whole compilation also
``compiled.txt``, beside the compiler's own files in ``dump``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def main(folder: Path) -> None:
    """Compile what ``folder`` asks for."""
    _die_with(os.getppid())
    request = json.loads((folder / "request.json").read_text("utf-8"))
    outcome: dict[str, Any]
    try:
        outcome = _compile(request, folder)
    except jax.errors.JaxRuntimeError as error:
        outcome = {"error": str(error)}
    part = folder / "outcome.part"
    part.write_text(json.dumps(outcome), "utf-8")
    part.replace(folder / "outcome.json")


def _die_with(parent: int) -> None:
    """End this process when its parent has ended: a compilation nobody waits for costs minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _devices(request: dict[str, Any]) -> list[Any]:
    """The devices in the order in which the program numbers them."""
    options: dict[str, Any] = dict(request["topology_options"])
    found = topologies.get_topology_desc(
        request["topology"], platform=request["platform"], **options
    ).devices
    if not request["places"]:
        return list(found)
    by_place = {
        (getattr(d, "slice_index", 0) or 0, *d.coords, d.core_on_chip): d  # type: ignore[attr-defined]
        for d in found
    }
    return [by_place[tuple(place)] for place in request["places"]]


def _compile(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    devices = _devices(request)
    # JAX lowers a program of the same arguments and results, whose text then gives way to ours:
    # what is changed in a lowered module is what gets compiled.
    names, sizes = zip(*request["mesh"], strict=True)
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))

    def stand_in(*arrays: Any) -> list[Any]:
        return [jax.numpy.zeros(shape, dtype) for shape, dtype in request["results"]]

    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in request["arguments"]]
    shardings = tuple(
        NamedSharding(mesh, PartitionSpec(*map(tuple, spec))) for _, _, spec in request["arguments"]
    )
    lowered = jax.jit(stand_in, keep_unused=True, in_shardings=shardings).lower(*avals)
    held: Any = lowered.compiler_ir("stablehlo")
    with held.context, ir.Location.unknown():
        ours = ir.Module.parse((folder / "module.mlirbc").read_bytes())
        for op in list(held.body.operations):
            op.operation.erase()
        for op in list(ours.body.operations):
            held.body.append(op)
    compiled = lowered.compile(compiler_options=dict(request["compiler_options"]))
    (folder / "compiled.txt").write_text(compiled.as_text() or "", "utf-8")
    found: Any = compiled.memory_analysis()
    memory = found and {
        "argument_bytes": found.argument_size_in_bytes,
        "output_bytes": found.output_size_in_bytes,
        "temp_bytes": found.temp_size_in_bytes,
        "alias_bytes": found.alias_size_in_bytes,
    }
    return {"memory": memory}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
