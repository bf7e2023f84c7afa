"""What a pass is told besides the module, and what it gives back besides the module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax.extend.mlir import ir

from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InputError
from autoshard.plan import Plan
from autoshard.program import Boundary, arrays, main_block, source_of, terminator
from autoshard.shardings import MeshShape
from autoshard.solvers import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The caller's view of a program's arguments and results.

    Attributes:
        arguments: One per argument of ``main``: name, donation, pin.
        results: One per result.
        ties: Pairs (argument position, result position) that share a buffer.
    """

    arguments: tuple[Boundary, ...]
    results: tuple[Boundary, ...]
    ties: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, module: ir.Module) -> Boundaries:
        """What can be said of a module that nobody says anything of: ``arg0``, ``result0``, ..."""
        block = main_block(module)
        results = arrays(terminator(block).operands)
        return cls(
            tuple(Boundary(f"arg{i}") for i, _ in enumerate(arrays(block.arguments))),
            tuple(Boundary(f"result{i}") for i, _ in enumerate(results)),
        )


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite that a pass was allowed.

    Attributes:
        number: How many were allowed before it, in this pass.
        pattern: The pattern's name.
        op: The op at which it starts, without its dialect: ``dot_general``.
        source: ``file.py:line`` of that op.
    """

    number: int
    pattern: str
    op: str
    source: str

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"rewrite {self.number} ({self.pattern} on {self.op}{at})"


@dataclass(slots=True)
class Rewrites:
    """Counts the rewrites of a pass, tells a listener, and stops them at a limit.

    Attributes:
        limit: Rewrites that are allowed; None for all.
        listener: Told of every rewrite before it is made.
        counts: Rewrites allowed, by pattern.
        last: The last one.
    """

    limit: int | None = None
    listener: Callable[[Rewrite], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    last: Rewrite | None = None

    @property
    def total(self) -> int:
        """Rewrites allowed so far."""
        return self.counts.total()

    def allow(self, pattern: str, op: ir.Operation) -> bool:
        """Whether a rewrite that is about to be made may be made; it is counted if so."""
        number = self.total
        if self.limit is not None and number >= self.limit:
            return False
        self.counts[pattern] += 1
        if self.listener is not None or self.limit == number + 1:
            name = op.name.rpartition(".")[2]
            self.last = Rewrite(number, pattern, name, source_of(op))
            if self.listener is not None:
                self.listener(self.last)
        return True


@dataclass(slots=True)
class PassContext:
    """What the passes of one pipeline run share.

    Attributes:
        mesh: The mesh the program is for; None if it is for one device.
        cost_model: Prices; None for those of the CPU.
        memory_limit: What one device may hold at its peak [bytes]; None for no word on it.
        seed: Where a pass makes random choices, they come from here.
        boundaries: The caller's view of arguments and results; None: the module's own.
        rewrites: Counts rewrites; replaced by the pass manager for each pass.
        solver: A solver or the name of one, for passes that solve; None for the default.
        time_limit_s: Time that a solver may take [s].
        progress: Called with signs of life from a solver.
        plan: A plan to write into the module; None: the sharding pass makes one.
        results: What passes found out for the caller, by pass name.
    """

    mesh: MeshShape | None = None
    cost_model: CostModel | None = None
    memory_limit: int | None = None
    seed: int = 0
    boundaries: Boundaries | None = None
    rewrites: Rewrites = field(default_factory=Rewrites)
    solver: Any = None
    time_limit_s: float = 60.0
    progress: Callable[[Progress], None] | None = None
    plan: Plan | None = None
    results: dict[str, Any] = field(default_factory=dict)

    def allow(self, pattern: str, op: ir.Operation) -> bool:
        """Ask before each single rewrite; where the answer is no, leave the op as it is.

        This is what a bisection counts: it runs a pass with ever fewer rewrites allowed, so a pass
        must ask in the same order every time.

        Args:
            pattern: The pattern's name; the pass's own where it has one kind of rewrite.
            op: The op at which the rewrite starts.
        """
        return self.rewrites.allow(pattern, op)

    def needed_mesh(self, name: str) -> MeshShape:
        """The mesh, for a pass that can do nothing without.

        Raises:
            InputError: There is none.
        """
        if self.mesh is None:
            raise InputError(
                f"the pass {name} needs to know the mesh",
                fix="give one, e.g. --mesh data=4,model=2",
            )
        return self.mesh

    def boundaries_of(self, module: ir.Module) -> Boundaries:
        """The caller's view of arguments and results, or what the module says itself."""
        return Boundaries.of(module) if self.boundaries is None else self.boundaries

    def publish(self, name: str, result: Any) -> None:
        """Give a result to the caller under a pass's name; a later one replaces it."""
        self.results[name] = result

    def result(self, name: str, kind: type[T]) -> T | None:
        """What a pass gave to the caller; None if it gave nothing of that type."""
        found = self.results.get(name)
        return found if isinstance(found, kind) else None
