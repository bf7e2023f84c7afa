"""Plans are made, kept and asked from the shell; what a user can mend is told in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from autoshard import Plan
from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.given import parse_bytes
from autoshard.typed import load_object, parse_spec

PROGRAM = """
import jax
import jax.numpy as jnp

S = jax.ShapeDtypeStruct

def train_step(params, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

def example():
    params = {"up": S((256, 512), "float32"), "down": S((512, 256), "float32")}
    return params, {"x": S((1024, 256), "float32"), "y": S((1024, 256), "float32")}

def scale(x, *, by):
    return x * by

keywords = {"x": S((64, 64), "float32"), "by": S((), "float32")}
odd = {1: 2}
alone = S((64, 64), "float32")
double = jax.jit(lambda x: x * 2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("shell")
    (where / "shell_program.py").write_text(PROGRAM)
    return where


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    path = folder / "plan.json"
    module = folder / "shell_program.py"
    words = ["plan", f"{module}:train_step", "--mesh", "data=4,model=2", "--donate", "0"]
    words += ["--example", f"{module}:example", "--save", str(path), "--cost-model", "v5e"]
    assert main(words) == 0
    return path


def answer(words: list[Any], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([str(word) for word in words] + ["--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_saves_and_prints_what_it_planned(
    saved: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(saved)
    assert str(plan.mesh) == "data=4,model=2"
    assert plan.cost_model == "v5e"
    assert [a.name for a in plan.arguments if a.donated] == ["params['down']", "params['up']"]
    module = folder / "shell_program.py"
    words = ["plan", f"{module}:train_step", "--example", f"{module}:example"]
    words += ["--mesh", "data=4,model=2", "--pin", "batch['x']=data", "--memory-limit", "1GiB"]
    words += ["--trace", str(folder / "trace.json")]
    data = answer([*words, "--pin", "result[0]['up']=None,data*model"], capsys)
    other = Plan.from_json(data)
    assert other.memory_limit == 2**30
    pinned = {b.name: b.sharding for b in (*other.arguments, *other.results) if b.pinned}
    assert pinned == {
        "batch['x']": (("data",), ()),
        "result[0]['up']": ((), ("data", "model")),
    }
    trace = json.loads((folder / "trace.json").read_text("utf-8"))
    assert trace["otherData"]["compute_sum_s"] == other.predicted.compute_s


def test_examples_may_be_keywords_one_array_or_a_jitted_function(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = folder / "shell_program.py"
    for function, example in (("scale", "keywords"), ("double", "alone")):
        words = ["plan", f"{module}:{function}", "--example", f"{module}:{example}"]
        assert main([*words, "--mesh", "x=8"]) == 0
        assert "Plan on x=8" in capsys.readouterr().out


def test_a_mesh_needs_no_devices_of_its_number(folder: Path) -> None:
    command = [sys.executable, "-m", "autoshard", "plan", "shell_program:train_step"]
    command += ["--example", "shell_program:example", "--mesh", "data=16,model=4", "--json"]
    done = subprocess.run(
        [*command, "--cost-model", "v5e"],
        capture_output=True, text=True, timeout=300, check=True, cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert json.loads(done.stdout)["mesh"]["sizes"] == [16, 4]
    assert done.stderr == ""


def test_explain_prints_and_gives_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(saved)
    told = answer(["explain", saved, "params['up']", "--alternatives", "2"], capsys)
    assert told == json.loads(json.dumps(plan.explain("params['up']", alternatives=2).to_json()))
    told = answer(["explain", saved, "batch['x']", "--pin", "data", "--pin", "P(None)"], capsys)
    assert {json.dumps(a["sharding"]) for a in told["alternatives"]} == {
        '[["data"], []]',
        "[[], []]",
    }
    assert main(["explain", str(saved), "params['up']", "--alternatives", "1"]) == 0
    assert "next best" in capsys.readouterr().out


def test_why_prints_and_gives_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(saved)
    assert plan.collectives
    told = answer(["why", saved, "0"], capsys)
    assert told == json.loads(json.dumps(plan.why(0).to_json()))
    assert main(["why", str(saved), "0", "--no-remedy"]) == 0
    assert "without it" not in capsys.readouterr().out


def test_diff_of_a_plan_with_itself_is_empty(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(saved), str(saved)]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"
    told = answer(["diff", saved, saved], capsys)
    assert (told["changes"], told["gained"], told["lost"]) == ([], [], [])


def test_lint_and_specs_speak_of_the_plan(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(["lint", saved, "--large", "1GiB"], capsys)
    assert told == json.loads(json.dumps(Plan.load(saved).lint(large_bytes=2**30).to_json()))
    assert main(["specs", str(saved)]) == 0
    names: dict[str, Any] = {}
    exec(capsys.readouterr().out, names)
    up = next(a for a in Plan.load(saved).arguments if a.name == "params['up']")
    assert names["SPECS"]["params['up']"] == P(*(axes or None for axes in up.sharding))
    told = answer(["specs", saved], capsys)
    assert told["arguments"]["params['up']"] == [list(axes) for axes in up.sharding]
    assert list(told["arguments"]) == [a.name for a in Plan.load(saved).arguments]
    assert list(told["results"]) == [r.name for r in Plan.load(saved).results]
    assert main(["specs", str(saved), "--flax", "--argument", "batch"]) == 0
    assert "LOGICAL_AXES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["plan", "nothing", "--example", "m:e", "--mesh", "x=8"], "cannot read the name"),
        (["plan", "no_such_module:f", "--example", "m:e", "--mesh", "x=8"], "there is no module"),
        (["plan", "none.py:f", "--example", "m:e", "--mesh", "x=8"], "there is no file none.py"),
        (["plan", "{m}:f", "--example", "{m}:example", "--mesh", "x=8"], "has no f"),
        (["plan", "{m}:scale", "--example", "{m}:odd", "--mesh", "x=8"], "keys are no names"),
        (["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "8"], "cannot read the mesh"),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8", "--donate", "a"],
            "cannot read the positions",
        ),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8", "--pin", "x"],
            "cannot read the pin",
        ),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8", "--pin", "q=x"],
            "in_shardings names q",
        ),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8",
             "--memory-limit", "much"],
            "as a number of bytes",
        ),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8",
             "--cost-model", "v99"],
            "no cost model is called 'v99'",
        ),
        (
            ["plan", "{m}:double", "--example", "{m}:alone", "--mesh", "x=8",
             "--save", "no/such/folder/p.json"],
            "there is no folder",
        ),
        (["explain", "none.json", "x"], "there is no file"),
        (["explain", "{p}", "nope"], "nothing that the plan decides about"),
        (["explain", "{p}", "batch['x']", "--pin", "da-ta"], "cannot read the sharding"),
        (["explain", "{p}", "batch['x']", "--alternatives", "-1"], "cannot be priced"),
        (["why", "{p}", "99"], "the plan has no collective 99"),
        (["why", "{p}", "all-reduce.1", "--hlo", "none.txt"], "cannot read a program"),
        (["lint", "{p}", "--large", "0"], "as a number of bytes"),
        (["specs", "{p}", "--argument", "x"], "--argument is for --flax"),
        (["specs", "{p}", "--flax", "--json"], "flax's rules are Python source"),
        (["specs", "{p}", "--flax", "--argument", "z"], "no argument is called 'z'"),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_told_in_a_sentence(
    words: list[str], complaint: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = saved.parent / "shell_program.py"
    capsys.readouterr()
    assert main([word.format(m=module, p=saved) for word in words]) == 2
    told = capsys.readouterr()
    assert complaint in told.err
    assert "fix:" in told.err
    assert told.out == ""


def test_an_old_plan_is_refused_by_its_number(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(saved.read_text())
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**data, "format": 1}))
    assert main(["explain", str(old), "x"]) == 2
    assert "format 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "inf", "1e400"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("data", P("data")),
        ("None,model", P(None, "model")),
        ("data*model", P(("data", "model"))),
        ("P()", P()),
        ("P('data',)", P("data")),
        ("PartitionSpec(None, ('data', 'model'))", P(None, ("data", "model"))),
    ],
)
def test_a_sharding_is_read_as_typed_or_as_printed(text: str, spec: P) -> None:
    assert parse_spec(text) == spec


