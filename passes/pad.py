"""``pad``: dimensions that the mesh does not divide, made longer where that is predicted to pay."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jax.extend.mlir import ir

from autoshard.cost_models import COST_MODELS
from autoshard.passes.context import PassContext
from autoshard.passes.contraction import DOT
from autoshard.passes.lengthened import can_lengthen, lengthen
from autoshard.passes.module_state import copy_of
from autoshard.passes.registry import register_pass
from autoshard.passes.running_dims import Component, components
from autoshard.planner import plan_module
from autoshard.program import normalize, source_of
from autoshard.shardings import MeshShape


@dataclass(frozen=True, slots=True)
class Padding:
    """A dimension that was, or could have been, padded.

    Attributes:
        size: Its size.
        padded: Its size with padding.
        products: Products that it is a dimension of.
        source: ``file.py:line`` of the first of them.
        before_s: Predicted time of a call without the padding [s]; 0 if it was not asked for.
        after_s: With it [s]; 0 if it was not asked for.
    """

    size: int
    padded: int
    products: int
    source: str
    before_s: float = 0.0
    after_s: float = 0.0


@register_pass(
    "pad",
    summary="Pads dimensions of products that the mesh does not divide, where that is to pay",
    preserves=("numerics", "boundary", "effects"),
)
@dataclass(frozen=True)
class Pad:
    """Dimensions padded inside the program; arguments and results keep their shapes.

    A dimension of products that the largest axis of the mesh does not divide is padded so that at
    least that axis divides it.

    What is added is masked where it is summed or maximized over. A dimension is padded if the plan
    of the padded program is predicted to be faster; making two plans for each takes time, so the
    dimensions of most products are tried first.

    Attributes:
        always: Pad without asking for plans.
        most: How much longer a dimension may become, as a share of its size.
        gain: The share of the predicted time that padding must save.
        tries: Dimensions that plans are made for at most.
        sizes: The sizes of dimensions to pad; any that the mesh does not divide if none is named.
    """

    always: bool = False
    most: float = 0.5
    gain: float = 0.01
    tries: int = 3
    sizes: tuple[int, ...] = ()

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Edit the module in place; publishes the tuple of :class:`Padding` that was made.

        The program is brought into the one shape that is planned first.
        """
        normalize(module)
        made: list[Padding] = []
        tried = number = 0
        mesh = context.mesh or MeshShape(("device",), (1,))  # which divides everything
        # A padded dimension divides, so the same place in the list then holds the next one.
        while number < len(found := self._candidates(module, mesh)):
            component, size = found[number]
            number += 1
            padding = _described(component, size)
            if not self.always:
                if tried == self.tries:
                    break
                tried += 1
                padding = self._priced(module, context, padding, number - 1)
                if padding.after_s > padding.before_s * (1 - self.gain):
                    continue
            first = next(
                link.op for link in component.links if link.op.name.endswith("dot_general")
            )
            if not context.allow("pad", first):
                continue
            lengthen(component, size)
            made.append(padding)
            number -= 1
        context.publish("pad", tuple(made))

    def _candidates(self, module: ir.Module, mesh: MeshShape) -> list[tuple[Component, int]]:
        """Dimensions of products that could be padded, and to what."""
        found = []
        for component in components(module):
            size = self._wanted(component.size, mesh)
            if size is not None and component.dots and can_lengthen(component):
                found.append((component, size))
        return found

    def _wanted(self, size: int, mesh: MeshShape) -> int | None:
        """The size to pad to: what most devices divide, of the sizes that are near enough."""
        largest = max(mesh.sizes)
        if size % largest == 0 or size < largest / 2 or (self.sizes and size not in self.sizes):
            return None
        counts = {
            math.prod(chosen)
            for n in range(1, len(mesh.sizes) + 1)
            for chosen in itertools.combinations(mesh.sizes, n)
        }
        for count in sorted(counts, reverse=True):
            longer = -(-size // count) * count
            if count >= largest and longer <= size * (1 + self.most):
                return longer
        return None

    def _priced(
        self, module: ir.Module, context: PassContext, padding: Padding, number: int
    ) -> Padding:
        mesh = context.needed_mesh("pad")
        plain, padded = copy_of(module), copy_of(module)
        with module.context, ir.Location.unknown():
            component, size = self._candidates(padded, mesh)[number]
            lengthen(component, size)
        times = [_step_s(each, context) for each in (plain, padded)]
        return Padding(
            padding.size, padding.padded, padding.products, padding.source, times[0], times[1]
        )


def _described(component: Component, size: int) -> Padding:
    source = source_of(_products(component)[0])
    return Padding(component.size, size, component.dots, source)


def _products(component: Component) -> list[ir.Operation]:
    return [link.op for link in component.links if link.op.name == DOT]


def _step_s(module: ir.Module, context: PassContext) -> float:
    """The predicted time of a call under the plan that is found [s]."""
    given, model = context.boundaries_of(module), context.cost_model
    plan = plan_module(
        module,
        given.arguments,
        given.results,
        context.needed_mesh("pad"),
        ties=given.ties,
        memory_limit=context.memory_limit,
        cost_model=COST_MODELS["cpu"]() if model is None else model,
        solver=context.solver,
        time_limit_s=context.time_limit_s,
    )
    return plan.predicted.step_s
