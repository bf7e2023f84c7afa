"""What a plan consists of, as plain data: arguments, ops, reshards, collectives, totals."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cost_models.protocol import CollectiveKind
from autoshard.shardings import Sharding


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """An argument or result of the program, sharded.

    Attributes:
        name: As the caller knows it.
        shape: Global shape.
        dtype: Element type.
        sharding: Mesh axes per dimension.
        nbytes: Bytes on one device.
        donated: Whether its buffer is reused (arguments).
        pinned: Whether the caller asked for this sharding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    nbytes: int
    donated: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One op, sharded and priced; times are of one execution on one device.

    Attributes:
        index: Its position in the walk order of the program.
        name: E.g. ``stablehlo.dot_general``.
        source: ``file.py:line``.
        shapes: Global type of each result, e.g. ``f32[8,16]``.
        factors: Which mesh axes split which factor, e.g. ``{"m=64": ("data",)}``, as pairs.
        operands: Sharding each operand must have.
        results: Sharding each result has.
        partial: Sharding the result has before a reduce-scatter; None if there is none.
        reduced: Groups of mesh axes over which partial results are combined, one after another.
        piecewise: Whether each device runs it on its own pieces, in a manual computation.
        trips: How often it runs in one call.
        flops: On one device, one execution [FLOP].
        hbm_bytes: Memory traffic of one execution [bytes].
        compute_s: Arithmetic time [s].
        hbm_s: Memory time [s].
        seconds: Time of the op without communication [s].
        reduce_s: Time to combine partial results [s].
        nbytes: Bytes its results hold on one device; 0 for what fuses away.
    """

    index: int
    name: str
    source: str
    shapes: tuple[str, ...]
    factors: tuple[tuple[str, tuple[str, ...]], ...]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    partial: Sharding | None
    reduced: tuple[tuple[str, ...], ...]
    piecewise: bool
    trips: int
    flops: float
    hbm_bytes: float
    compute_s: float
    hbm_s: float
    seconds: float
    reduce_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """One value brought from the sharding it has to one that a reader wants.

    Attributes:
        value: Id of the value in the graph.
        block: (op that holds the reader, region), -1 at the top: where it happens.
        reader: Index of the first op that reads it; the number of ops for the end of the program.
        source: Sharding it has.
        chain: The shardings after each single step; the last is what the reader wants.
        trips: How often it happens in one call.
    """

    value: int
    block: tuple[int, int]
    reader: int
    source: Sharding
    chain: tuple[Sharding, ...]
    trips: int


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective that the plan asks for.

    Attributes:
        kind: Which one.
        axes: Mesh axes it runs over.
        devices: How many devices take part in a group.
        nbytes: Bytes on one device of the larger side, one execution.
        trips: How often it runs in one call; 0 in a branch that is not its conditional's costliest.
        seconds: Time of one execution [s].
        op: Index of the op it belongs to (the reader, or the maker of partial results); the number
            of ops for the end of the program.
        value: Id of the value in the graph that moves or is combined.
        dtype: Element type moved.
        why: Which value moves and for whom.
        source: ``file.py:line``.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    devices: int
    nbytes: float
    trips: int
    seconds: float
    op: int
    value: int
    dtype: str
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """Totals of one call on one device, by our model.

    Attributes:
        flops: Of dots and convolutions [FLOP]; of a conditional's branches the costliest counts.
        hbm_bytes: Memory traffic [bytes].
        collective_bytes: Bytes one device sends in collectives.
        peak_bytes: Arguments + results + temporaries - aliased, at the worst moment [bytes].
        compute_s: Sum of the time in ops, without communication [s].
        communication_s: Sum of the time in collectives [s].
        dispatch_s: Time to start the call [s].
        step_s: Time of the call by its schedule [s]: ``compute_s + exposed_s + dispatch_s``.
        exposed_s: Time of the schedule in which the device waits for communication [s].
    """

    flops: float
    hbm_bytes: float
    collective_bytes: float
    peak_bytes: int
    compute_s: float
    communication_s: float
    dispatch_s: float
    step_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """Communication that runs beside arithmetic, or beside other communication [s]."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def sum_s(self) -> float:
        """Time of the call if nothing overlapped [s]; what a solver minimizes, and the start."""
        return self.compute_s + self.communication_s + self.dispatch_s


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that takes time in the schedule of a step.

    Attributes:
        name: What it is.
        kind: ``compute``, ``loop``, or the kind of the collective.
        streams: What it occupies: ``compute``, links.
        op: Index of the op that it is, or serves; the number of ops for the end of the program.
        start_s: When it starts, from the start of the program [s]; in a loop, in its first round.
        seconds: How long it takes [s]; a loop with all its rounds.
        executions: How often it happens in one call.
    """

    name: str
    kind: str
    streams: tuple[str, ...]
    op: int
    start_s: float
    seconds: float
    executions: int


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Live bytes on one device while one op runs.

    Attributes:
        op: Index of the op.
        nbytes: Live bytes.
    """

    op: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A buffer that is live when memory is fullest.

    Attributes:
        name: What it is.
        nbytes: Bytes on one device.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SolverReport:
    """How the decision was found.

    Attributes:
        solver: Name of the solver.
        status: Why it stopped, as a sentence.
        gap: The objective is proved to be at most this fraction above the best; None if nothing is
            proved.
        objective_s: What the solver minimized [s].
        nodes: Decisions.
        edges: Pairs of decisions that have a common price.
        seconds: Time it took [s].
    """

    solver: str
    status: str
    gap: float | None
    objective_s: float
    nodes: int
    edges: int
    seconds: float
