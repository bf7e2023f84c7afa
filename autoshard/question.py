"""One tensor of a plan under another sharding: which there are, and what each would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError
from autoshard.plan import Plan, spec
from autoshard.problem import FORBIDDEN, evaluate
from autoshard.replan import Mask, Replanner
from autoshard.reshard import layouts, sent_bytes
from autoshard.shardings import MeshShape, Sharding
from autoshard.solvers.exact import ExactSolver
from autoshard.solvers.marginals import marginals
from autoshard.subject import Subject


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan in which a tensor is sharded otherwise.

    Attributes:
        sharding: The sharding that was pinned.
        step_s: Predicted time of a call [s]; None if there is no such plan.
        step_delta_s: That less the present plan's [s].
        peak_bytes: Predicted peak of memory [bytes].
        peak_delta_bytes: That less the present plan's [bytes].
        status: What the solver proved, or why there is no such plan.
    """

    sharding: Sharding
    step_s: float | None
    step_delta_s: float | None
    peak_bytes: int | None
    peak_delta_bytes: int | None
    status: str


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """A tensor whose sharding is in question.

    Attributes:
        replanner: The plan, opened; a pin on the tensor is lifted.
        subject: The tensor; for a result that replaces a donated argument, that argument.
        node: The decision that gives it its sharding; None for a result, which may be moved at the
            end, and for what is made anew wherever it is read.
        ids: The layout it has under each choice of that node, ``[S]``.
        present: The sharding it has in the plan.
        cheapest: Per choice of that node, a proved cheapest choice of all nodes that contains it;
            None where only solving anew can tell.
    """

    replanner: Replanner
    subject: Subject
    node: int | None
    ids: NDArray[np.int64]
    present: Sharding
    cheapest: Mapping[int, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, replanner: Replanner, subject: Subject) -> Question:
        """The question about a tensor of an opened plan."""
        plan, graph = replanner.plan, replanner.graph
        if subject.kind == "result":
            tied = next((a for a, r in graph.ties if r == subject.position), None)
            if tied is None:
                present = plan.results[subject.position].sharding
                return cls(replanner, subject, None, np.zeros(0, np.int64), present)
            subject = replace(subject, kind="argument", position=tied, value=graph.arguments[tied])
        if subject.kind == "argument":
            replanner = _lifted(replanner, subject.position)
        number, position = replanner.priced.maker[subject.value]
        if number < 0:
            rank = len(graph.values[subject.value].shape)
            none = np.zeros(0, np.int64)
            return cls(replanner, subject, None, none, ((),) * rank)
        ids = replanner.priced.nodes[number].layouts[position]
        rank = len(graph.values[subject.value].shape)
        present = layouts(rank, plan.mesh).shardings[int(ids[replanner.choices[number]])]
        cheapest = None
        if isinstance(replanner.means.solver, ExactSolver) and plan.origin is not None:
            limit_s = plan.origin.time_limit_s
            cheapest = marginals(replanner.priced.problem, number, time_limit_s=limit_s)
        return cls(replanner, subject, number, ids, present, cheapest)

    def candidates(self) -> list[Sharding]:
        """Other shardings that it could have, the one that looks cheapest first.

        They are ordered by what they would cost if nothing else changed.
        """
        tensor = self.replanner.graph.values[self.subject.value]
        table = layouts(len(tensor.shape), self.replanner.plan.mesh)
        if self.subject.kind == "result":
            model = self.replanner.means.cost_model
            size = sent_bytes(tensor.nbytes, tensor.dtype, model.compiler)
            prices = self.replanner.priced.resharder.seconds(tensor.shape, size)
            row = prices[table.index[self.present]]
            even = [
                i
                for i in _in_order(table.shardings, self.replanner.plan.mesh)
                if table.dividing(tensor.shape)[i]
            ]
            ranked = sorted(even, key=lambda i: (float(row[i]), i))
        elif self.node is None:
            return []
        else:
            alone = self.replanner.alone(self.node, self.replanner.choices)
            first: dict[int, int] = {}
            for layout, cost in zip(self.ids.tolist(), alone, strict=True):
                first[layout] = min(cost, first.get(layout, cost))
            ranked = sorted((i for i in first if first[i] < FORBIDDEN), key=lambda i: (first[i], i))
        found = [table.shardings[i] for i in ranked]
        whole = ((),) * len(tensor.shape)
        found.sort(key=lambda s: s != whole)  # stable: what holds it whole always comes first
        return [s for s in found if s != self.present]

    def next_best(self) -> Alternative | None:
        """The best plan in which it does not have its present sharding; None if it must."""
        if self.node is None:
            return None
        table = layouts(len(self.present), self.replanner.plan.mesh)
        others = self.ids != table.index[self.present]
        if not others.any():
            return None
        try:
            plan = self._best_of(others)
        except InfeasibleError:
            return None
        return self._alternative(plan, self._in(plan))

    def price(
        self, wanted: Sequence[Sharding], say: Callable[[str], None]
    ) -> Iterator[Alternative]:
        """The best plan for each of some shardings."""
        for number, sharding in enumerate(wanted):
            say(f"{spec(sharding)}, {number + 1} of {len(wanted)}")
            try:
                yield self._alternative(self._pinned(sharding), sharding)
            except InfeasibleError as error:
                yield Alternative(sharding, None, None, None, None, error.problem)

    def _pinned(self, sharding: Sharding) -> Plan:
        layout = layouts(len(sharding), self.replanner.plan.mesh).index.get(sharding, -1)
        if self.node is not None and (self.ids == layout).any():
            return self._best_of(self.ids == layout)
        position = self.subject.position
        if self.subject.kind == "argument":
            return self.replanner.wishing(arguments={position: sharding}).again()
        if self.subject.kind == "result":
            return self.replanner.wishing(results={position: sharding}).again()
        raise InfeasibleError(
            "no way to run the op gives its result this sharding",
            fix="put a with_sharding_constraint behind it to have it moved there",
        )

    def _best_of(self, allowed: Mask) -> Plan:
        """The best plan in which the node makes one of some choices.

        Raises:
            InfeasibleError: There is none.
        """
        assert self.node is not None
        if self.cheapest is not None:
            problem = self.replanner.priced.problem
            states = np.flatnonzero(allowed).tolist()
            known = [self.cheapest[s] for s in states if s in self.cheapest]
            if known:
                best = min(known, key=lambda choices: evaluate(problem, choices).cost)
                plan = self.replanner.of_choices(best)
                if plan is not None:
                    return plan
        return self.replanner.again({self.node: allowed})

    def _in(self, plan: Plan) -> Sharding:
        """The sharding it has in another plan of the same program."""
        if self.subject.kind == "argument":
            return plan.arguments[self.subject.position].sharding
        tensor = self.replanner.graph.values[self.subject.value]
        made = next(op for op in plan.ops if op.index == tensor.op)
        return made.results[tensor.position]

    def _alternative(self, plan: Plan, sharding: Sharding) -> Alternative:
        now, then = self.replanner.plan.predicted, plan.predicted
        return Alternative(
            sharding,
            then.step_s,
            then.step_s - now.step_s,
            then.peak_bytes,
            then.peak_bytes - now.peak_bytes,
            plan.solver.status,
        )


def _lifted(replanner: Replanner, argument: int) -> Replanner:
    """The plan without the caller's pins on an argument and on the result that replaces it."""
    origin = replanner.plan.origin
    assert origin is not None
    tied = [r for a, r in origin.ties if a == argument]
    rows = [origin.arguments[argument], *(origin.results[r] for r in tied)]
    if all(row.pin is None or row.required for row in rows):
        return replanner
    return replanner.wishing({argument: None}, dict.fromkeys(tied))


def _in_order(shardings: Sequence[Sharding], mesh: MeshShape) -> list[int]:
    """Those that name the axes of each dimension in mesh order."""
    return [
        i
        for i, sharding in enumerate(shardings)
        if all(tuple(sorted(d, key=mesh.names.index)) == d for d in sharding)
    ]
