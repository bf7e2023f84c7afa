"""What an engineer would want to know of a plan without having to ask."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.finding import LARGE_SHARE, Lint
from autoshard.given import whole_number
from autoshard.lint_hints import hints
from autoshard.lint_rules import (
    idle_axes,
    not_donated,
    not_reused,
    replicated,
    tiny_collectives,
    unproved,
    whole_ops,
)
from autoshard.replan import Replanner


def lint(
    replanner: Replanner,
    *,
    large_bytes: int | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Lint:
    """Look for what is likely a mistake or a loss.

    Args:
        replanner: The plan, opened.
        large_bytes: Bytes on one device from which on a tensor counts as large; None: a twentieth
            of the predicted peak.
        say: Told what is being done.

    Raises:
        InputError: ``large_bytes`` is no number of bytes.
    """
    plan = replanner.plan
    if large_bytes is None:
        large_bytes = int(LARGE_SHARE * plan.predicted.peak_bytes)
    fix = "give a whole number of bytes, e.g. 2**20"
    large_bytes = whole_number(large_bytes, "large_bytes", least=0, fix=fix)
    found = [
        *idle_axes(plan),
        *not_reused(replanner),
        *not_donated(replanner, large_bytes),
        *hints(replanner, say),
        *replicated(replanner, large_bytes, say),
        *whole_ops(replanner),
        *tiny_collectives(replanner, say),
        *unproved(plan),
    ]
    return Lint(tuple(sorted(found, key=lambda f: f.severity != "warning")))
