"""Shard any JAX function over a device mesh: a solver chooses, XLA follows, a clock checks."""

from autoshard.api import Lowered, Sharded, autoshard
from autoshard.errors import (
    AutoshardError,
    FallbackWarning,
    InfeasibleError,
    InputError,
    PlanMismatchError,
    UnknownNameError,
    UnknownOpWarning,
)
from autoshard.execute import Executable
from autoshard.plan import Plan
from autoshard.rules import Registration, register_rule
from autoshard.search import Options
from autoshard.stablehlo import Program
from autoshard.validate import Validation

__all__ = [
    "AutoshardError",
    "Executable",
    "FallbackWarning",
    "InfeasibleError",
    "InputError",
    "Lowered",
    "Options",
    "Plan",
    "PlanMismatchError",
    "Program",
    "Registration",
    "Sharded",
    "UnknownNameError",
    "UnknownOpWarning",
    "Validation",
    "autoshard",
    "register_rule",
]
