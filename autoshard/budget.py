"""Finding a plan whose memory fits: bytes get a price where and when too many are held.

The cheapest plan without a limit comes first. While a plan holds more than the limit, every buffer
that is held at an overfull moment, and every argument, gets a price per byte on top of what it has;
the cheapest plan under these prices is next. Once one fits, the last rise of the prices is halved a
few times in search of cheaper plans that fit. What memory costs in seconds is thus found out, and
the solver needs no limit: its problem stays one of pairwise costs. The bound of the cost that it
proves without a limit holds with one as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.coarse import coarse, merges
from autoshard.errors import InfeasibleError
from autoshard.graph import Graph
from autoshard.memory import Footprint
from autoshard.plan import Plan
from autoshard.pricing import Priced
from autoshard.problem import FORBIDDEN, Problem, evaluate
from autoshard.reshard import layouts
from autoshard.solvers import Progress, Solution, Solver, Status
from autoshard.solvers.checked import Checked
from autoshard.solvers.exact import ExactSolver
from autoshard.solvers.solution import prepare

RAISES = 10
"""How often prices are raised at most."""

HALVINGS = 2
"""How often the last rise of the prices is halved once a plan fits."""

PATIENCE = 4
"""After so many raises that made no plan leaner the search gives up."""

GOALS = (1.0, 0.85, 0.7)
"""Shares of the limit that prices are raised towards, one after another until a plan fits: prices
grow with what exceeds the goal, and what exceeds a limit that is nearly met is next to nothing."""

START_SHARE = 0.2
"""Of the time, at most: for a first choice that uses some mesh axes as one."""

START_GAP = 0.01
"""What is proved of that choice on its own problem is enough: the search on all axes goes on."""

UNHELD = 0.3
"""Price of what could be held at an overfull moment but is not, as a share of what is: the plan
after might hold it then."""

HELD = 5
"""Tensors that an error names."""

MOST = 1 << 55
"""What the costs of a problem with prices span at most: solvers add them up in 64 bits."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What holding a byte costs [ps/B].

    Attributes:
        arguments: Of any argument.
        made: Per value of the graph, as it is made, ``[V]``.
        moved: Per value of the graph, in another sharding than it is made in, ``[V]``.
    """

    arguments: float
    made: NDArray[np.float64]
    moved: NDArray[np.float64]

    def towards(self, other: Prices, share: float) -> Prices:
        """Prices between these and others."""
        return Prices(
            self.arguments + share * (other.arguments - self.arguments),
            self.made + share * (other.made - self.made),
            self.moved + share * (other.moved - self.moved),
        )

    def raised(self, graph: Graph, memory: Footprint, limit: int, by: float) -> Prices:
        """These prices with ``by`` [ps/B] added per share of the limit that is held too much."""
        live = np.array([nbytes for _, nbytes in memory.timeline] or [0], np.float64)
        excess = np.maximum(live / limit - 1, 0.0)
        worst = max(float(excess.max()), memory.peak_bytes / limit - 1)
        made = np.zeros(len(self.made))
        for value, (start, stop) in enumerate(windows(graph, memory)):
            made[value] = UNHELD * excess[start : stop + 1].max(initial=0.0)
        moved = made.copy()
        for buffer in memory.buffers:
            most = excess[buffer.start : buffer.stop].max(initial=0.0)
            held = moved if buffer.resharded else made
            held[buffer.value] = max(held[buffer.value], most)
        return Prices(self.arguments + by * worst, self.made + by * made, self.moved + by * moved)


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has to do with.

    Attributes:
        graph: The program.
        priced: The problem.
        interpret: Turns a solver's choices into a plan and its memory.
        solver: The solver.
        limit: What one device may hold [bytes]; None for no limit.
        time_limit_s: Time for all rounds together [s].
        hint: A choice to start from.
        progress: Called with signs of life from the solver.
    """

    graph: Graph
    priced: Priced
    interpret: Callable[[Sequence[int]], tuple[Plan, Footprint]]
    solver: Solver
    limit: int | None
    time_limit_s: float
    hint: tuple[int, ...] | None = None
    progress: Callable[[Progress], None] | None = None

    def run(self) -> tuple[Plan, Solution]:
        """The cheapest plan found that fits, and its solution with a proved bound of its cost.

        Raises:
            InfeasibleError: None was found; says what is needed at least, and where.
        """
        if self.limit is not None and certain_bytes(self.graph, self.priced) > self.limit:
            raise self._too_large(self.limit, None)
        prepare(self.solver, self.priced.problem)
        deadline = time.perf_counter() + self.time_limit_s
        free = replace(self.priced.problem, usage_limit=None)
        # Under a limit the plan without one is only where the search starts from.
        share = self.time_limit_s if self.limit is None else self.time_limit_s / 2
        hint = self.hint if self.hint is not None else self._start(free, share)
        first = self._solve(free, share, hint)
        if not first.choices and self.priced.nodes:
            raise self._impossible(first)
        plan, memory = self.interpret(first.choices)
        if self.limit is None or memory.peak_bytes <= self.limit:
            return plan, first
        return self._within(self.limit, free, deadline, first, plan, memory)

    def _start(self, free: Problem, time_limit_s: float) -> tuple[int, ...] | None:
        """The best choice that uses some axes as one; None on few axes, or if there is none."""
        units = merges(self.priced.resharder.mesh)
        if not units:
            return None
        smaller = coarse(self.graph, self.priced, free, units)
        solver = self.solver
        if isinstance(solver, ExactSolver):
            solver = replace(solver, stop_at_gap=START_GAP)
        found = self._solve(smaller.problem, START_SHARE * time_limit_s, None, solver)
        return smaller.whole(found.choices) if found.choices else None

    def _within(
        self,
        limit: int,
        free: Problem,
        deadline: float,
        first: Solution,
        least: Plan,
        memory: Footprint,
    ) -> tuple[Plan, Solution]:
        enough = max(1.0, 2 * first.seconds)
        for share in GOALS:
            low, high, best, leaner = self._towards(
                int(share * limit), limit, free, deadline, first, memory
            )
            if leaner.predicted.peak_bytes < least.predicted.peak_bytes:
                least = leaner
            if best is not None or time.perf_counter() > deadline:
                break
        if best is None:
            raise self._too_large(limit, least)
        hint = best[1]
        for _ in range(HALVINGS):
            if time.perf_counter() > deadline:
                break
            middle = low.towards(high, 0.5)
            hint, plan, memory = self._under(free, middle, enough, hint)
            if memory.peak_bytes > limit:
                low = middle
                continue
            high = middle
            if plan.predicted.step_s <= best[0].predicted.step_s:
                best = plan, hint
        plan, choices = best
        found = evaluate(free, choices)
        status = Status.OPTIMAL if found.cost <= first.lower_bound else Status.FEASIBLE
        seconds = self.time_limit_s - (deadline - time.perf_counter())
        return plan, replace(
            first,
            status=status,
            choices=choices,
            cost=found.cost,
            peak_usage=found.peak_usage,
            seconds=seconds,
        )

    def _towards(
        self,
        goal: int,
        limit: int,
        free: Problem,
        deadline: float,
        first: Solution,
        memory: Footprint,
    ) -> tuple[Prices, Prices, tuple[Plan, tuple[int, ...]] | None, Plan]:
        """Raise prices until a plan fits the limit or none gets leaner.

        Returns:
            Prices before and after the last raise, the plan that fits and its choices, if there is
            one, and the leanest plan.
        """
        count = len(self.graph.values)
        low = high = Prices(0.0, np.zeros(count), np.zeros(count))
        by, idle, hint = max(1, first.cost) / limit, 0, first.choices
        least: Plan | None = None
        fewest = memory.peak_bytes
        for _ in range(RAISES):
            low, high, by = high, high.raised(self.graph, memory, goal, by), 2 * by
            hint, plan, memory = self._under(free, high, max(1.0, 2 * first.seconds), hint)
            if least is None or memory.peak_bytes < least.predicted.peak_bytes:
                least = plan
            if memory.peak_bytes <= limit:
                return low, high, (plan, hint), least
            idle = 0 if memory.peak_bytes < fewest else idle + 1
            fewest = min(fewest, memory.peak_bytes)
            if idle == PATIENCE or time.perf_counter() > deadline:
                break
        assert least is not None
        return low, high, None, least

    def _under(
        self, free: Problem, prices: Prices, time_limit_s: float, hint: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Plan, Footprint]:
        """The cheapest plan under some prices; the last one if none is found in time."""
        problem = priced_problem(self.graph, self.priced, free, prices)
        choices = self._solve(problem, time_limit_s, hint).choices or hint
        return choices, *self.interpret(choices)

    def _solve(
        self,
        problem: Problem,
        time_limit_s: float,
        hint: tuple[int, ...] | None,
        solver: Solver | None = None,
    ) -> Solution:
        chosen = self.solver if solver is None else solver
        return Checked(chosen, type(chosen).__name__).solve(
            problem, time_limit_s=time_limit_s, hint=hint, progress=self.progress
        )

    def _impossible(self, solution: Solution) -> InfeasibleError:
        if solution.status is Status.UNKNOWN:
            return InfeasibleError(
                "no plan was found in time", fix="give a longer time_limit_s or a smaller mesh"
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


def windows(graph: Graph, memory: Footprint) -> list[tuple[int, int]]:
    """Per value, the positions in the timeline from which and to which it is needed."""
    end = len(memory.timeline)
    first, last = [end] * (len(graph.ops) + 1), [-1] * (len(graph.ops) + 1)
    first[-1] = last[-1] = end
    for position, (index, _) in enumerate(memory.timeline):
        first[index], last[index] = min(first[index], position), max(last[index], position)
    readers: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        for value in op.operands:
            readers[value].append(op.index)
        for value in (v for region in op.returned for v in region):
            readers[value].append(op.index)
    for value in graph.results:
        readers[value].append(len(graph.ops))
    for op in reversed(graph.ops):
        if last[op.index] < 0:  # computed by what reads it
            inside = [r for v in op.results for r in readers[v]]
            first[op.index] = min((first[r] for r in inside), default=end)
            last[op.index] = max((last[r] for r in inside), default=-1)
        if op.parent >= 0:
            first[op.parent] = min(first[op.parent], first[op.index])
            last[op.parent] = max(last[op.parent], last[op.index])
    return [
        (
            0 if tensor.op < 0 else first[tensor.op],
            max((last[r] for r in readers[tensor.id]), default=-1),
        )
        for tensor in graph.values
    ]


def priced_problem(graph: Graph, priced: Priced, problem: Problem, prices: Prices) -> Problem:
    """``problem`` with the price of the bytes that each choice holds added to its cost.

    Where costs would span more than :data:`MOST`, all are counted in a larger unit.
    """
    mesh = priced.resharder.mesh

    def nbytes(value: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        tensor = graph.values[value]
        table = layouts(len(tensor.shape), mesh)
        return np.asarray(table.local_bytes(tensor.shape, tensor.nbytes)[ids], np.float64)

    costs = []
    for node, cost in zip(priced.nodes, problem.costs, strict=True):
        extra = np.zeros(len(cost))
        for value, ids in zip(node.values, node.layouts, strict=node.kind != "hub"):
            price = prices.made[value] + (prices.arguments if node.kind == "argument" else 0.0)
            if price:
                extra += price * nbytes(value, ids)
        if node.strategies is not None and extra.any():
            # Partial results are held beside what they are combined to.
            extra *= np.array([2.0 if groups else 1.0 for groups in node.strategies.reduced])
        costs.append(_plus(cost, extra))
    known: dict[object, NDArray[np.int64]] = {}
    matrices = []
    for (i, _), matrix, (value, wanted) in zip(
        problem.edges.tolist(), problem.edge_costs, priced.moved, strict=True
    ):
        price = prices.moved[value]
        if price:
            made = priced.nodes[i].layouts[_position(priced, i, value)]
            key = (id(matrix), id(made), id(wanted), float(price), graph.values[value].nbytes)
            if key not in known:
                extra = (made[:, None] != wanted[None, :]) * (price * nbytes(value, wanted))
                known[key] = _plus(matrix, extra)
            matrix = known[key]
        matrices.append(matrix)
    unit = -(-sum(_spans(costs) + _spans(matrices)) // MOST)
    if unit > 1:
        costs, matrices = _in_units(costs, unit), _in_units(matrices, unit)
    return replace(problem, costs=tuple(costs), edge_costs=tuple(matrices))


def _spans(tables: Sequence[NDArray[np.int64]]) -> list[int]:
    """How far the largest allowed entry of each table is above zero."""
    found: dict[int, int] = {}
    for table in tables:
        if id(table) not in found:
            found[id(table)] = int(table.max(initial=0, where=table < FORBIDDEN))
    return [found[id(table)] for table in tables]


def _in_units(tables: Sequence[NDArray[np.int64]], unit: int) -> list[NDArray[np.int64]]:
    """Tables in another unit; one that stands for several edges goes on doing so."""
    found: dict[int, NDArray[np.int64]] = {}
    for table in tables:
        if id(table) not in found:
            found[id(table)] = np.where(table >= FORBIDDEN, table, table // unit)
    return [found[id(table)] for table in tables]


def _position(priced: Priced, node: int, value: int) -> int:
    """Which of a node's layouts are those of ``value``; a hub has one."""
    number, position = priced.maker[value]
    return position if number == node else 0


def _plus(cost: NDArray[np.int64], extra: NDArray[np.float64]) -> NDArray[np.int64]:
    """Costs with prices added; what is forbidden stays so."""
    if not extra.any():
        return cost
    total = cost + np.rint(np.minimum(extra, FORBIDDEN / 10)).astype(np.int64)
    return np.where(cost >= FORBIDDEN, cost, total)


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
