"""One file that makes a failure happen again: the module, the pipeline, the seed, the mesh."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jax.extend.mlir import ir

from autoshard.errors import InputError
from autoshard.passes.context import PassContext
from autoshard.passes.manager import Instrument, Step
from autoshard.passes.module_state import from_bytes, to_bytes
from autoshard.passes.pipeline import Pipeline, pass_text
from autoshard.shardings import MeshShape

HEAD = "// autoshard opt reproducer: "
"""How the first line of such a file begins; JSON follows."""


@dataclass(frozen=True, slots=True)
class Reproducer:
    """What a file says besides the module.

    Attributes:
        pipeline: The passes up to the one that failed.
        seed: Of the random values.
        mesh: The mesh; None for one device.
        failure: What went wrong, in words.
    """

    pipeline: str
    seed: int
    mesh: MeshShape | None
    failure: str

    def text(self, module: str) -> str:
        """The file."""
        mesh = None if self.mesh is None else [list(self.mesh.names), list(self.mesh.sizes)]
        told = {
            "pipeline": self.pipeline,
            "seed": self.seed,
            "mesh": mesh,
            "failure": self.failure,
        }
        return f"{HEAD}{json.dumps(told)}\n{module}"

    @classmethod
    def of(cls, text: str) -> Reproducer | None:
        """What a file says; None if it is no reproducer.

        Raises:
            InputError: It begins like one and cannot be read.
        """
        if not text.startswith(HEAD):
            return None
        try:
            told = json.loads(text.partition("\n")[0].removeprefix(HEAD))
            mesh = told["mesh"]
            shape = None if mesh is None else MeshShape(tuple(mesh[0]), tuple(mesh[1]))
            return cls(str(told["pipeline"]), int(told["seed"]), shape, str(told["failure"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"the reproducer's first line cannot be read: {error}",
                fix="use the file as autoshard opt wrote it",
            ) from error


class WriteReproducer(Instrument):
    """Writes a reproducer when a pass, or a check after it, fails.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = False
        self._given = b""

    def start(self, pipeline: Pipeline, module: ir.Module, context: PassContext) -> None:
        """Keep what the pipeline is given."""
        self._given = to_bytes(module)

    def failed(
        self, step: Step, module: ir.Module, context: PassContext, error: BaseException
    ) -> None:
        """Write the file."""
        pipeline = ",".join(map(pass_text, step.pipeline.passes[: step.index + 1]))
        told = Reproducer(pipeline, context.seed, context.mesh, str(error).partition("\n")[0])
        given = from_bytes(self._given, module.context)
        text = str(given.operation.get_asm(enable_debug_info=True))
        self.path.write_text(told.text(text), encoding="utf-8")
        self.written = True
