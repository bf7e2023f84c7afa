"""A finding about a plan, with its place and its way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["warning", "note"]

LARGE_SHARE = 0.05
"""Share of the peak from which on a tensor counts as large."""

WORTH = 0.01
"""Share of a step below which a time is not worth a finding."""

SOLVES = 8
"""How often a rule solves anew at most; what is left is told without a price."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a plan that somebody should look at.

    Attributes:
        rule: Name of the rule that found it, e.g. ``replicated``.
        severity: ``warning`` for what is likely a mistake or a loss, ``note`` for what is good to
            know.
        place: The tensor, collective or source line.
        problem: What is the matter, with its price where it was measured.
        fix: What to do about it.
        seconds: What it costs in one call, or would [s]; None if that was not measured.
        nbytes: Bytes on one device that are at stake; None if none are.
    """

    rule: str
    severity: Severity
    place: str
    problem: str
    fix: str
    seconds: float | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.severity} [{self.rule}] {self.problem}\n  at:  {self.place}\n  fix: {self.fix}"
        )


@dataclass(frozen=True, slots=True)
class Lint:
    """All findings about a plan.

    Attributes:
        findings: Warnings first.
    """

    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "nothing to say about this plan"
