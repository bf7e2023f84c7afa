"""Finding a plan whose memory fits: the solver's limit is moved until the plan's own count does.

The solver counts memory approximately, one interval per decision; the plan counts it step by step.
Where the plan holds more than the limit the solver's is lowered, where the solver finds none it is
raised again, and the gap between the two is halved until a plan fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import InfeasibleError
from autoshard.graph import Graph
from autoshard.plan import Plan
from autoshard.pricing import Priced
from autoshard.reshard import layouts
from autoshard.solvers import Progress, Solution, Solver, Status

ROUNDS = 12
"""How often the solver's limit is moved at most."""

CLOSE = 0.01
"""The search ends when the solver's limit is known to this fraction of the user's."""

HELD = 5
"""Tensors that an error names."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has to do with.

    Attributes:
        graph: The program.
        priced: The problem.
        interpret: Turns a solver's choices into a plan.
        solver: The solver.
        limit: What one device may hold [bytes]; None for no limit.
        time_limit_s: Time for all rounds together [s].
        progress: Called with signs of life from the solver.
    """

    graph: Graph
    priced: Priced
    interpret: Callable[[Sequence[int]], Plan]
    solver: Solver
    limit: int | None
    time_limit_s: float
    progress: Callable[[Progress], None] | None = None

    def run(self) -> tuple[Plan, Solution]:
        """The cheapest plan found that fits, and the solution it was read from.

        Raises:
            InfeasibleError: None was found; says what is needed at least, and where.
        """
        if self.limit is not None and certain_bytes(self.graph, self.priced) > self.limit:
            raise self._too_large(self.limit, None)
        if self.limit is not None:
            return self._within(self.limit)
        solution = self._solve(None, self.time_limit_s, None)
        if not solution.choices:
            raise self._impossible(solution)
        return self.interpret(solution.choices), solution

    def _solve(
        self, limit: int | None, time_limit_s: float, hint: Sequence[int] | None
    ) -> Solution:
        problem = replace(self.priced.problem, usage_limit=limit)
        return self.solver.solve(
            problem, time_limit_s=time_limit_s, hint=hint, progress=self.progress
        )

    def _within(self, limit: int) -> tuple[Plan, Solution]:
        deadline = time.perf_counter() + self.time_limit_s
        least: Plan | None = None
        hint: tuple[int, ...] | None = None
        low: int = 0  # a solver's limit at which it finds no choices
        high: int | None = None  # one at which the plan holds too much
        wanted: int | None = limit
        for _ in range(ROUNDS):
            left = deadline - time.perf_counter()
            if left <= 0 and least is not None:
                break
            solution = self._solve(wanted, max(0.5, left), hint)
            if not solution.choices:
                if wanted is None or solution.shortage is None:
                    raise self._impossible(solution)
                low, wanted = wanted, None if high is None else (wanted + high) // 2
            else:
                hint = solution.choices
                plan = self.interpret(hint)
                if plan.predicted.peak_bytes <= limit:
                    return plan, solution
                if least is None or plan.predicted.peak_bytes < least.predicted.peak_bytes:
                    least = plan
                high = solution.peak_usage
                wanted = high - (plan.predicted.peak_bytes - limit)
                if wanted <= low:
                    wanted = (low + high) // 2
            if high is not None and high - low <= CLOSE * limit:
                break
        raise self._too_large(limit, least)

    def _impossible(self, solution: Solution) -> InfeasibleError:
        if solution.status is Status.UNKNOWN:
            return InfeasibleError(
                f"no plan that fits {self.limit} bytes of memory per device was found in time",
                fix="give a longer time_limit_s, a larger mesh or a higher memory_limit",
            )
        return InfeasibleError(
            "the pins and constraints cannot all be met",
            fix="remove a pin from in_shardings, out_shardings or the function",
        )

    def _too_large(self, limit: int, least: Plan | None) -> InfeasibleError:
        needed = f"it needs at least {certain_bytes(self.graph, self.priced):,} bytes per device"
        if least is None:
            holders = argument_bytes(self.graph, self.priced)
        else:
            holders = [(h.name, h.nbytes) for h in least.holders]
            needed += (
                " for its arguments alone, and the leanest plan found needs "
                f"{least.predicted.peak_bytes:,}"
            )
        named = ", ".join(f"{name} ({nbytes:,} bytes)" for name, nbytes in holders[:HELD])
        return InfeasibleError(
            f"the program does not fit the memory limit of {limit:,} bytes per device: {needed}",
            at=f"held at the fullest moment: {named}",
            fix="raise memory_limit, use a larger mesh, or recompute activations with "
            "jax.checkpoint",
        )


def argument_bytes(graph: Graph, priced: Priced) -> list[tuple[str, int]]:
    """Name of each argument and the bytes a device holds of it at least, the largest first.

    Arguments are held from the first op to the last, whatever the plan, so their sum is a bound
    that no plan can pass under.
    """
    found = []
    for value, info in zip(graph.arguments, graph.argument_info, strict=True):
        tensor = graph.values[value]
        number, position = priced.maker[value]
        table = layouts(len(tensor.shape), priced.resharder.mesh)
        pieces = table.splits[priced.nodes[number].layouts[position]].prod(axis=1)
        found.append((info.name, -(-tensor.nbytes // int(pieces.max()))))
    return sorted(found, key=lambda h: -h[1])


def certain_bytes(graph: Graph, priced: Priced) -> int:
    """What a device needs at least [bytes]: all arguments, split as far as they may be."""
    return sum(nbytes for _, nbytes in argument_bytes(graph, priced))
