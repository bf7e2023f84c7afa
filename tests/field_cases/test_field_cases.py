"""Situations that people reported, each run in a process of its own (some kill the process)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in (HERE / "cases").glob("case[0-9]*.py"))
QUICK = {"case24_messy_leaves", "case33_infeasible_memory"}


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_the_case_comes_out_as_its_reporter_wanted(case: str) -> None:
    command = [sys.executable, "run_case.py", f"{case}.py", "sharded"]
    done = subprocess.run(
        [*command, "--adapter", str(HERE / "adapter.py")],
        cwd=HERE / "cases",
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    reports = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    assert reports, f"no report, exit status {done.returncode}\n{done.stderr[-3000:]}"
    report = json.loads(reports[-1])
    assert report["status"] == "pass", json.dumps(report, indent=1)
