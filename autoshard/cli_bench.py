"""The command ``autoshard bench``: measures a part of autoshard on problems that come in files."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from autoshard.cli_solve import LONGEST_S, table
from autoshard.errors import InputError
from autoshard.solvers import SOLVERS
from autoshard.terminal import EXIT_NO_RESULT, check_folder, print_json, progress


def add_bench_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's."""
    bench = commands.add_parser("bench", help="measure the solver on problems that come in files")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    solver = kinds.add_parser(
        "solver", help="cost, bound, time and memory on the contest's instances, or our workloads'"
    )
    solver.add_argument(
        "--instances", type=Path, metavar="DIR",
        help="a folder of problems, with a reference.csv of its own or not; default: three of the "
        "contest's that come along",
    )  # fmt: skip
    solver.add_argument("--source", default="contest", help="whose problems; default: contest")
    solver.add_argument(
        "--time-limit", default="contest", metavar="contest|SECONDS",
        help="for each problem; default: the contest's own, else 60",
    )  # fmt: skip
    solver.add_argument("--only", metavar="A,B", help="these problems alone")
    solver.add_argument("--solver", default="exact", help="default: exact")
    solver.add_argument("--seed", type=int, default=0, help="default: 0")
    solver.add_argument("--json", action="store_true", help="JSON instead of a table")
    solver.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table into a page, e.g. docs/solver.md"
    )
    solver.set_defaults(run=_solver)


def _solver(options: argparse.Namespace) -> int:
    from autoshard.experiments import solver_bench

    check_folder(options.write)
    _ = SOLVERS[options.solver]  # refused before the first is read
    if options.seed < 0:
        raise InputError(f"the seed is {options.seed}", fix="give a seed of 0 or more")
    limit_s = _limit(options.time_limit)
    source = solver_bench.SOURCES[options.source]
    rows: list[solver_bench.Row] = []
    with tempfile.TemporaryDirectory() as scratch, progress("bench") as say:
        own = solver_bench.INSTANCES if options.source == "contest" else Path(scratch)
        folder = options.instances or own
        if not folder.is_dir():
            raise InputError("there is no such folder", at=str(folder), fix="check --instances")
        cases = list(source(folder))
        if options.only:
            names = options.only.split(",")
            unknown = sorted(set(names) - {case.name for case in cases})
            if unknown:
                raise InputError(
                    f"no problem is called {unknown[0]!r}",
                    at=str(folder),
                    fix=f"known: {', '.join(case.name for case in cases)}",
                )
            cases = [case for case in cases if case.name in names]
        try:
            for row in solver_bench.bench(
                cases, solver=options.solver, time_limit_s=limit_s, seed=options.seed, say=say
            ):
                rows.append(row)
                if not options.json:
                    print(table(solver_bench.HEAD, [solver_bench.cells(row)])[1], flush=True)
        except KeyboardInterrupt:
            pass  # what is finished is kept
    if options.json:
        print_json(solver_bench.rows_json(rows))
    elif rows:
        print()
        print("\n".join(table(solver_bench.HEAD, [solver_bench.cells(row) for row in rows])))
    if options.write is not None and rows:
        text = solver_bench.markdown(rows, options.solver, options.seed)
        solver_bench.write_table(options.write, options.source, text)
    kept = len(rows) == len(cases) and not any(row.overdue or row.error for row in rows)
    return 0 if kept else EXIT_NO_RESULT


def _limit(text: str) -> float | None:
    """Seconds as typed; None for each problem's own."""
    if text == "contest":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise InputError(
            f"the time limit is {text!r}", fix="give a positive number of seconds, or contest"
        )
    return seconds
