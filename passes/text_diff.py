"""Two texts of one program side by side, in which renumbered values are no difference."""

from __future__ import annotations

import difflib
import re

CONTEXT = 2
"""Equal lines that are shown around a difference."""

_VALUE = re.compile(r"%[\w#:]+")


def side_by_side(before: str, after: str, width: int = 160) -> str:
    r"""The lines in which two texts of a module differ, with what is around them.

    Every value behind an op that went is renumbered; lines that differ in such names alone are
    taken for equal.

    Args:
        before: A text.
        after: Another.
        width: Columns of the result.

    Examples:
        >>> print(side_by_side("a\n%1 = b\n%2 = c", "a\n%1 = c", width=24))
        a          | a
        %1 = b     <
        %2 = c     | %1 = c
    """
    left, right = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, _plain(left), _plain(right), autojunk=False)
    column = (width - 3) // 2
    lines: list[str] = []
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT)):
        if number:
            lines.append("...")
        for kind, i, j, k, m in group:
            old, new = left[i:j], right[k:m]
            for row in range(max(len(old), len(new))):
                here = old[row] if row < len(old) else ""
                there = new[row] if row < len(new) else ""
                mark = "|" if kind == "equal" else _mark(row, len(old), len(new))
                lines.append(f"{_cut(here, column):{column}} {mark} {_cut(there, column)}".rstrip())
    return "\n".join(lines)


def _mark(row: int, old: int, new: int) -> str:
    if row >= old:
        return ">"
    return "<" if row >= new else "!"


def _plain(lines: list[str]) -> list[str]:
    return [_VALUE.sub("%", line) for line in lines]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
