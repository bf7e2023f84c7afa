"""The one way autoshard reports what a caller can mend: problem, place, way out."""

from __future__ import annotations

import warnings


class AutoshardError(Exception):
    """Something the caller can mend.

    Args:
        problem: What is wrong, in one sentence.
        at: Where: an argument path, an op with its source line, a file. Empty if it has no place.
        fix: What to do or type next.

    Attributes:
        problem: As given.
        at: As given.
        fix: As given.
    """

    def __init__(self, problem: str, *, fix: str, at: str = "") -> None:
        self.problem, self.at, self.fix = problem, at, fix
        lines = [problem, *([f"  at:  {at}"] if at else []), f"  fix: {fix}"]
        super().__init__("\n".join(lines))


class InputError(AutoshardError, ValueError):
    """An argument, option or file that cannot be used as given."""


class UnknownNameError(AutoshardError, LookupError):
    """A name that is in no table, axis list or tree."""


class InfeasibleError(AutoshardError, ValueError):
    """No plan meets the memory limit or the pins."""


class SolverError(AutoshardError, RuntimeError):
    """What a solver answered contradicts itself or the problem."""


class PlanMismatchError(AutoshardError, ValueError):
    """A plan that was made for another program or mesh."""


class PassError(AutoshardError, RuntimeError):
    """A compiler pass that broke the program it was given."""


class UnknownOpWarning(UserWarning):
    """An op runs whole on every device because nobody said how it may be split."""


class FallbackWarning(UserWarning):
    """What was asked for could not be done, and another way was taken."""


def warn_of_memory(name: str, needed_bytes: int, limit_bytes: int) -> None:
    """Say that a compiled program needs more than the memory limit, against what was predicted."""
    warnings.warn(
        f"{name} was planned for {limit_bytes:,} bytes per device, but its compiled program needs "
        f"{needed_bytes:,}, and no leaner plan was found",
        FallbackWarning,
        stacklevel=5,
    )
