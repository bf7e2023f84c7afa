"""The command line: plans and questions about them, demo, validate, calibrate, solve, bench...

Results go to standard output, as text or, with ``--json``, as JSON and nothing else; signs of life
go to standard error. What a user can mend is printed as an error's text, with exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autoshard.cli_accuracy import add_accuracy_command
from autoshard.cli_bench import add_bench_command
from autoshard.cli_opt import add_opt_command
from autoshard.cli_plans import add_plan_commands
from autoshard.cli_solve import add_solve_command
from autoshard.errors import AutoshardError, InputError
from autoshard.terminal import (
    EXIT_NO_RESULT,
    EXIT_USER_ERROR,
    check_folder,
    cpu_mesh,
    print_json,
    progress,
    warnings_as_sentences,
)
from autoshard.typed import parse_mesh

if TYPE_CHECKING:
    import jax

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it (128 + SIGINT)."""

MAX_CALIBRATION_S = 3600.0
"""Longest time that a calibration may be asked to take [s]."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: The words after ``autoshard``; None takes those of the process.
    """
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with warnings_as_sentences():
            return run(options)
    except AutoshardError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_RESULT
    except KeyboardInterrupt:
        Console(stderr=True).show_cursor()
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)  # XLA's threads may still compile, and crash on teardown


def version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version("autoshard")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Shard any JAX function over a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"autoshard {version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_plan_commands(commands)

    demo = commands.add_parser(
        "demo", help="plan, compile, measure and compare a Llama-style train step on 8 CPU devices"
    )
    demo.add_argument("--size", default="small", help="size of the workload (default: small)")
    demo.add_argument(
        "--report", type=Path, default=Path("autoshard-report.html"), metavar="FILE",
        help="where the page goes (default: autoshard-report.html)",
    )  # fmt: skip
    demo.set_defaults(run=_demo)

    validate = commands.add_parser(
        "validate", help="predicted | compiled | measured for one workload and its hand-made plans"
    )
    validate.add_argument("workload", help="see `autoshard workloads`")
    validate.add_argument("--mesh", default="data=4,model=2", help="default: data=4,model=2")
    validate.add_argument("--size", default="tiny", help="size of the workload (default: tiny)")
    validate.add_argument(
        "--partitioner", choices=["xla", "shardy"], default="xla", help="who splits the program"
    )
    validate.add_argument("--no-measure", action="store_true", help="compile only; run nothing")
    validate.add_argument("--report", type=Path, metavar="FILE", help="also write an HTML page")
    validate.add_argument("--json", action="store_true", help="JSON instead of a table")
    validate.set_defaults(run=_validate)

    calibrate = commands.add_parser(
        "calibrate", help="measure this machine's devices, for the cost model of meshes of them"
    )
    calibrate.add_argument(
        "--devices", type=int, help="default: 8 virtual devices of a CPU, else all there are"
    )
    calibrate.add_argument(
        "--backend", default="cpu", help="what JAX calls the devices, e.g. gpu (default: cpu)"
    )
    calibrate.add_argument(
        "--seconds", type=float, default=20.0, help="time to spend [s] (default: 20)"
    )
    calibrate.add_argument(
        "--output", type=Path, metavar="FILE", help="default: the place where plans look for it"
    )
    calibrate.add_argument("--json", action="store_true", help="JSON instead of a table")
    calibrate.set_defaults(run=_calibrate)

    add_accuracy_command(commands)
    add_solve_command(commands)
    add_opt_command(commands)
    add_bench_command(commands)

    workloads = commands.add_parser("workloads", help="list the programs that come with autoshard")
    workloads.add_argument("--json", action="store_true", help="JSON instead of a table")
    workloads.set_defaults(run=_workloads)
    return parser


