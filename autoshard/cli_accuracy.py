"""``autoshard accuracy``: how right step times, rankings and what is said of programs are."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoshard.errors import InputError, UnknownOpWarning
from autoshard.terminal import (
    EXIT_NO_RESULT,
    check_folder,
    print_json,
    progress,
    warnings_as_sentences,
)


def add_accuracy_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's."""
    accuracy = commands.add_parser(
        "accuracy", help="predict published TPU training runs and comparisons, and say how right; "
        "--compiled, --measured: hold plans against what XLA:TPU makes of them, against the clock",
    )  # fmt: skip
    accuracy.add_argument(
        "--points", type=Path, metavar="FILE.csv",
        help="runs with the columns of cost_models/training/points.csv; default: those",
    )  # fmt: skip
    accuracy.add_argument(
        "--rankings", type=Path, metavar="FILE.csv",
        help="comparisons with the columns of cost_models/training/rankings.csv; default: those",
    )  # fmt: skip
    accuracy.add_argument("--json", action="store_true", help="everything, row by row, as JSON")
    compiled = accuracy.add_argument_group("plans against programs that XLA:TPU compiled")
    compiled.add_argument(
        "--compiled", action="store_true",
        help="FLOPs, bytes sent, peak memory and whether it fits, over some forty programs; needs "
        "no TPU but the extra autoshard[tpu]",
    )  # fmt: skip
    compiled.add_argument(
        "--topology", metavar="TEXT", help="only programs for this slice: v5e:4x4"
    )
    compiled.add_argument("--only", metavar="TEXT", help="only programs whose line holds TEXT")
    compiled.add_argument(
        "--rows", type=Path, metavar="FILE",
        help="where rows are kept as they come; a run that was stopped goes on from there",
    )  # fmt: skip
    compiled.add_argument("--again", action="store_true", help="also programs that have a row")
    compiled.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="put the table into a page, e.g. docs/accuracy.md",
    )
    accuracy.add_argument(
        "--measured", action="store_true",
        help="hold predicted step times against the clock on virtual CPU devices, some minutes; "
        "with --only, --rows, --again and --write as for --compiled",
    )  # fmt: skip
    accuracy.set_defaults(run=_accuracy)


def _compiled(options: argparse.Namespace) -> int:
    """Plans against compiled programs; without a result if a goal is not met."""
    import jax

    from autoshard.experiments import accuracy_compiled as experiment
    from autoshard.experiments.solver_bench import write_table

    check_folder(options.write)
    jax.config.update("jax_platforms", "cpu")  # no TPU of this machine is looked for
    points = [
        point
        for point in experiment.POINTS
        if (options.only or "") in str(point) and options.topology in (None, point.topology)
    ]
    if not points:
        slices = ", ".join(dict.fromkeys(point.topology for point in experiment.POINTS))
        raise InputError(
            "no program is left", fix=f"leave out --only and --topology, or name one of {slices}"
        )
    path = options.rows or experiment.rows_file()
    with (
        warnings_as_sentences(),
        warnings.catch_warnings(),
        redirect_stdout(sys.stderr),
        progress("accuracy") as say,
    ):
        warnings.simplefilter("ignore", UnknownOpWarning)
        rows = experiment.run(points, path, again=options.again, say=say)
    goals = experiment.summarize(rows)
    if options.json:
        told = [dataclasses.asdict(row) | {"said_rightly": row.verdict} for row in rows]
        held = [dataclasses.asdict(goal) | {"holds": goal.holds} for goal in goals]
        print_json({"rows": told, "goals": held})
    else:
        table = Table(*experiment.HEAD)
        for row in rows:
            table.add_row(*experiment.cells(row))
        console = Console(width=None)
        console.print(table)
        for goal in goals:
            console.print(str(goal), highlight=False)
    if options.write is not None:
        write_table(options.write, "compiled", experiment.markdown(rows))
    return 0 if all(goal.holds for goal in goals) else EXIT_NO_RESULT


