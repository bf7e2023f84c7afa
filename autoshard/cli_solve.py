"""The commands about sharding problems in numbers: solve a file, check, compare, price memory.

Exit statuses of ``autoshard solve``: 0 a feasible choice is printed (or checked, or a front); 1 it
is proved that there is none, or a checked choice does not hold; 2 what the user can mend; 3 time
ran out before anything was found or proved. Ctrl-C prints the best so far, with the same statuses.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoshard.errors import InputError
from autoshard.given import parse_bytes
from autoshard.problem import Problem, load_problem
from autoshard.solve_files import (
    front_chart,
    front_json,
    read_choices,
    runs_chart,
    solution_json,
    write_solution,
)
from autoshard.solve_runs import EXIT_UNKNOWN, run_apart
from autoshard.solvers import SOLVERS, Progress, Status
from autoshard.solvers.check import check_file
from autoshard.solvers.checked import Checked
from autoshard.solvers.hints import adapted
from autoshard.solvers.pareto import Point, front
from autoshard.solvers.watch import watch
from autoshard.terminal import EXIT_NO_RESULT, check_folder, print_json

LONGEST_S = 1e6
"""Longest time that a solver may be asked to take [s]."""


def add_solve_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's."""
    solve = commands.add_parser(
        "solve", help="solve a sharding problem in the form of the ASPLOS contest"
    )
    solve.add_argument("problem", type=Path, help="a .json or .json.gz file")
    solve.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS",
        help="for solving, after the file is read; default: 60",
    )  # fmt: skip
    solve.add_argument(
        "--solver", default="exact", help=f"one of {', '.join(SOLVERS)}; default: exact"
    )
    solve.add_argument("--seed", type=int, default=0, help="default: 0")
    solve.add_argument(
        "--hint", type=Path, metavar="FILE",
        help="start from a solution, of this problem or one with the same nodes",
    )  # fmt: skip
    solve.add_argument(
        "--limit", metavar="BYTES|none", help="instead of the file's usage limit, e.g. 14GiB"
    )
    solve.add_argument("--save", type=Path, metavar="FILE", help="keep the solution as JSON")
    solve.add_argument("--svg", type=Path, metavar="FILE", help="draw cost and bound over time, or "
                       "the front of --pareto")  # fmt: skip
    solve.add_argument("--json", action="store_true", help="JSON instead of text")
    how = solve.add_mutually_exclusive_group()
    how.add_argument(
        "--check", type=Path, metavar="FILE", help="count this solution anew; solve nothing"
    )
    how.add_argument(
        "--compare", nargs="?", const=",".join(SOLVERS), metavar="A,B",
        help="solvers side by side, each in its own process; default: all",
    )  # fmt: skip
    how.add_argument(
        "--pareto", action="store_true", help="cost against peak memory, and what a GiB is worth"
    )
    solve.add_argument(
        "--points", type=int, default=8, help="limits to solve for with --pareto; default: 8"
    )
    solve.set_defaults(run=_solve)


def _solve(options: argparse.Namespace) -> int:
    if options.seed < 0:
        raise InputError(f"the seed is {options.seed}", fix="give a seed of 0 or more")
    if not 0 < options.time_limit <= LONGEST_S:
        raise InputError(
            f"the time limit is {options.time_limit} s",
            fix=f"give a positive number of seconds, at most {LONGEST_S:.0f}",
        )
    if not 1 <= options.points <= 1000:
        raise InputError(f"--points is {options.points}", fix="give a number from 1 to 1000")
    _refuse_idle(options)
    for path in (options.save, options.svg):
        check_folder(path)
    solver = SOLVERS[options.solver]
    start = time.perf_counter()
    problem = load_problem(options.problem)
    reading_s = time.perf_counter() - start
    if options.limit is not None:
        problem = replace(problem, usage_limit=parse_limit(options.limit))
    if options.check is not None:
        return _check(options, problem)
    hint = None
    if options.hint is not None:
        choices, names, _ = read_choices(options.hint)
        try:
            hint = adapted(problem, choices, names)
        except InputError as error:
            raise InputError(error.problem, at=str(options.hint), fix=error.fix) from error
    if options.compare:
        return _compare(options, problem)
    if options.pareto:
        return _pareto(options, problem)
    with live(options.solver, options.time_limit) as tell:
        watched = watch(
            solver,
            problem,
            name=options.solver,
            time_limit_s=options.time_limit,
            seed=options.seed,
            hint=hint,
            progress=tell,
        )
    data = solution_json(
        problem,
        watched,
        problem=str(options.problem),
        solver=options.solver,
        seed=options.seed,
        time_limit_s=options.time_limit,
        reading_s=reading_s,
    )
    if options.save is not None and data["cost"] is not None:
        write_solution(options.save, problem, data)
    _draw(options.svg, runs_chart([data], f"{options.problem.name}, {options.solver}"))
    if options.json:
        print_json(data)
    else:
        print(f"{options.problem}: {len(problem.costs)} nodes, {len(problem.edges)} edges")
        print("\n".join(solution_lines(data)))
        if options.save is not None and data["cost"] is not None:
            print(f"  kept in {options.save}")
    status = watched.solution.status
    code = 0
    if data["cost"] is None:
        code = EXIT_NO_RESULT if status is Status.INFEASIBLE else EXIT_UNKNOWN
    if watched.interrupted:  # its thread is still running, maybe in code that cannot be stopped
        sys.stdout.flush()
        os._exit(code)
    return code