def test_an_object_is_loaded_once(folder: Path) -> None:
    module = folder / "shell_program.py"
    assert load_object(f"{module}:example") is load_object(f"{module}:example")
    assert load_object("os.path:join.__name__") == "join"


def test_what_a_program_prints_is_not_among_the_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = folder / "shell_chatty.py"
    module.write_text(
        PROGRAM + "\nprint('loading')\ndef told(x):\n    print('tracing')\n    return x\n"
    )
    words = ["plan", f"{module}:told", "--example", f"{module}:alone", "--mesh", "data=4,model=2"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "autoshard plan"
    assert "loading" in err
    assert "tracing" in err


def test_an_example_that_is_no_call_of_the_function_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = folder / "shell_program.py"
    words = ["plan", f"{module}:train_step", "--example", f"{module}:alone", "--mesh", "data=8"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "gives 1 by position, which is no call of" in told
    assert "(params, batch): missing a required argument: 'batch'" in told


def test_a_kind_without_its_number_is_answered_with_ops_of_it(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(saved), "dot_general"]) == 2
    assert "did you mean dot_general #" in capsys.readouterr().err


def test_a_plan_for_a_topology_needs_none_of_its_devices(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = folder / "shell_program.py"
    words = ["plan", f"{module}:train_step", "--mesh", "data=16,model=4", "--donate", "0"]
    words += ["--example", f"{module}:example", "--topology", "v5p:4x4x4"]
    assert main(words) == 0
    assert "64 devices), cost model v5p" in capsys.readouterr().out
    assert main([*words, "--full"]) == 2
    assert "give --compile too" in capsys.readouterr().err
    assert main([*words, "--mesh", "data=128"]) == 2
    assert "use at most 64" in capsys.readouterr().err


def test_a_plan_that_is_not_there_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(tmp_path / "gone.json")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_warning_is_told_without_a_line_of_the_planner(folder: Path) -> None:
    module = folder / "elsewhere.mlir"
    module.write_text(
        'module { sdy.mesh @mesh = <["a"=4]>\n'
        'func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>})'
        " -> tensor<8xf32> { return %x : tensor<8xf32> } }"
    )
    words = ["plan", str(module), "--mesh", "data=8"]
    done = subprocess.run(
        [sys.executable, "-m", "autoshard", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning: " in done.stderr
    assert ".py:" not in done.stderr
