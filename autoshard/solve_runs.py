"""A solver in a process of its own, so that its time, its memory and its end are its alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from autoshard.solvers.watch import GRACE

READING_S = 120.0
"""Time that a child gets to start Python and to read its problem [s]."""

EXIT_UNKNOWN = 3
"""Exit status of ``autoshard solve`` when time ran out before anything was found or proved."""


def run_apart(
    path: Path,
    solver: str,
    *,
    time_limit_s: float,
    seed: int = 0,
    hint: Path | None = None,
    limit: str | None = None,
) -> dict[str, Any]:
    """Solve a file with a solver in a child process.

    Args:
        path: The problem.
        solver: Name of the solver.
        time_limit_s: Time for solving [s]; a child that takes much longer is ended.
        seed: For the solver.
        hint: File with a choice to start from.
        limit: As ``autoshard solve --limit`` takes it.

    Returns:
        What ``autoshard solve --json`` prints; with ``error`` instead of all but ``solver`` if the
        child gave no answer.
    """
    words = [sys.executable, "-m", "autoshard", "solve", str(path), "--solver", solver, "--json"]
    words += ["--time-limit", repr(time_limit_s), "--seed", str(seed)]
    words += [] if hint is None else ["--hint", str(hint)]
    words += [] if limit is None else ["--limit", limit]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        patience = time_limit_s * (1 + GRACE[0]) + GRACE[1] + READING_S
        out, err = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"solver": solver, "error": f"ended after {patience:.0f} s without an answer"}
    except KeyboardInterrupt:  # the child gets it as well, and gives its best so far
        try:
            out, err = child.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            child.kill()
            raise KeyboardInterrupt from None
    if child.returncode in (0, 1, EXIT_UNKNOWN) and out:
        row: dict[str, Any] = json.loads(out)
        return row
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return {"solver": solver, "error": f"ended by {name}"}
    said = err.strip().splitlines()
    return {"solver": solver, "error": said[0] if said else f"exit status {child.returncode}"}