_IDLE = {"check": ("hint", "save", "svg"), "compare": ("save",), "pareto": ("hint", "save")}
"""Per way to run, the options that would do nothing there."""


def _refuse_idle(options: argparse.Namespace) -> None:
    for how, idle in _IDLE.items():
        for name in idle:
            if getattr(options, how) and getattr(options, name) is not None:
                raise InputError(
                    f"--{name} does nothing with --{how}", fix=f"leave --{name} or --{how} out"
                )


def parse_limit(text: str) -> int | None:
    """A usage limit as it is typed: ``none``, a number of bytes kept exact, or as ``14GiB``."""
    if text.strip().lower() == "none":
        return None
    return int(text) if text.strip().isdecimal() else parse_bytes(text)


def solution_lines(data: dict[str, Any]) -> list[str]:
    """A solution, as of ``solution_json``, in lines to read."""
    lines = [f"  {data['meaning']}"]
    if data["interrupted"]:
        lines.append(f"  stopped early: {data['interrupted']}")
    bound = data["lower_bound"]
    if data["cost"] is not None:
        lines.append(f"  cost         {data['cost']:>24,}")
        if bound is not None:
            lines.append(f"  at least     {bound:>24,}   gap {percent(data['gap'])}")
        limit = data["usage_limit"]
        of = "" if limit is None else f" of {limit:,}"
        lines.append(f"  peak usage   {data['peak_usage']:>24,}{of} bytes, at {data['peak_time']}")
    elif bound is not None:
        lines.append(f"  at least     {bound:>24,}")
    short = data["shortage"]
    if short is not None:
        missing = short["missing_bytes"]
        lines.append(
            f"  memory       at time point {short['time']} "
            + (f"at least {missing:,} bytes are missing" if missing else "it is tightest, and no "
               "single time point forbids it: their combination does")
        )  # fmt: skip
        lines += [
            f"               {h['bytes']:>24,} bytes  {_printable(h['name'])}"
            for h in short["held_by"]
        ]
        lines.append(f"  no limit below {data['least_usage_limit']:,} bytes can be met")
    lines.append(f"  {data['seconds']:.2f} s")
    return lines


def _printable(name: str) -> str:
    """A name from a file, with what would steer or stop a terminal escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def percent(gap: float | None) -> str:
    """A gap to read; ``-`` if there is none."""
    if gap is None:
        return "-"
    return "0%" if gap == 0 else f"{gap:.3%}" if gap >= 1e-5 else f"{gap:.1e}"


@contextmanager
def live(what: str, limit_s: float) -> Iterator[Callable[[Progress], None]]:
    """A line on standard error with incumbent, bound and gap; silent where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda sign: None
        return
    with Live(console=console, refresh_per_second=8, transient=True) as shown:

        def tell(sign: Progress) -> None:
            bound = f"{sign.lower_bound:,}" if abs(sign.lower_bound) < 1e17 else "unknown"
            cost, gap = "none yet", None
            if sign.cost is not None:
                cost = f"{sign.cost:,}"
                if sign.cost > 0 and bound != "unknown":
                    gap = max(0.0, (sign.cost - sign.lower_bound) / sign.cost)
            done = min(1.0, sign.seconds / limit_s)
            bar = "━" * round(20 * done) + " " * (20 - round(20 * done))
            line = (
                f"{what} {bar} {sign.seconds:.0f}/{limit_s:g} s  cost {cost}  at least {bound}  "
                f"gap {percent(gap)}  {sign.nodes_left} nodes left, {sign.stage}"
            )
            shown.update(Text(line, no_wrap=True, overflow="ellipsis"))

        yield tell


