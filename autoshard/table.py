"""Named rows that are loaded on first use: cost models, solvers, workloads."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from autoshard.errors import UnknownNameError

T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """A read-only table from a name to an object given as ``"module:attribute"``.

    Args:
        kind: What a row is called in messages, e.g. ``"cost model"``.
        rows: Name to ``"package.module:attribute"``.
    """

    def __init__(self, kind: str, rows: Mapping[str, str]) -> None:
        self.kind = kind
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> T:
        """The object of a row, imported on first use.

        Raises:
            UnknownNameError: There is no such row.
        """
        if name not in self._rows:
            near = difflib.get_close_matches(name, self._rows, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownNameError(
                f"no {self.kind} is called {name!r}", fix=f"{hint}known: {', '.join(self._rows)}"
            )
        module, _, attribute = self._rows[name].partition(":")
        row: T = getattr(importlib.import_module(module), attribute)
        return row

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
