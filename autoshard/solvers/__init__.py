"""Solvers of sharding problems: exact first, every answer with its proved gap."""

from __future__ import annotations

from autoshard.solvers.solution import Progress, Shortage, Solution, Solver, Status
from autoshard.table import Table

SOLVERS: Table[Solver] = Table(
    "solver",
    {
        "exact": "autoshard.solvers.exact:EXACT",
        "local": "autoshard.solvers.local_search:LOCAL",
        "ilp": "autoshard.solvers.ilp:ILP",
        "brute": "autoshard.solvers.brute:BRUTE_FORCE",
    },
)
"""Solvers by name; ``SOLVERS["exact"].solve(problem, time_limit_s=10.0)``."""

__all__ = ["SOLVERS", "Progress", "Shortage", "Solution", "Solver", "Status"]
