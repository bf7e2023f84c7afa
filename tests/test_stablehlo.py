"""StableHLO modules from elsewhere: read, planned, run; and written out again."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import InputError, Plan, PlanMismatchError, Program, autoshard, foreign
from autoshard.cli import main

DATA = Path(__file__).parent / "data"
DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
OTHER = Mesh(DEVICES.reshape(2, 4), ("data", "model"))


def step(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        hidden, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])
        return jnp.mean((hidden @ p["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

    return {"layers": normal(2, 16, 16), "out": normal(16, 8)}, normal(8, 16)


def flat(tree: Any) -> list[Any]:
    return [jnp.copy(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(result: Any, expected: Any) -> None:
    assert isinstance(result, tuple)
    for ours, theirs in zip(result, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def exported() -> Any:
    return export.export(jax.jit(step, donate_argnums=0))(*arguments())


@pytest.fixture(scope="module")
def program(exported: Any) -> Program:
    return Program.from_stablehlo(exported.mlir_module())


@pytest.fixture(scope="module")
def block() -> Program:
    return Program.from_stablehlo(DATA / "torch_block.mlirbc")


@pytest.fixture(scope="module")
def numbers() -> Any:
    with np.load(DATA / "torch_block.npz") as held:
        return [held[k] for k in sorted(held.files) if k != "expected"], held["expected"]


class TestPyTorch:
    """A transformer block that torchax exported, with the numbers that PyTorch computes for it."""

    def test_it_says_what_it_takes(self, block: Program) -> None:
        assert len(block.arguments) == 18
        assert str(block.arguments[-1]) == "inputs[0][0]: int32[8,16]"
        assert "-> result[0]: float32[8,16,64]" in str(block)

    def test_planned_it_computes_what_pytorch_computes(self, block: Program, numbers: Any) -> None:
        given, expected = numbers
        sharded = autoshard(block, MESH, in_shardings={"inputs": P("data"), "[1]": P("model")})
        plan = sharded.plan()
        assert plan.arguments[-1].sharding == (("data",), ())
        assert plan.arguments[1].sharding == (("model",), ())
        (result,) = sharded(*given)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        assert result.sharding.is_equivalent_to(plan.out_shardings[0], 3)

    def test_prediction_and_compiled_program_agree(self, block: Program, numbers: Any) -> None:
        report = block.autoshard(MESH, in_shardings={"inputs": P("data")}).validate(*numbers[0])
        assert report.compiled.flops == report.predicted.flops
        assert report.max_relative_error is not None
        assert report.max_relative_error < 1e-4

    def test_shardy_partitions_it(self, block: Program, numbers: Any) -> None:
        given, expected = numbers
        sharded = block.autoshard(MESH, in_shardings={"inputs": P("data")}, partitioner="shardy")
        assert sharded.lower().partitioner == "shardy"
        np.testing.assert_allclose(sharded(*given)[0], expected, rtol=1e-5, atol=1e-5)

    def test_a_saved_plan_is_for_this_module_alone(
        self, block: Program, program: Program, tmp_path: Path
    ) -> None:
        block.autoshard(MESH).plan().save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        assert autoshard(block, MESH, plan=plan).plan() == plan
        with pytest.raises(PlanMismatchError):
            autoshard(program, MESH, plan=plan).plan()


class TestForms:
    @pytest.mark.parametrize("form", ["text in a file", "bytecode", "artifact"])
    def test_every_form_is_read(self, exported: Any, form: str, tmp_path: Path) -> None:
        source: Any = exported.mlir_module_serialized
        if form == "bytecode":
            held = io.BytesIO()
            with mlir.make_ir_context():
                ir.Module.parse(exported.mlir_module()).operation.write_bytecode(held)
            source = held.getvalue()
        elif form != "artifact":
            source = tmp_path / "step.mlir"
            source.write_text(exported.mlir_module())
        found = Program.from_stablehlo(source)
        assert [leaf.name for leaf in found.arguments] == [
            "params['layers']",
            "params['out']",
            "x",
        ]
        assert_close(found(*flat(arguments())), step(*arguments()))

    def test_another_function_can_be_named(self) -> None:
        text = """
        func.func public @up(%arg0: tensor<4xf32>) -> tensor<4xf32> {
          %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
          return %0 : tensor<4xf32>
        }
        func.func public @twice(%arg0: tensor<4xf32>) -> tensor<4xf32> {
          %0 = func.call @up(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
          %1 = func.call @up(%0) : (tensor<4xf32>) -> tensor<4xf32>
          return %1 : tensor<4xf32>
        }
        """
        found = Program.from_stablehlo(text, entry="twice")
        assert_close(found(jnp.arange(4.0)), (4 * jnp.arange(4.0),))


class TestProgram:
    def test_what_it_donates_is_donated_and_keeps_its_sharding(self, program: Program) -> None:
        assert [leaf.donated for leaf in program.arguments] == [True, True, False]
        plan = program.autoshard(MESH).plan()
        assert [a.donated for a in plan.arguments] == [True, True, False]
        assert plan.arguments[1].sharding == plan.results[1].sharding
        kept = program.autoshard(MESH, donate_argnums=()).plan()
        assert not any(a.donated for a in kept.arguments)
        named = program.autoshard(MESH, donate_argnames="params['out']").plan()
        assert [a.donated for a in named.arguments] == [False, True, False]

    def test_pins_by_position_and_by_name(self, program: Program) -> None:
        spec = P(None, None, "model")
        for pins in (
            (spec, None, P("data")),
            {"params['layers']": spec, "x": P("data")},
            {"[0]": spec, "[2]": P("data")},
        ):
            plan = program.autoshard(MESH, in_shardings=pins).plan()
            assert plan.arguments[0].sharding == ((), (), ("model",))
            assert plan.arguments[2].sharding == (("data",), ())

    def test_it_runs_sharded_with_the_same_numbers(self, program: Program) -> None:
        sharded = autoshard(program, MESH, in_shardings={"x": P("data")})
        assert_close(sharded(*flat(arguments())), step(*arguments()))

    def test_it_can_be_part_of_a_jax_program(self, program: Program) -> None:
        params, x = arguments()

        def twice(f: Any, layers: Any, out: Any, x: Any) -> Any:
            layers, out, _ = f(layers, out, x)
            return f(layers, out, x)

        expected = step(step(params, x)[0], x)
        for f in (program, program.autoshard(MESH)):
            result = jax.jit(lambda *a, f=f: twice(f, *a))(*flat(arguments()))
            assert_close(result, expected)

    def test_it_can_be_mapped_over_rows(self, program: Program) -> None:
        params, x = arguments()
        rows = jnp.stack([x, 2 * x], 1)
        result = jax.vmap(program, (None, None, 1))(*flat(params), rows)
        assert_close(tuple(r[1] for r in result), step(params, 2 * x))

    def test_numbers_of_64_bits_are_of_32_where_jax_has_no_others(self) -> None:
        found = Program.from_stablehlo("""
        func.func public @main(%arg0: tensor<4xi64>, %arg1: tensor<f64>) -> tensor<4xf64> {
          %0 = stablehlo.convert %arg0 : (tensor<4xi64>) -> tensor<4xf64>
          %1 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f64>) -> tensor<4xf64>
          %2 = stablehlo.add %0, %1 : tensor<4xf64>
          return %2 : tensor<4xf64>
        }
        """)
        (result,) = found.autoshard(MESH)(jnp.arange(4), 0.5)
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, np.arange(4) + 0.5)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda a: a[:2], "takes 3 arrays, 2 were given"),
            (lambda a: [*a[:2], a[2].T], r"x is a float32\[16, 8\], the module takes .*\[8, 16\]"),
            (lambda a: [*a[:2], a[2].astype(jnp.bfloat16)], "x is a bfloat16"),
            (lambda a: [*a[:2], "text"], "x is a str"),
        ],
        ids=["count", "shape", "type", "no array"],
    )
    def test_other_arrays_are_refused_by_name(
        self, program: Program, change: Any, says: str
    ) -> None:
        with pytest.raises(InputError, match=says):
            program(*change(flat(arguments())))

    def test_only_its_arguments_can_be_donated(self, program: Program) -> None:
        with pytest.raises(InputError, match="no argument 3 to donate"):
            autoshard(program, MESH, donate_argnums=3)


@pytest.fixture(scope="module")
def annotated() -> Program:
    def fn(w: Any, x: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(
            jnp.tanh(x @ w), NamedSharding(MESH, P("data", "model"))
        )
        return hidden @ w.T

    jitted = jax.jit(fn, in_shardings=(None, NamedSharding(MESH, P("data"))))
    lowered = jitted.lower(jnp.ones((16, 32)), jnp.ones((8, 16)))
    return Program.from_stablehlo(lowered.as_text())


class TestAnnotations:
    """Shardings that are in a module already."""

    def test_on_their_own_mesh_they_are_kept(self, annotated: Program) -> None:
        assert annotated.mesh == (("data", 4), ("model", 2))
        plan = annotated.autoshard(MESH).plan()
        assert plan.arguments[1].sharding == (("data",), ())
        assert plan.arguments[1].pinned
        assert (("data",), ("model",)) in [s for op in plan.ops for s in op.results]

    def test_the_callers_pins_go_before_them(self, annotated: Program) -> None:
        plan = annotated.autoshard(MESH, in_shardings={"[1]": P("model")}).plan()
        assert plan.arguments[1].sharding == (("model",), ())

    def test_on_another_mesh_they_are_left_out_and_one_is_told(self, annotated: Program) -> None:
        with pytest.warns(UserWarning, match=r"are for the mesh \{'data': 4, 'model': 2\}"):
            sharded = annotated.autoshard(OTHER)
        w, x = jnp.full((16, 32), 0.1), jnp.ones((8, 16))
        assert not any(a.pinned for a in sharded.plan().arguments)
        assert_close(sharded(w, x), (jnp.tanh(x @ w) @ w.T,))
        assert_close(annotated(w, x), (jnp.tanh(x @ w) @ w.T,))

    def test_those_of_other_partitioners_are_left_out_and_one_is_told(self) -> None:
        text = """
        func.func public @main(%arg0: tensor<8xf32> {mhlo.sharding = "{devices=[8]<=[8]}"})
            -> tensor<8xf32> {
          %0 = stablehlo.custom_call @Sharding(%arg0) {mhlo.sharding = "{devices=[8]<=[8]}"}
            : (tensor<8xf32>) -> tensor<8xf32>
          return %0 : tensor<8xf32>
        }
        """
        with pytest.warns(UserWarning, match="mhlo.sharding of arguments and results"):
            found = Program.from_stablehlo(text)
        assert len(found.ignored) == 2
        assert_close(found.autoshard(MESH)(jnp.arange(8.0)), (jnp.arange(8.0),))


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = {"params['out']": P(None, "model"), "x": P("data")}
    return autoshard(step, MESH, donate_argnums=0, in_shardings=pins).plan(*arguments())


class TestWriting:
    @pytest.mark.parametrize("suffix", [".mlir", ".mlirbc"])
    def test_what_is_written_is_read_with_the_same_shardings(
        self, plan: Plan, suffix: str, tmp_path: Path
    ) -> None:
        path = tmp_path / f"step{suffix}"
        plan.write_stablehlo(path)
        found = Program.from_stablehlo(path)
        assert [a.name for a in found.arguments] == [a.name for a in plan.arguments]
        assert [a.name for a in found.results] == [r.name for r in plan.results]
        again = found.autoshard(MESH)
        assert again.plan().argument_shardings == plan.argument_shardings
        assert again.plan().result_shardings == plan.result_shardings
        assert [a.donated for a in again.plan().arguments] == [True, True, False]
        assert again.plan().predicted.flops == plan.predicted.flops
        assert again.plan().predicted.collective_bytes == plan.predicted.collective_bytes
        assert_close(again(*flat(arguments())), step(*arguments()))

    def test_text_shows_the_shardings(self, plan: Plan, tmp_path: Path) -> None:
        plan.write_stablehlo(tmp_path / "step.mlir")
        text = (tmp_path / "step.mlir").read_text()
        assert '<["data"=4, "model"=2]>' in text
        assert 'sdy.sharding = #sdy.sharding<@planned, [{}, {"model"}]>' in text
        assert "tf.aliasing_output = 1" in text

    def test_a_plan_that_was_saved_can_be_written(self, plan: Plan, tmp_path: Path) -> None:
        plan.save(tmp_path / "plan.json")
        plan.write_stablehlo(tmp_path / "a.mlir")
        Plan.load(tmp_path / "plan.json").write_stablehlo(tmp_path / "b.mlir")
        assert (tmp_path / "a.mlir").read_text() == (tmp_path / "b.mlir").read_text()

    def test_the_suffix_says_the_form(self, plan: Plan, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"is not written as \.txt"):
            plan.write_stablehlo(tmp_path / "step.txt")


VECTOR = "tensor<4xf32>"


def main_of(body: str, more: str = "", type_: str = VECTOR) -> bytes:
    return f"func.func public @main(%arg0: {type_}) -> {type_} {{ {body} }} {more}".encode()


RETURN = f"return %0 : {VECTOR}"
CALL = f"%0 = func.call @g(%arg0) : ({VECTOR}) -> {VECTOR} {RETURN}"

REFUSED = {
    "nothing": (b" ", "the module is empty"),
    "a pickle": (b"\x80\x04\x95garbage", "neither MLIR text nor MLIR bytecode"),
    "words": (b"hello world\n", "no valid StableHLO module"),
    "magic alone": (b"ML\xefR", "no valid StableHLO module"),
    "no function": (b"module {}", "no function main"),
    "wrong types": (main_of(f"%0 = stablehlo.add %arg0, %arg0 : tensor<5xf32> {RETURN}"), "type"),
    "unknown size": (main_of("return %arg0 : tensor<?xf32>", type_="tensor<?xf32>"), "not known"),
    "a tuple": (main_of("return %arg0 : tuple<f32>", type_="tuple<f32>"), "no array"),
    "a token": (main_of("return %arg0 : !stablehlo.token", type_="!stablehlo.token"), "no array"),
    "an index": (main_of("return %arg0 : tensor<4xindex>", type_="tensor<4xindex>"), "no array"),
    "another dialect": (
        main_of(f"%0 = arith.addf %arg0, %arg0 : {VECTOR} {RETURN}"),
        "arith.addf is no op of StableHLO",
    ),
    "jumps": (main_of(f"cf.br ^bb1 ^bb1: return %arg0 : {VECTOR}"), "jumps between blocks"),
    "recursion": (
        main_of(CALL, f"func.func private @g(%arg0: {VECTOR}) -> {VECTOR} {{ {CALL} }}"),
        "g calls itself",
    ),
    "a call of nothing": (
        main_of(CALL, f"func.func private @g({VECTOR}) -> {VECTOR}"),
        "main calls g, which is not in the module",
    ),
    "values left out": (
        main_of(f"%0 = stablehlo.constant dense_resource<__elided__> : {VECTOR} {RETURN}"),
        "were left out when the module was printed",
    ),
    "partitioned by hand": (
        main_of(
            f"%0 = stablehlo.custom_call @SPMDFullToShardShape(%arg0) : ({VECTOR}) -> {VECTOR}"
            f" {RETURN}"
        ),
        "written for one device",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_planned_is_refused_with_a_way_out(what: str) -> None:
    data, says = REFUSED[what]
    with mlir.make_ir_context(), pytest.raises(InputError, match=says) as caught:
        foreign.prepare(foreign.parse(data), None)
    assert caught.value.fix


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.mlir"
    path.write_bytes(REFUSED["recursion"][0])
    with pytest.raises(InputError, match=r"at:  .*bad\.mlir: func\.func @g"):
        Program.from_stablehlo(path)
    with pytest.raises(InputError, match="cannot read a module: No such file"):
        Program.from_stablehlo(tmp_path / "none.mlir")
    with pytest.raises(InputError, match="a int is no StableHLO module"):
        Program.from_stablehlo(7)  # type: ignore[arg-type]


def test_a_file_that_kills_the_parser_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "READER", (sys.executable, "-c", "import os; os.abort()"))
    with pytest.raises(InputError, match=r"fails on the module: the process died of SIGABRT"):
        Program.from_stablehlo(REFUSED["words"][0])


def test_a_module_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="100 are read at most"):
        Program.from_stablehlo(DATA / "torch_block.mlirbc")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytecode_is_refused_or_read_but_never_ends_the_process(seed: int) -> None:
    data = bytearray((DATA / "torch_block.mlirbc").read_bytes())
    rng = np.random.default_rng(seed)
    for position in rng.integers(30, len(data), 12):
        data[position] = rng.integers(256)
    with contextlib.suppress(InputError):
        assert Program.from_stablehlo(bytes(data)).arguments


def test_the_command_plans_a_module_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.mlir"
    words = ["plan", str(DATA / "torch_block.mlirbc"), "--mesh", "data=4,model=2"]
    assert main([*words, "--pin", "inputs=data", "--write", str(path)]) == 0
    assert "inputs[0][0]  i32[8,16]" in capsys.readouterr().out
    assert "sdy.sharding_constraint" in path.read_text()
    assert main([*words, "--example", "numpy:ones"]) != 0
    assert "leave out --example" in capsys.readouterr().err
