from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from autoshard.errors import InputError, PassError
from autoshard.passes import properties
from autoshard.passes.bisect import Bisection, bisect
from autoshard.passes.context import PassContext
from autoshard.passes.driver import apply_patterns
from autoshard.passes.instruments import OpCounts, Snapshots, Timing, Verify
from autoshard.passes.manager import run_pipeline
from autoshard.passes.module_state import from_bytes, op_counts
from autoshard.passes.numerics import Numerics
from autoshard.passes.patterns import Builder, Match, op, pattern
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.prediction import Prediction
from autoshard.passes.registry import register_pass
from autoshard.passes.reproducer import Reproducer, WriteReproducer
from autoshard.shardings import MeshShape
from tests.lowering import lowered, module_of

LAYERS = 4
PARAMS = {
    "w": jnp.ones((LAYERS, 8, 8)) / 3,
    "b": jnp.ones((LAYERS, 8)) / 5,
}
X = jnp.ones((4, 8))
SQUARE = jnp.ones((512, 512))


def train_step(params: Any, x: Any) -> Any:
    def layer(h: Any, p: Any) -> Any:
        return jnp.tanh(h @ p["w"] + p["b"]), None

    def loss(params: Any) -> Any:
        return (jax.lax.scan(layer, x, params)[0] ** 2).sum()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _in_backward_loop(operation: ir.Operation) -> bool:
    """Whether the op is in a loop that writes no stack of what it saves, but sums up gradients."""
    around = operation.parent
    if around is None or around.operation.name != "stablehlo.while":
        return False
    names = [o.operation.name for o in around.operation.regions[1].blocks[0].operations]
    return "stablehlo.dot_general" in names and "stablehlo.tanh" not in names


@pattern("add-to-subtract", op("stablehlo.multiply", where=_in_backward_loop))
def _wrong(match: Match, builder: Builder) -> Any:
    return [stablehlo.minimum(*match.root.operands)]


@pattern("harmless", op("stablehlo.negate"))
def _harmless(match: Match, builder: Builder) -> Any:
    zero = stablehlo.subtract(match.root.operands[0], match.root.operands[0])
    return [stablehlo.subtract(zero, match.root.operands[0])]


@register_pass("test-miscompile", summary="Breaks gradients inside a scan body only", preserves=())
def _miscompile(module: ir.Module, context: PassContext) -> None:
    apply_patterns(module, [_harmless, _wrong], context)


def product(x: Any) -> Any:
    numbers = stablehlo.DotDimensionNumbers.get([], [], [1], [0])
    return stablehlo.dot_general(x.type, x, x, numbers)


@register_pass("test-dearer", summary="Multiplies in vain before every tanh")
def _dearer(module: ir.Module, context: PassContext) -> None:
    for operation in [o.operation for o in _ops(module) if o.operation.name == "stablehlo.tanh"]:
        if context.allow("in-vain", operation):
            with ir.InsertionPoint(operation), operation.location:
                square = product(operation.operands[0])
                again = stablehlo.subtract(stablehlo.add(operation.operands[0], square), square)
            operation.operands[0] = again


@register_pass("test-invalid", summary="Leaves what MLIR does not take")
def _invalid(module: ir.Module) -> None:
    operation = next(o.operation for o in _ops(module) if o.operation.name == "stablehlo.multiply")
    operation.results[0].set_type(ir.RankedTensorType.get([7], ir.F32Type.get()))


def _ops(module: ir.Module) -> list[Any]:
    from autoshard.passes.driver import blocks

    return [o for block in blocks(module) for o in block.operations]


def train_module() -> ir.Module:
    return module_of(lowered(train_step, PARAMS, X))


@pytest.mark.slow
def test_a_miscompile_of_gradients_in_a_scan_body_is_found_down_to_the_rewrite() -> None:
    pipeline = Pipeline.parse("flatten-calls,fold-transpose,test-miscompile,mlir:cse")
    found = bisect(pipeline, train_module(), properties.numerics(), PassContext(), shrink_s=300.0)
    assert found is not None
    assert (found.position, found.made) == (2, "test-miscompile")
    assert found.rewrite is not None
    assert found.rewrite.pattern == "add-to-subtract"
    assert 0 < found.rewrite.number + 1 <= found.rewrites
    assert found.ops <= 30
    assert _shows(found)


def _shows(found: Bisection) -> bool:
    """Whether the reproducer, read from its text, shows the failure."""
    told = Reproducer.of(found.reproducer)
    assert told is not None
    small = from_bytes(found.reproducer, train_module().context)
    assert op_counts(small).total() == found.ops
    after = from_bytes(found.reproducer, small.context)
    run_pipeline(told.pipeline, after)
    return bool(properties.numerics(told.seed)(small, after))


