"""The local polytope of a network, solved by HiGHS: as a linear and as an integer program.

Each pair of nodes becomes flow between the states of the two (Schlesinger's relaxation; Werner, "A
linear programming approach to max-sum problem: a review", 2007): its linear relaxation is the
tightest known that stays linear in the size of the matrices, and with memory rows in it, its duals
are the best prices of memory. States whose rows of a matrix are equal share their flow.

HiGHS counts in floating point, so nothing here proves anything exactly: duals are rounded to
integers and bound anew (:meth:`autoshard.solvers.dual.Dual.install`); what the integer program
proves holds up to its tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix

from autoshard.solvers.network import INF, Ints, Network
from autoshard.solvers.reduce import classes
from autoshard.solvers.solution import Deadline

MOST_FLOWS = 600_000
"""Networks with more flow variables than this are not handed to HiGHS."""

_TOP = 1e6  # largest cost in the unit HiGHS gets
_TOLERANCE = 1e-6  # relative: HiGHS meets its rows and bounds up to this

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Flow:
    """The flow of one pair, between kinds of states.

    Attributes:
        left: One node.
        right: The other.
        left_kind: Kind of each state of the one.
        right_kind: Kind of each state of the other.
        pairs: Allowed pairs of kinds, ``[2, F]``.
        cost: What they cost, ``[F]``.
        row: First of its rows: one per kind of the one, then one per kind of the other.
    """

    left: int
    right: int
    left_kind: NDArray[np.intp]
    right_kind: NDArray[np.intp]
    pairs: NDArray[np.intp]
    cost: Ints
    row: int

    @property
    def kinds(self) -> tuple[int, int]:
        """How many kinds there are at either end."""
        return int(self.left_kind.max()) + 1, int(self.right_kind.max()) + 1


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A solved linear relaxation.

    Attributes:
        value: Its optimum with the network's offset, as HiGHS counts it.
        prices: Per memory row, the cost of one byte.
        messages: Per pair (i, j) in either order, what moves from the edge to i, per state of i.
        shares: Per node, the share of each state.
    """

    value: float
    prices: Floats
    messages: dict[tuple[int, int], Floats]
    shares: dict[int, Floats]

    def states(self) -> dict[int, int]:
        """The state of each node with the largest share."""
        return {node: int(share.argmax()) for node, share in self.shares.items()}

    @property
    def whole(self) -> bool:
        """Every node has one state."""
        return all(float(share.max()) > 1 - 1e-5 for share in self.shares.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What the integer program found.

    Attributes:
        states: The best choice; None if none was found.
        bound: Lower bound with the network's offset, with room for HiGHS's tolerances; None if
            HiGHS says that there is no choice.
    """

    states: dict[int, int] | None
    bound: int | None


class _Quiet(highspy.Highs):  # type: ignore[misc, unused-ignore]
    """HiGHS that prints nothing, not even while it is being made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:
        """Called while it is being made."""
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class Polytope:
    """The model of a network.

    Attributes:
        net: The network; not changed.
        place: First variable of each node.
        columns: How many variables there are.
    """

    def __init__(self, net: Network) -> None:
        self.net = net
        self.place: dict[int, int] = {}
        count = 0
        for node, cost in net.costs.items():
            self.place[node] = count
            count += len(cost)
        self._own = count  # variables of nodes; those of flows come after
        self._flows: list[_Flow] = []
        known: dict[int, tuple[NDArray[np.intp], NDArray[np.intp], Ints]] = {}
        row = len(net.costs)
        for i, links in net.links.items():
            for j, matrix in links.items():
                if i < j:
                    if id(matrix) not in known:
                        rows, row_kind = classes(matrix)
                        columns, column_kind = classes(matrix.T)
                        known[id(matrix)] = row_kind, column_kind, matrix[np.ix_(rows, columns)]
                    left, right, core = known[id(matrix)]
                    pairs = np.stack(np.nonzero(core < INF))
                    self._flows.append(
                        _Flow(i, j, left, right, pairs, core[pairs[0], pairs[1]], row)
                    )
                    row += sum(core.shape)
        self._memory = row
        self.columns = count + sum(flow.pairs.shape[1] for flow in self._flows)
        allowed = [cost[cost < INF] for cost in net.costs.values()]
        largest = [int(cost.max(initial=0)) for cost in allowed]
        largest += [int(flow.cost.max(initial=0)) for flow in self._flows]
        self.unit = max(1.0, max(largest, default=0) / _TOP)
        self._sizes = [max(1.0, float(c)) for c in net.capacity.tolist()]

    def relax(self, deadline: Deadline) -> Relaxation | None:
        """Solve the linear relaxation; None if HiGHS does not finish it."""
        highs = self._load(deadline)
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = highs.getSolution()
        values, duals = np.array(solution.col_value), np.array(solution.row_dual) * self.unit
        messages = {}
        for flow in self._flows:
            left, right = flow.kinds
            split = flow.row + left
            messages[flow.left, flow.right] = duals[flow.row : split][flow.left_kind]
            messages[flow.right, flow.left] = duals[split : split + right][flow.right_kind]
        return Relaxation(
            value=self.net.offset + highs.getInfo().objective_function_value * self.unit,
            prices=np.maximum(0.0, -duals[self._memory :] / np.array(self._sizes)),
            messages=messages,
            shares=self._per_node(values),
        )

    def search(
        self,
        deadline: Deadline,
        *,
        seed: int,
        hint: dict[int, int] | None = None,
    ) -> Found:
        """Search for a cheapest choice that keeps to the memory rows.

        Args:
            deadline: When to stop.
            seed: For the search.
            hint: States to start from.

        Returns:
            The result.
        """
        highs = self._load(deadline)
        highs.setOptionValue("random_seed", seed)
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.setOptionValue("mip_abs_gap", min(0.5, 0.5 / self.unit))
        columns = np.arange(self._own, dtype=np.int32)
        kind = np.full(self._own, highspy.HighsVarType.kInteger.value, np.uint8)
        highs.changeColsIntegrality(self._own, columns, kind)
        if hint is not None:
            start = highspy.HighsSolution()
            start.col_value = self._values(hint).tolist()
            highs.setSolution(start)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Found(None, None)
        found = info.mip_dual_bound * self.unit
        if not np.isfinite(found):
            return Found(None, self.net.offset)
        bound = self.net.offset + max(0, int(np.floor(found - _TOLERANCE * abs(found) - 1)))
        states = None
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            values = np.array(highs.getSolution().col_value)
            states = {n: int(share.argmax()) for n, share in self._per_node(values).items()}
        return Found(states, bound)

    def _per_node(self, values: Floats) -> dict[int, Floats]:
        net, place = self.net, self.place
        return {n: values[place[n] : place[n] + net.size(n)] for n in net.costs}

    def _values(self, states: dict[int, int]) -> Floats:
        """The point of the polytope that a choice is."""
        values = np.zeros(self.columns)
        values[[self.place[node] + state for node, state in states.items()]] = 1
        first = self._own
        for flow in self._flows:
            kinds = flow.left_kind[states[flow.left]], flow.right_kind[states[flow.right]]
            here = (flow.pairs[0] == kinds[0]) & (flow.pairs[1] == kinds[1])
            values[first : first + len(here)] = here
            first += len(here)
        return values

    def _load(self, deadline: Deadline) -> highspy.Highs:
        """HiGHS with the linear program in it."""
        net = self.net
        highs = _Quiet()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("time_limit", max(0.01, deadline.left_s))
        matrix = self._matrix()
        costs = np.concatenate([*net.costs.values(), *(flow.cost for flow in self._flows)])
        dead = costs >= INF
        count = self._memory + len(self._sizes)
        lower, upper = np.zeros(count), np.zeros(count)
        lower[: len(net.costs)] = upper[: len(net.costs)] = 1
        lower[self._memory :] = -np.inf
        upper[self._memory :] = net.capacity / np.array(self._sizes)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.columns, count
        model.col_cost_ = np.where(dead, 0, costs) / self.unit
        model.col_lower_ = np.zeros(self.columns)
        model.col_upper_ = np.where(dead, 0.0, 1.0)
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = matrix.indptr
        model.a_matrix_.index_ = matrix.indices
        model.a_matrix_.value_ = matrix.data
        status = highs.passModel(model)
        assert status != highspy.HighsStatus.kError
        return highs

    def _matrix(self) -> csc_matrix:
        """What each variable counts in each row."""
        rows: list[NDArray[np.intp]] = []
        columns: list[NDArray[np.intp]] = []
        values: list[Floats] = []

        def add(row: NDArray[np.intp], column: NDArray[np.intp], value: Floats) -> None:
            rows.append(row)
            columns.append(column)
            values.append(value)

        for row, node in enumerate(self.net.costs):
            size = self.net.size(node)
            own = self.place[node] + np.arange(size)
            add(np.full(size, row), own, np.ones(size))
        first = self._own
        for flow in self._flows:
            left, _ = flow.kinds
            through = first + np.arange(flow.pairs.shape[1])
            first += flow.pairs.shape[1]
            ones = np.ones(len(through))
            for at, kinds, node, ends in (
                (flow.row, flow.left_kind, flow.left, flow.pairs[0]),
                (flow.row + left, flow.right_kind, flow.right, flow.pairs[1]),
            ):
                add(at + ends, through, ones)
                own = self.place[node] + np.arange(len(kinds))
                add(at + kinds, own, -np.ones(len(kinds)))
        for node, parts in self.net.segments.items():
            for part in parts:
                used = np.flatnonzero(part.usage)
                for row in range(part.first, part.end):
                    share = part.usage[used] / self._sizes[row]
                    add(np.full(len(used), self._memory + row), self.place[node] + used, share)
        entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
        return csc_matrix(entries, shape=(self._memory + len(self._sizes), self.columns))