def _measured(options: argparse.Namespace) -> int:
    """Plans against the clock; without a result if a goal is not met."""
    from autoshard.experiments.accuracy_measured import main

    check_folder(options.write)
    values = {"--only": options.only, "--rows": options.rows, "--write": options.write}
    words = [str(w) for name, value in values.items() if value for w in (name, value)]
    words += [f"--{name}" for name in ("again", "json") if getattr(options, name)]
    return main(words)


def _accuracy(options: argparse.Namespace) -> int:
    given = (options.topology, options.only, options.rows, options.again or None, options.write)
    if options.measured:
        if options.points or options.rankings or options.compiled or options.topology:
            raise InputError(
                "--measured times programs on this machine's CPU and nothing else",
                fix="leave out --points, --rankings, --compiled and --topology",
            )
        return _measured(options)
    if options.compiled:
        if options.points or options.rankings:
            raise InputError(
                "--points and --rankings are of published runs, not of compiled programs",
                fix="leave them out, or leave out --compiled",
            )
        return _compiled(options)
    if any(given):
        raise InputError(
            "--topology, --only, --rows, --again and --write belong to --compiled",
            fix="add --compiled, or leave them out",
        )
    # Imported here because fitting needs scipy's optimizers, which no other command does.
    from autoshard.cost_models.training.accuracy import accuracy
    from autoshard.cost_models.training.rankings import call_rankings

    found = accuracy(options.points)
    rankings = call_rankings(options.rankings)
    if options.json:
        print_json(
            {
                "points": dataclasses.asdict(found),
                "rankings": {
                    **dataclasses.asdict(rankings),
                    "right": sum(call.right for call in rankings.calls),
                    "same_sign": sum(call.same_sign for call in rankings.calls),
                },
            }
        )
        return 0
    console = Console(width=None)
    console.print(
        "Predicted step time of published training runs: mean of |predicted/measured - 1|"
    )
    console.print(_errors(found))
    console.print("Spearman's rank correlation within a chip, programs left out one at a time")
    console.print(_correlations(found))
    worst = sorted(
        (row for row in found.rows if row.measured_s),
        key=lambda row: -abs(row.left_out_s / (row.measured_s or 1) - 1),
    )
    console.print("The runs that are predicted worst, programs left out one at a time")
    console.print(_runs(worst[:10]))
    unmeasured = [row for row in found.rows if not row.measured_s]
    if unmeasured:
        console.print("Runs without a measured time")
        console.print(_runs(unmeasured))
    for name, reason in found.refused:
        console.print(f"refused: {name}: {reason}", highlight=False)
    right = sum(call.right for call in rankings.calls)
    signs = sum(call.same_sign for call in rankings.calls)
    console.print(
        f"Published comparisons: {right} of {len(rankings.calls)} called right, {signs} of them "
        f"with the better one ahead (else both within 5%); {len(rankings.not_called)} not called"
    )
    for call in rankings.calls:
        if not call.right:
            console.print(
                f"  wrong: {call.name}: {call.better} is better, predicted A/B {call.predicted:.2f}"
            )
    for name, reason in rankings.not_called:
        console.print(f"  not called: {name}: {reason}", highlight=False)
    return 0


def _errors(found: Any) -> Table:
    ways = list(dict.fromkeys(way for of in found.errors.values() for way in of))
    table = Table("runs", "rows", *ways)
    for group, errors in found.errors.items():
        table.add_row(group, str(found.counts[group]), *(f"{errors[way]:.1%}" for way in ways))
    return table


def _correlations(found: Any) -> Table:
    table = Table("chip", "rows", "step time", "MFU")
    for chip, of in found.rank_correlation.items():
        table.add_row(chip, f"{of['rows']:.0f}", f"{of['step time']:.3f}", f"{of['MFU']:.3f}")
    return table


def _runs(rows: Any) -> Table:
    table = Table("run", "measured [s]", "predicted [s]", "error", "predicted MFU")
    for row in rows:
        error = f"{row.left_out_s / row.measured_s - 1:+.1%}" if row.measured_s else ""
        measured = f"{row.measured_s:.3g}" if row.measured_s else ""
        table.add_row(row.name, measured, f"{row.left_out_s:.3g}", error, f"{row.mfu:.1%}")
    return table
