"""The decision in a user's words: what is sharded how, what it costs, and how sure that is.

A plan is plain data. It can be printed, saved, loaded, compared, and written into the program it
was made for; the numbers in it are *predicted* ones, recomputed from the plan itself rather than
taken from the solver.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InputError, PlanMismatchError
from autoshard.given import file_path
from autoshard.origin import Origin
from autoshard.plan_parts import (
    BoundaryPlan,
    MemoryHolder,
    MemoryPoint,
    OpPlan,
    PlannedCollective,
    Predicted,
    ReshardPlan,
    SolverReport,
    TimelineEvent,
)
from autoshard.records import plain, record
from autoshard.shardings import MeshShape, Sharding, local_shape, to_partition_spec
from autoshard.uneven import Uneven

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from autoshard.cost_models.compiled import Collective, CompiledProgram
    from autoshard.diff import PlanDiff
    from autoshard.execute import Executable, Placement
    from autoshard.explain import Explanation
    from autoshard.finding import Lint
    from autoshard.problem import Problem
    from autoshard.solvers import Solver
    from autoshard.tradeoff import PlanFront
    from autoshard.why import Reason


FORMAT = 3


"""Version of the JSON form."""


_HERE = {"saved": False}


"""Mark of a field that lives in one process only."""


@dataclass(frozen=True, eq=False, slots=True)
class Means:
    """What a plan was made with, as objects: those of the caller's own cannot be saved.

    Attributes:
        cost_model: Prices.
        solver: Solves problems.
    """

    cost_model: CostModel
    solver: Solver


@dataclass(frozen=True, slots=True)
class Plan:
    """How a program is sharded over a mesh, and what that is predicted to cost.

    Attributes:
        mesh: The mesh's axes.
        cost_model: Name of the cost model that priced it.
        arguments: Every array argument.
        results: Every array result.
        ops: Every op with a decision.
        reshards: Every change of sharding.
        collectives: Every collective asked for.
        predicted: Totals.
        timeline: What takes time, and when, in the schedule that the predicted step is.
        memory: Live bytes over the program.
        holders: What holds memory at the peak, the largest first.
        uncounted_loops: Loops whose trip count the program does not state, by source line; every
            figure counts their bodies once.
        uneven: Dimensions that the mesh does not divide.
        solver: How it was found.
        memory_limit: The limit it was found under [bytes per device]; None for none.
        planning_s: Time to extract, price and solve [s], without JAX's tracing and lowering.
        signature: The program it belongs to, line by line.
        fingerprint: SHA-256 of the signature and the mesh.
        origin: What it was made from, to make it again under other wishes; no part of what makes
            two plans equal. None before a plan is finished.
        placement: The caller's trees and mesh; only on plans made or checked in this process.
        means: What it was made with; only on plans made in this process.
        stages: What part of ``planning_s`` each stage took [s], in order; only on plans made in
            this process.
    """

    mesh: MeshShape
    cost_model: str
    arguments: tuple[BoundaryPlan, ...]
    results: tuple[BoundaryPlan, ...]
    ops: tuple[OpPlan, ...]
    reshards: tuple[ReshardPlan, ...]
    collectives: tuple[PlannedCollective, ...]
    predicted: Predicted
    timeline: tuple[TimelineEvent, ...]
    memory: tuple[MemoryPoint, ...]
    holders: tuple[MemoryHolder, ...]
    uncounted_loops: tuple[str, ...]
    uneven: Uneven
    solver: SolverReport
    memory_limit: int | None
    planning_s: float
    signature: tuple[str, ...]
    fingerprint: str
    origin: Origin | None = field(default=None, compare=False, repr=False)
    placement: Placement | None = field(default=None, compare=False, repr=False, metadata=_HERE)
    means: Means | None = field(default=None, compare=False, repr=False, metadata=_HERE)
    stages: tuple[tuple[str, float], ...] = field(
        default=(), compare=False, repr=False, metadata=_HERE
    )

    @property
    def is_padded(self) -> bool:
        """Whether some value on the way from arguments to results is split unevenly."""
        return bool(self.uneven.padded)

    @property
    def argument_shardings(self) -> tuple[Sharding, ...]:
        """Sharding of every array argument, in the order of the flat program."""
        return tuple(a.sharding for a in self.arguments)

    @property
    def result_shardings(self) -> tuple[Sharding, ...]:
        """Sharding of every array result, in the order of the flat program."""
        return tuple(r.sharding for r in self.results)

    @property
    def in_shardings(self) -> Any:
        """A tree of ``NamedSharding`` like the arguments, as ``jax.jit`` takes it."""
        return self._placed().in_shardings

    @property
    def out_shardings(self) -> Any:
        """A tree of ``NamedSharding`` like the result, as ``jax.jit`` takes it."""
        return self._placed().out_shardings

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Move the leading arguments to where the plan wants them; one argument gives one back."""
        return self._placed().place(*args, **kwargs)

    def _placed(self) -> Placement:
        if self.placement is None:
            raise InputError(
                "this plan is not bound to a mesh of devices yet",
                fix="give it to autoshard(fn, mesh, plan=plan) and use what .plan() returns",
            )
        return self.placement

    def table(self) -> pd.DataFrame:
        """Every op as a row; times [s] and bytes are of all its executions in one call."""
        sent_s: dict[int, float] = {}
        for c in self.collectives:
            sent_s[c.op] = sent_s.get(c.op, 0.0) + c.seconds * c.trips
        rows = [
            {
                "op": op.index,
                "name": op.name.partition(".")[2],
                "source": op.source,
                "shapes": ", ".join(op.shapes),
                "sharding": ", ".join(spec(s) for s in op.results),
                "factors": ", ".join(f"{f}/{'*'.join(a)}" for f, a in op.factors),
                "trips": op.trips,
                "compute_s": op.compute_s * op.trips,
                "hbm_s": op.hbm_s * op.trips,
                "communication_s": sent_s.get(op.index, 0.0),
                "flops": op.flops * op.trips,
                "hbm_bytes": op.hbm_bytes * op.trips,
                "bytes": op.nbytes,
            }
            for op in self.ops
        ]
        return pd.DataFrame(rows)

    # Questions about a plan are answered by modules that stand above it, because they plan again:
    # each is imported when it is asked.

    def explain(
        self,
        name: str,
        *,
        pins: Sequence[PartitionSpec] | None = None,
        alternatives: int = 6,
        say: Callable[[str], None] = lambda what: None,
    ) -> Explanation:
        """Why a tensor is sharded as it is, and what any other sharding would cost.

        Other shardings are priced by solving anew with each of them pinned and all else free.

        Args:
            name: An argument or result as the plan prints it (or the end of that), an op such as
                ``dot_general #12``, or a source line such as ``model.py:31``.
            pins: Shardings to price; None: those that look cheapest, the replicated one among them.
            alternatives: How many to price at most, if ``pins`` are not given.
            say: Told what is being done.

        Raises:
            UnknownNameError: Nothing is called so.
            InputError: A pin does not fit, or the plan cannot be priced again.
        """
        from autoshard.explain import explain
        from autoshard.replan import Replanner

        return explain(Replanner.of(self), name, pins=pins, alternatives=alternatives, say=say)

    def why(
        self,
        collective: int | str | PlannedCollective | Collective,
        *,
        program: Executable | CompiledProgram | str | None = None,
        remedy: bool = True,
        say: Callable[[str], None] = lambda what: None,
    ) -> Reason:
        """Why there is a collective, what it costs, and the cheapest way to be rid of it.

        Args:
            collective: One of :attr:`collectives`, its number there, or the line (or a part of the
                line) that a printed plan shows for it; or one of a compiled program, or the name of
                its instruction.
            program: The compiled program: an executable, what was read from one, or its text.
            remedy: Whether to solve anew for the cheapest plan without it.
            say: Told what is being done.

        Raises:
            UnknownNameError: There is no such collective.
            InputError: The plan cannot be priced again.
        """
        from autoshard.replan import Replanner
        from autoshard.why import why

        return why(Replanner.of(self), collective, program=program, remedy=remedy, say=say)

    def lint(
        self, *, large_bytes: int | None = None, say: Callable[[str], None] = lambda what: None
    ) -> Lint:
        """What is likely a mistake or a loss in this plan, each with a way out.

        Hints are judged, and large tensors that are held whole priced, by solving anew.

        Args:
            large_bytes: Bytes on one device from which on a tensor counts as large; None: a
                twentieth of the predicted peak.
            say: Told what is being done.

        Raises:
            InputError: The plan cannot be priced again.
        """
        from autoshard.lint import lint
        from autoshard.replan import Replanner

        return lint(Replanner.of(self), large_bytes=large_bytes, say=say)

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan does otherwise: shardings, predictions, collectives.

        Raises:
            InputError: ``other`` is no plan.
        """
        from autoshard.diff import diff

        if not isinstance(other, Plan):
            raise InputError(
                f"a plan is compared with a {type(other).__name__}",
                fix="pass the result of .plan(...), or autoshard.Plan.load(path)",
            )

        return diff(self, other)

    def problem(self) -> Problem:
        """The sharding problem that this plan solves, in numbers.

        Costs are picoseconds, usages bytes on one device, and the usage limit is the plan's memory
        limit. ``autoshard.problem.save_problem`` writes it for another solver. The plan itself was
        found by pricing memory and counts its peak more closely than the problem's usages do.

        Raises:
            InputError: The plan cannot be priced again.
        """
        from autoshard.replan import Replanner

        return Replanner.of(self).priced.problem

    def pareto(
        self,
        *,
        points: int = 8,
        time_limit_s: float = 60.0,
        say: Callable[[str], None] = lambda what: None,
    ) -> PlanFront:
        """Time against memory: plans from the fastest to the leanest, and the price of a GiB.

        Args:
            points: Memory limits to plan for at most.
            time_limit_s: Time for all of them together [s].
            say: Told what is being done.

        Raises:
            InputError: The plan cannot be priced again.
        """
        from autoshard.replan import Replanner
        from autoshard.tradeoff import plan_front

        return plan_front(Replanner.of(self), points=points, time_limit_s=time_limit_s, say=say)

    def to_partition_specs(self) -> str:
        """Source text that gives the ``PartitionSpec`` of every argument and result.

        The text defines ``in_specs`` and ``out_specs`` (and ``keyword_specs``, if the call has
        keywords), trees like the arguments and the result, ready for ``jax.jit`` under
        ``jax.set_mesh(mesh)``. A plan that was loaded does not know these trees, and a container of
        the caller's own cannot be written down: then it defines ``specs_of(name, tree)``, which
        makes the tree for one argument, or for ``result``.
        """
        from autoshard.annotations import partition_specs_text

        return partition_specs_text(self)

    def to_flax_rules(self, argument: str | None = None) -> str:
        """Source text that gives flax's logical axes of every parameter, and the rules for them.

        The text defines ``LOGICAL_AXES`` by path (``Dense_0/kernel``), for
        ``nn.with_logical_partitioning``; ``RULES``, for ``nn.logical_axis_rules``; and
        ``partitioned(params)``, which gives the same to parameters that are there already.

        Args:
            argument: The parameters, e.g. ``state.params``; None: what is called ``params``, else
                the first argument.

        Raises:
            InputError: No argument is called so.
        """
        from autoshard.annotations import flax_rules_text

        return flax_rules_text(self, argument)

    def check(self, signature: Sequence[str], mesh: MeshShape) -> None:
        """Refuse a program or mesh this plan was not made for.

        Raises:
            PlanMismatchError: Names the first difference.
        """
        if mesh != self.mesh:
            raise PlanMismatchError(
                f"the plan is for the mesh {self.mesh}, not {mesh}",
                fix="plan again for this mesh",
            )
        for position, (ours, theirs) in enumerate(zip(self.signature, signature, strict=False)):
            if ours != theirs:
                raise PlanMismatchError(
                    "the plan is for another program",
                    at=f"line {position}: the plan has {ours!r}, the program {theirs!r}",
                    fix="plan again for this program",
                )
        if len(self.signature) != len(signature):
            raise PlanMismatchError(
                "the plan is for another program",
                at=f"the plan has {len(self.signature)} lines, the program {len(signature)}",
                fix="plan again for this program",
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        fields = plain(self)
        return {"format": FORMAT, "kind": "autoshard plan", "digest": _digest(fields), **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            InputError: It is no plan, of another format, or changed since it was written.
        """
        if not isinstance(data, Mapping):
            raise InputError(
                f"a {type(data).__name__} is no plan", fix="give what Plan.to_json returned"
            )
        if data.get("kind") != "autoshard plan" or data.get("format") != FORMAT:
            raise InputError(
                f"not an autoshard plan of format {FORMAT}",
                at=f"kind {data.get('kind')!r}, format {data.get('format')!r}",
                fix="use a file that Plan.save wrote with this version",
            )
        rest = {k: v for k, v in data.items() if k not in ("format", "kind", "digest")}
        plan = record(cls, rest, "plan")
        if data.get("digest") != _digest(rest):
            raise InputError(
                "the plan was changed after it was saved",
                at=f"digest {data.get('digest')!r}",
                fix="plan again; to fix a sharding by hand, pin it with in_shardings",
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        _write_whole(file_path(path, "where to save the plan"), text.encode())

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted schedule of a step as a Chrome trace, for Perfetto.

        Raises:
            InputError: There is no folder to write to.
        """
        from autoshard.trace import trace

        text = json.dumps(trace(self), allow_nan=False)
        _write_whole(file_path(path, "where to write the trace"), text.encode())

    def write_stablehlo(self, path: str | os.PathLike[str]) -> None:
        """Write the program with all its shardings: text to ``.mlir``, bytecode to ``.mlirbc``.

        Raises:
            InputError: Another suffix, or a plan without its whole program.
        """
        from autoshard.module_text import stablehlo

        target = file_path(path, "where to write the program")
        _write_whole(target, stablehlo(self, target.suffix))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; it is checked against a program when it is used.

        Raises:
            InputError: The file is not a plan.
        """
        source = file_path(path, "the plan's file")
        try:
            data = json.loads(source.read_text(encoding="utf-8"), parse_constant=_no_number)
        except FileNotFoundError as err:
            raise InputError(
                f"there is no file {path}",
                fix="check the path; Plan.save and autoshard plan --save write plans",
            ) from err
        except (OSError, ValueError, RecursionError) as err:
            raise InputError(
                f"cannot read a plan: {err}", at=str(path), fix="use a file that Plan.save wrote"
            ) from err
        if not isinstance(data, dict):
            raise InputError("not a plan", at=str(path), fix="use a file that Plan.save wrote")
        return cls.from_json(data)

    def __str__(self) -> str:
        from autoshard.plan_text import plan_text

        return plan_text(self)


def _write_whole(target: Path, data: bytes) -> None:
    if not target.parent.is_dir():
        raise InputError(
            f"there is no folder {target.parent} to save a plan in",
            at=str(target),
            fix="make the folder first",
        )
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def spec(sharding: Sharding) -> str:
    """A sharding as a short text: ``P('data', None, 'model')``."""
    return "P(" + ", ".join(repr(e) for e in to_partition_spec(sharding)) + ")"


def local_text(boundary: BoundaryPlan, mesh: MeshShape) -> str:
    """The shape of one device's piece."""
    return f"{boundary.dtype}{list(local_shape(boundary.shape, boundary.sharding, mesh))}"


def _digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 of a plan's JSON form without white space, keys in order."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
