from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard import Plan, autoshard
from autoshard.errors import InputError, PlanMismatchError
from autoshard.passes.context import Boundaries, PassContext
from autoshard.passes.driver import apply_patterns
from autoshard.passes.evaluate import evaluate, random_arguments
from autoshard.passes.manager import run_pipeline
from autoshard.passes.patterns import Builder, Match, op, pattern
from autoshard.passes.registry import register_pass
from autoshard.passes.shard import DEFAULT
from autoshard.program import Boundary, main_block, terminator
from autoshard.shardings import MeshShape
from tests.lowering import lowered, mesh_of, module_of

MESH = MeshShape(("a", "b"), (4, 2))
X, W = jnp.arange(32.0 * 16).reshape(32, 16) / 100, jnp.ones((64, 16)) / 8


def two_layers(x: Any, w: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return jnp.tanh(c @ w.T) @ w, None

    return jax.lax.scan(body, x, None, length=3)[0]


@pattern("tanh-to-exp", op("stablehlo.tanh"))
def _tanh(match: Match, builder: Builder) -> Any:
    inner = stablehlo.negate(match.root.operands[0])
    return [stablehlo.negate(stablehlo.exponential(inner))]


@register_pass("test-exp", summary="Puts -exp(-x) for tanh(x)", preserves=("boundary",))
@dataclass(frozen=True, slots=True)
class TanhToExp:
    def run(self, module: ir.Module, context: PassContext) -> None:
        apply_patterns(module, [_tanh], context)


@register_pass("test-narrow", summary="Drops the last result", preserves=())
def _narrow(module: ir.Module) -> None:
    block = main_block(module)
    kind = ir.FunctionType(ir.TypeAttr(block.owner.attributes["function_type"]).value)
    narrow = ir.FunctionType.get(kind.inputs, list(kind.results)[:-1])
    block.owner.attributes["function_type"] = ir.TypeAttr.get(narrow)
    block.owner.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get({})])
    end = terminator(block)
    with ir.InsertionPoint(end), end.location:
        ir.Operation.create("func.return", operands=list(end.operands)[:-1])
    end.erase()


def test_the_default_pipeline_is_a_text_that_makes_the_same_plan() -> None:
    step = autoshard(two_layers, mesh_of(4, 2))
    assert str(step.options.pipeline) == DEFAULT
    edited = autoshard(two_layers, mesh_of(4, 2), pipeline="shard,mlir:cse")
    assert step.plan(X, W).fingerprint == edited.plan(X, W).fingerprint
    np.testing.assert_allclose(edited(X, W), two_layers(X, W), rtol=1e-5)


def test_passes_before_shard_transform_what_is_planned_and_what_runs() -> None:
    step = autoshard(two_layers, mesh_of(4, 2), pipeline="flatten-calls,test-exp,shard")

    def expected(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = -jnp.exp(-(x @ w.T)) @ w
        return x

    assert "stablehlo.exponential" in {o.name for o in step.plan(X, W).ops}
    np.testing.assert_allclose(step(X, W), expected(X, W), rtol=1e-4)


def test_passes_after_shard_transform_what_runs_alone() -> None:
    step = autoshard(two_layers, mesh_of(4, 2), pipeline="shard,test-exp")
    assert "stablehlo.tanh" in {o.name for o in step.plan(X, W).ops}
    assert "stablehlo.tanh" not in step.lower(X, W).as_text()


def test_folded_transposes_are_not_planned() -> None:
    step = autoshard(two_layers, mesh_of(4, 2), pipeline="flatten-calls,fold-transpose,shard")
    plan = step.plan(X, W)
    assert "stablehlo.transpose" not in {o.name for o in plan.ops}
    np.testing.assert_allclose(step(X, W), two_layers(X, W), rtol=1e-5)
    again = autoshard(two_layers, mesh_of(4, 2), plan=plan)
    with pytest.raises(PlanMismatchError):
        again(X, W)


def test_memory_is_given_by_keyword_or_in_the_pipeline() -> None:
    step = autoshard(two_layers, mesh_of(4, 2), pipeline="shard{memory=14GiB,solver=exact}")
    assert step.plan(X, W).memory_limit == 14 * 2**30
    with pytest.raises(InputError, match="say it once"):
        autoshard(two_layers, mesh_of(4, 2), pipeline="shard{memory=14GiB}", memory_limit=1)


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("flatten-calls", "no passes of the pipeline shard"),
        ("shard,shard", "2 passes of the pipeline shard"),
        ("shard,flatten", "did you mean flatten-calls"),
    ],
)
def test_a_pipeline_that_cannot_be_used_is_refused(pipeline: str, says: str) -> None:
    with pytest.raises((InputError, LookupError), match=says):
        autoshard(two_layers, mesh_of(4, 2), pipeline=pipeline)


def test_a_pass_that_changes_the_boundary_is_refused_in_words() -> None:
    step = autoshard(lambda x: (x + 1, x * 2), mesh_of(4, 2), pipeline="test-narrow,shard")
    with pytest.raises(InputError, match="test-narrow changes the arguments or results"):
        step(X)


def test_a_module_is_sharded_by_the_pass_alone() -> None:
    module = module_of(lowered(two_layers, X, W))
    arguments = random_arguments(module)
    before = evaluate(module, arguments)
    context = run_pipeline("flatten-calls,shard", module, PassContext(mesh=MESH))
    plan = context.result("shard", Plan)
    assert plan is not None
    module.operation.verify()
    assert str(module).count("sdy.sharding = ") == 3  # two arguments and the result
    np.testing.assert_allclose(evaluate(module, arguments, MESH)[0], before[0], rtol=1e-5)
    with pytest.raises(InputError, match="sharded already"):
        run_pipeline("shard", module, context)


def test_rules_on_logical_axes_make_a_plan_by_hand() -> None:
    text = "shard-expert{rules=[batch:a,mlp:b+a],axes=[x:batch+_,w:mlp+_,result:batch+_]}"
    step = autoshard(two_layers, mesh_of(4, 2), pipeline=text)
    plan = step.plan(X, W)
    assert [a.sharding for a in plan.arguments] == [(("a",), ()), (("b", "a"), ())]
    assert [r.sharding for r in plan.results] == [(("a",), ())]
    np.testing.assert_allclose(step(X, W), two_layers(X, W), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("rules=[batch:z],axes=[x:batch+_]", "no axis 'z'"),
        ("rules=[batch:a],axes=[q:batch+_]", "no argument or result is called q"),
        ("rules=[batch:a],axes=[x:batch]", "x has 2 dimensions, 1 logical axes"),
        ("rules=[batch],axes=[]", "cannot read 'batch'"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(options: str, says: str) -> None:
    module = module_of(lowered(lambda x: x + 1, X))
    given = Boundaries((Boundary("x"),), (Boundary("result"),))
    with pytest.raises(InputError) as caught:
        run_pipeline(f"shard-expert{{{options}}}", module, PassContext(MESH, boundaries=given))
    assert says in str(caught.value)