def test_a_pass_that_makes_a_program_dearer_is_found() -> None:
    module = module_of(lowered(lambda x: jnp.tanh(jnp.tanh(x) + 1), SQUARE))
    context = PassContext(mesh=MeshShape(("a",), (2,)))
    found = bisect(
        Pipeline.parse("flatten-calls,test-dearer"),
        module,
        properties.cost(context),
        context,
        shrink_s=5.0,
    )
    assert found is not None
    assert (found.position, found.rewrites) == (1, 2)
    assert "predicted time grew" in found.failure


def test_a_command_may_say_what_is_broken(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import sys, pathlib\n"
        "text = pathlib.Path(sys.argv[1]).read_text()\n"
        "sys.exit('too many' if 'stablehlo.dot_general' in text else 0)\n"
    )
    module = module_of(lowered(lambda x: jnp.tanh(jnp.tanh(x) + 1), SQUARE))
    broken = properties.command(f"{sys.executable} {script}")
    found = bisect(
        Pipeline.parse("flatten-calls,test-dearer"), module, broken, PassContext(), shrink_s=2.0
    )
    assert found is not None
    assert found.rewrite is not None
    assert found.rewrite.number == 0
    assert "too many" in found.failure


def test_a_pipeline_that_breaks_nothing_is_told_so() -> None:
    module = module_of(lowered(lambda x: jnp.tanh(x.T).T, X))
    pipeline = Pipeline.parse("flatten-calls,fold-transpose")
    assert bisect(pipeline, module, properties.numerics(), PassContext()) is None


def test_instruments_say_what_each_pass_did(tmp_path: Path) -> None:
    module = module_of(lowered(lambda x, y: x @ y.T, X, X))
    told: list[str] = []
    timing, counts, numerics = Timing(), OpCounts(), Numerics()
    predicted, snapshots = Prediction(), Snapshots(tmp_path, told.append, 120)
    instruments = [Verify(), numerics, snapshots, predicted, counts, timing]
    context = PassContext(mesh=MeshShape(("a",), (2,)))
    run_pipeline("flatten-calls,fold-transpose,shard", module, context, instruments)
    assert [part.name for part in timing.tree().parts] == [
        "flatten-calls",
        "fold-transpose",
        "shard",
    ]
    assert "solve" in "\n".join(timing.tree().lines())
    assert counts.delta(1) == {"stablehlo.transpose": -1}
    assert counts.rewrites[1] == {"dot-of-transpose-right": 1}
    assert numerics.passes[0] is None
    assert all(d is not None and d.is_small for d in numerics.passes[1:])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00-input.mlir",
        "02-fold-transpose.mlir",
        "03-shard.mlir",
    ]
    assert "stablehlo.transpose" in told[0]
    assert predicted.before_first is not None
    assert predicted.passes[1].hbm_bytes <= predicted.before_first.hbm_bytes
    assert predicted.passes[2].flops == predicted.passes[1].flops


def test_a_wrong_or_invalid_pass_leaves_a_reproducer(tmp_path: Path) -> None:
    path = tmp_path / "failure.mlir"
    for name, says in (("test-wrong", "changes the values"), ("test-invalid", "invalid module")):
        write = WriteReproducer(path)
        module = module_of(lowered(lambda x: x * jnp.flip(x), X))
        with pytest.raises(PassError, match=says):
            run_pipeline(
                f"flatten-calls,{name},mlir:cse", module, PassContext(seed=3), [write, Numerics(),
                                                                               Verify()]
            )  # fmt: skip
        told = Reproducer.of(path.read_text())
        assert told is not None
        assert (told.pipeline, told.seed) == (f"flatten-calls,{name}", 3)
        assert says in told.failure
        again = from_bytes(path.read_text(), module.context)
        with pytest.raises(PassError, match=says):
            run_pipeline(told.pipeline, again, PassContext(seed=3), [Numerics(), Verify()])


@register_pass("test-wrong", summary="Adds where it should multiply")
def _adds(module: ir.Module) -> None:
    operation = next(o.operation for o in _ops(module) if o.operation.name == "stablehlo.multiply")
    with ir.InsertionPoint(operation), operation.location:
        operation.results[0].replace_all_uses_with(stablehlo.add(*operation.operands))


def test_a_reproducer_that_was_cut_is_refused() -> None:
    assert Reproducer.of("module {}") is None
    with pytest.raises(InputError, match="cannot be read"):
        Reproducer.of('// autoshard opt reproducer: {"pipeline"\nmodule {}')
