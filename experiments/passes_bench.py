"""What passes buy on which program: predicted, and compiled on virtual CPU devices.

``python -m autoshard.experiments.passes_bench`` runs every line of :data:`LINES`, or those named,
and writes them into ``docs/passes_bench.md``; lines that were not run keep their rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from autoshard.experiments.passes_bench_rewriting import REWRITING
from autoshard.experiments.passes_bench_row import DEVICES, Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "passes_bench.md"

LINES: Mapping[str, Callable[[], Sequence[Row]]] = {**REWRITING}
"""Name of a line (that of the pass, first) to what runs it."""

_HEAD = "| line | program | figure | predicted | compiled | remark |"
_ROW = re.compile(r"\| ([^|]+) \|.*\|")


@dataclass(frozen=True, slots=True)
class Bench:
    """Rows of the page, by line."""

    rows: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> Bench:
        """The rows that a page has; none if there is no page."""
        found: dict[str, list[str]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        start = lines.index(_HEAD) + 2 if _HEAD in lines else len(lines)
        for line in lines[start:]:
            match = _ROW.fullmatch(line)
            if match is None:
                break
            found.setdefault(match[1], []).append(line)
        return cls(found)

    def page(self, seconds: float) -> str:
        """The page, with the time that the lines run last took [s]."""
        rows = [row for name in sorted(self.rows) for row in self.rows[name]]
        return "\n".join(
            [
                "# What passes buy",
                "",
                "Written by `python -m autoshard.experiments.passes_bench`. Every row is one",
                "figure of one program before and after a pass. *Predicted* is what the pass or",
                "the cost model says before anything is compiled; *compiled* is read off what",
                f"XLA:CPU makes for {DEVICES} virtual devices (or one), per device and call.",
                "Where the two part, the remark says why.",
                "",
                _HEAD,
                "|---|---|---|---|---|---|",
                *rows,
                "",
                f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
                f" jax {jax.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())},"
                f" {seconds:.0f} s for the lines run last.",
                "",
            ]
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run lines and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="*", help=f"by default all: {', '.join(LINES)}")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(argv)
    unknown = [name for name in options.lines if name not in LINES]
    if unknown:
        parser.error(f"no line is called {unknown[0]!r}; known: {', '.join(LINES)}")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    start = time.perf_counter()
    rows = dict(Bench.read(options.out).rows)
    for name in options.lines or LINES:
        made = LINES[name]()
        rows[name] = [row.text(name) for row in made]
        print("\n".join(rows[name]), flush=True)
        page = Bench(rows).page(time.perf_counter() - start)
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