def _calibrate(options: argparse.Namespace) -> int:
    from autoshard.cost_models.calibration import save_calibration
    from autoshard.cost_models.microbenchmark import calibrate

    if not 0 < options.seconds <= MAX_CALIBRATION_S:
        raise InputError(
            f"{options.seconds} s are no time to measure for",
            fix=f"give --seconds a number up to {MAX_CALIBRATION_S}",
        )
    devices = _devices(options.backend, options.devices)
    with progress("calibrating") as say:
        calibration = calibrate(
            devices,
            budget_s=options.seconds,
            progress=lambda what, share: say(f"{what} ({share:.0%})"),
        )
    path = save_calibration(calibration, options.output)
    if options.json:
        errors = {kind: dataclasses.asdict(e) for kind, e in calibration.held_out().items()}
        print_json({"path": str(path), "held_out": errors, **dataclasses.asdict(calibration)})
        return 0
    print(f"{calibration.machine}: {calibration.devices} devices on {calibration.cores} cores")
    print(f"  dispatch {calibration.dispatch_s * 1e6:.0f} us")
    for dtype, fit in calibration.matmul.items():
        print(f"  matmul {dtype}: {_rate(fit.per_unit_s['flops'], 1)} GFLOP/s per device")
    for dtype, fit in calibration.elementwise.items():
        print(f"  elementwise {dtype}: {_rate(fit.per_unit_s['bytes'], 2)} GB/s per device")
    print(
        f"  in programs, ops take {calibration.op_factor:.2f} and collectives "
        f"{calibration.collective_factor:.2f} times as long"
    )
    for kind, error in calibration.held_out().items():
        print(
            f"  held out, {kind}: {error.median:.0%} off at the median, {error.worst:.0%} at most,"
            f" of {error.points} points"
        )
    print(f"  written to {path}")
    if calibration.cpu_share < 0.8:
        print(
            f"  note: this process got {calibration.cpu_share:.0%} of the cores while it measured;"
            " calibrate again on a quiet machine",
            file=sys.stderr,
        )
    return 0


def _devices(backend: str, count: int | None) -> tuple[jax.Device, ...]:
    """The devices to calibrate.

    Raises:
        InputError: JAX has no such backend, or not so many devices.
    """
    if backend == "cpu":
        return tuple(cpu_mesh(parse_mesh(f"x={8 if count is None else count}")).devices.flat)
    import jax

    try:
        found = jax.devices(backend)
    except RuntimeError as error:
        raise InputError(
            f"JAX has no devices of {backend}: {error}", fix="say --backend cpu, gpu or tpu"
        ) from error
    if count is not None and not 0 < count <= len(found):
        raise InputError(f"there are {len(found)} devices, not {count}", fix="leave out --devices")
    return tuple(found[:count])


def _rate(seconds_per_unit: float, digits: int) -> str:
    """A price per unit as units per second / 1e9; a fit may find no price at all."""
    return f"{1e-9 / seconds_per_unit:.{digits}f}" if seconds_per_unit else "unlimited"


def _workloads(options: argparse.Namespace) -> int:
    from autoshard.experiments.workloads import WORKLOADS, make

    rows: list[dict[str, Any]] = []
    for name in WORKLOADS:
        try:
            workload = make(name)
        except InputError as error:  # its library is not installed
            rows.append({"name": name, "description": str(error), "experts": []})
        else:
            description, experts = workload.description, list(workload.experts)
            rows.append({"name": name, "description": description, "experts": experts})
    if options.json:
        print_json(rows)
    else:
        for row in rows:
            description = str(row["description"]).replace("\n", f"\n{'':19}")
            print(f"{row['name']:18} {description}")
            if row["experts"]:
                print(f"{'':18} hand-made plans: {', '.join(row['experts'])}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    from autoshard.experiments.comparison import compare
    from autoshard.experiments.demo import print_comparison, write_page
    from autoshard.experiments.workloads import make

    check_folder(options.report)
    mesh = cpu_mesh(parse_mesh(options.mesh))  # first: making a workload may start JAX
    workload = make(options.workload, options.size)
    with progress(f"{workload.name}, {workload.size}") as say:
        compared = compare(
            workload, mesh, run=not options.no_measure, partitioner=options.partitioner, say=say
        )
    if options.report is not None:
        write_page(options.report, compared)
    if options.json:
        print_json(compared.to_json())
    else:
        print(f"{workload.name} ({workload.size}) on {options.mesh}")
        print_comparison(compared)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from autoshard.experiments.demo import demo
    from autoshard.experiments.workloads import make

    check_folder(options.report)
    workload = make("llama", options.size)
    with progress(f"{workload.name}, {workload.size}") as say:
        demo(workload, cpu_mesh(parse_mesh("data=4,model=2")), options.report, say)
    return 0
