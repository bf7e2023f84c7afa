from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    block = tmp_path / "block.py"
    block.write_text(BLOCKS[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(block)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout


def test_the_how_to_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    program = tmp_path / "howto.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "needs at least" in done.stdout


def test_the_page_on_the_solver_runs_from_top_to_bottom(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "solver.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    program = tmp_path / "solver.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Moment(" in done.stdout


@pytest.mark.slow
def test_the_page_on_passes_runs_from_top_to_bottom(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    program = tmp_path / "passes.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "minus-negated on subtract at passes.py" in done.stdout
    assert "a module of" in done.stdout
    assert "rewrites: minus-negated" in done.stdout


def test_the_readme_has_a_block_to_run() -> None:
    assert BLOCKS


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)(?=`|\s+#)", README))
    assert {"demo", "test", "check", "test-all"} <= named
    assert not [target for target in named if f"\n{target}:" not in makefile]
