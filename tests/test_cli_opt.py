from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.passes.registry import registered

PROGRAM = """
import jax, jax.numpy as jnp

X = jnp.ones((8, 16))

def layer(x):
    return jnp.tanh(x @ jnp.ones((8, 16)).T) - 1.0

def args():
    return (X,)
"""

WRONG = """
from jax.extend.mlir.dialects import stablehlo

from autoshard.passes.driver import apply_patterns
from autoshard.passes.patterns import op, pattern
from autoshard.passes.registry import register_pass


@pattern("subtract-to-add", op("stablehlo.subtract"))
def subtract_to_add(match, builder):
    return [stablehlo.add(*match.root.operands)]


@register_pass("wrong", summary="Adds where it should subtract")
def wrong(module, context):
    apply_patterns(module, [subtract_to_add], context)
"""


def opt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: it chooses how many devices JAX starts with."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "autoshard", "opt", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


def test_every_pass_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [info.name for info in registered()]
    assert {"summary", "options", "preserves", "idempotent"} <= set(rows[0])
    assert main(["opt", "--list"]) == 0
    text = capsys.readouterr().out
    assert "shard\n" in text
    assert "memory: bytes or none = none" in text


@pytest.mark.slow
def test_a_function_is_sharded_and_what_was_written_is_read_again(folder: Path) -> None:
    done = opt(
        folder, "program.py:layer", "--example", "program.py:args", "--mesh", "a=2,b=2",
        "--pipeline", "flatten-calls,fold-transpose,shard", "--numerics", "--predict",
        "-o", "out.mlir", "--json", "--snapshots", "shots",
    )  # fmt: skip
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout)
    assert [row["name"] for row in told["passes"]] == ["flatten-calls", "fold-transpose", "shard"]
    assert sum(told["passes"][1]["rewrites"].values()) == 1
    assert told["passes"][2]["predicted"]["step_s"] > 0
    assert told["results"]["shard"]["kind"] == "autoshard plan"
    assert (folder / "shots" / "03-shard.mlir").is_file()

    again = opt(folder, "out.mlir", "--pipeline", "mlir:canonicalize", "--numerics")
    assert not again.returncode, again.stderr
    assert "sdy.sharding_constraint" in again.stdout
    assert "mlir:canonicalize" in again.stderr


@pytest.mark.slow
def test_a_wrong_pass_is_found_by_bisecting_its_reproducer(folder: Path) -> None:
    wrong = ("--load", "wrong.py")
    failed = opt(
        folder, "program.py:layer", "--example", "program.py:args", *wrong,
        "--pipeline", "flatten-calls,wrong,mlir:cse", "--numerics", "--seed", "3",
    )  # fmt: skip
    assert failed.returncode == 2
    assert "the pass wrong changes the values" in failed.stderr
    assert "a reproducer is in opt-reproducer.mlir" in failed.stderr

    found = opt(
        folder, "opt-reproducer.mlir", *wrong, "--bisect", "numerics", "--json",
        "--reproducer", "small.mlir",
    )  # fmt: skip
    assert not found.returncode, found.stderr
    told = json.loads(found.stdout)["found"]
    assert (told["pass"], told["rewrite"]["pattern"], told["ops"]) == (
        "wrong",
        "subtract-to-add",
        1,
    )
    assert '"seed": 3' in (folder / "small.mlir").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["opt"], "there is no program"),
        (["opt", "a.mlir", "-o", "out.txt"], "not written as .txt"),
        (["opt", "a.mlir", "--pipeline", "shrad"], "did you mean shard"),
        (["opt", "nowhere.mlir", "--pipeline", "shard"], "cannot read a module"),
        (["opt", "a.mlir", "--pipeline", "shard", "--example", "x:y"], "leave out --example"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