def _check(options: argparse.Namespace, problem: Problem) -> int:
    choices, _, told = read_choices(options.check)
    counted = check_file(options.problem, choices, limit=problem.usage_limit)
    if options.limit is not None and problem.usage_limit is None:
        counted = replace(counted, over=())
    claims = {"cost": counted.cost, "peak_usage": counted.peak_usage}
    wrong = {
        key: told[key]
        for key, value in claims.items()
        if told.get(key) is not None and told[key] != value
    }
    if options.json:
        print_json(
            {
                "problem": str(options.problem),
                "solution": str(options.check),
                "feasible": counted.feasible,
                "cost": counted.cost if not counted.forbidden else None,
                "peak_usage": counted.peak_usage,
                "peak_time": counted.peak_time,
                "usage_limit": problem.usage_limit,
                "over": [{"time": t, "bytes": excess} for t, excess in counted.over],
                "forbidden": counted.forbidden or None,
                "wrong_claims": wrong,
                "usage": [{"time": t, "bytes": used} for t, used in counted.usage],
            }
        )
    else:
        print(counted)
        for key, value in wrong.items():
            print(f"the file says otherwise: {key} {value}")
    return 0 if counted.feasible and not wrong else EXIT_NO_RESULT


def _compare(options: argparse.Namespace, problem: Problem) -> int:
    names = options.compare.split(",")
    for name in names:
        _ = SOLVERS[name]  # refused before the first runs
    runs: list[dict[str, Any]] = []
    stopped = False
    console = Console(stderr=True)
    for name in names:
        if console.is_terminal:
            console.print(f"{name}, up to {options.time_limit:g} s ...", style="dim")
        try:
            runs.append(
                run_apart(
                    options.problem,
                    name,
                    time_limit_s=options.time_limit,
                    seed=options.seed,
                    hint=options.hint,
                    limit=options.limit,
                )
            )
        except KeyboardInterrupt:
            stopped = True
        if stopped or (runs and runs[-1].get("interrupted") == "Ctrl-C"):
            break
    _draw(options.svg, runs_chart(runs, options.problem.name))
    if options.json:
        print_json(runs)
    else:
        print(f"{options.problem}: {len(problem.costs)} nodes, {len(problem.edges)} edges")
        print("\n".join(table(_COMPARED, [_compared(run) for run in runs])))
    if any(run.get("cost") is not None for run in runs):
        return 0
    proved = any(run.get("status") == Status.INFEASIBLE.name for run in runs)
    return EXIT_NO_RESULT if proved else EXIT_UNKNOWN


_COMPARED = (
    "solver", "status", "cost", "at least", "gap", "first cost [s]", "within 1% [s]", "time [s]",
    "memory [MiB]",
)  # fmt: skip


def _compared(run: dict[str, Any]) -> list[str]:
    if "error" in run:
        return [run["solver"], run["error"]]
    costs = [(m["seconds"], m["cost"]) for m in run["timeline"] if m["cost"] is not None]
    near = [s for s, c in costs if c <= run["cost"] + 0.01 * abs(run["cost"])]
    return [
        run["solver"],
        run["status"].lower(),
        "-" if run["cost"] is None else f"{run['cost']:,}",
        "-" if run["lower_bound"] is None else f"{run['lower_bound']:,}",
        percent(run["gap"]),
        f"{costs[0][0]:.2f}" if costs else "-",
        f"{near[0]:.2f}" if near else "-",
        f"{run['seconds']:.2f}",
        "-" if run["peak_rss_bytes"] is None else f"{run['peak_rss_bytes'] / 2**20:.0f}",
    ]


def _pareto(options: argparse.Namespace, problem: Problem) -> int:
    solver = Checked(SOLVERS[options.solver], options.solver)
    with live("front", options.time_limit) as tell:
        points = front(
            problem,
            points=options.points,
            time_limit_s=options.time_limit,
            solver=solver,
            seed=options.seed,
            progress=lambda what, sign: tell(replace(sign, stage=f"{what}: {sign.stage}")),
        )
    if points:
        _draw(options.svg, front_chart(points, f"{options.problem.name}: cost against memory"))
    if options.json:
        print_json({"problem": str(options.problem), "front": front_json(points)})
    elif points:
        print("\n".join(front_lines(points)))
    else:
        print("no feasible choice was found, even without a limit")
    return 0 if points else EXIT_UNKNOWN


def front_lines(points: Sequence[Point]) -> list[str]:
    """A front as a table to read."""
    rows = [
        [
            f"{point.peak_usage:,}",
            f"{point.cost:,}",
            percent(point.gap if math.isfinite(point.gap) else None),
            "-" if point.cost_per_gib is None else f"{point.cost_per_gib:,.6g}",
        ]
        for point in points
    ]
    return [
        *table(("peak usage [bytes]", "cost", "gap", "cost per GiB less"), rows),
        "the last column is what one GiB less costs on the way to the next leaner row",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts in aligned columns; a row that is shorter ends in a remark, not aligned."""
    full = [row for row in (head, *rows) if len(row) == len(head)]
    widths = [max(len(row[n]) for row in full) for n in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        if len(row) < len(head):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def _draw(path: Path | None, picture: str | None) -> None:
    if path is not None and picture is not None:
        path.write_text(picture, encoding="utf-8")
