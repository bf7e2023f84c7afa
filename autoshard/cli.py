"""The command line: demo, validate, calibrate, solve, workloads.

Results go to standard output, as text or, with ``--json``, as JSON and nothing else; signs of life
go to standard error. What a user can mend is printed as an error's text, with exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autoshard.errors import AutoshardError, InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from autoshard.shardings import MeshShape

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it (128 + SIGINT)."""

MAX_CALIBRATION_S = 3600.0
"""Longest time that a calibration may be asked to take [s]."""

EXIT_NO_RESULT = 1
"""Exit status when the command ran but what was asked for does not exist or does not hold."""

EXIT_USER_ERROR = 2
"""Exit status for what the user can mend; argparse's own."""

MAX_VIRTUAL_DEVICES = 512
"""More virtual CPU devices than this are taken for a slip of the pen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: The words after ``autoshard``; None takes those of the process.
    """
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except AutoshardError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        Console(stderr=True).show_cursor()
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)  # XLA's threads may still compile, and crash on teardown


def parse_mesh(text: str) -> MeshShape:
    """A mesh as it is typed: ``data=4,model=2``.

    Raises:
        InputError: Says which part cannot be read.

    Examples:
        >>> parse_mesh("data=4,model=2").devices
        8
    """
    from autoshard.shardings import MeshShape

    fix = "write axes and their sizes as in data=4,model=2"
    names: list[str] = []
    sizes: list[int] = []
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not equals:
            raise InputError(
                f"cannot read the mesh axis {part.strip()!r}", at=f"mesh {text!r}", fix=fix
            )
        if not size.isdecimal() or int(size) < 1:
            raise InputError(
                f"mesh axis {name!r} has size {size!r}, which is no positive number",
                at=f"mesh {text!r}",
                fix=fix,
            )
        if name in names:
            raise InputError(
                f"mesh axis {name!r} is there twice", at=f"mesh {text!r}", fix="name each axis once"
            )
        names.append(name)
        sizes.append(int(size))
    if math.prod(sizes) > MAX_VIRTUAL_DEVICES:
        raise InputError(
            f"the mesh has {math.prod(sizes)} devices",
            at=f"mesh {text!r}",
            fix=f"use at most {MAX_VIRTUAL_DEVICES}: they are threads of this machine",
        )
    return MeshShape(tuple(names), tuple(sizes))


def cpu_mesh(shape: MeshShape) -> Mesh:
    """A mesh of virtual CPU devices of this process.

    Raises:
        InputError: JAX has started with fewer devices.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    # Accepted only before JAX's backend starts; afterwards the count below decides.
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", shape.devices)
    devices = jax.devices()
    if len(devices) < shape.devices:
        raise InputError(
            f"the mesh {shape} needs {shape.devices} devices; JAX has started with {len(devices)}",
            fix="run the command in a fresh process",
        )
    auto = (jax.sharding.AxisType.Auto,) * len(shape.names)
    return jax.make_mesh(shape.sizes, shape.names, auto, devices=devices[: shape.devices])


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
        "--partitioner", choices=["xla"], default="xla", help="who splits the program"
    )
    validate.add_argument("--no-measure", action="store_true", help="compile only; run nothing")
    validate.add_argument("--report", type=Path, metavar="FILE", help="also write an HTML page")
    validate.add_argument("--json", action="store_true", help="JSON instead of a table")
    validate.set_defaults(run=_validate)

    calibrate = commands.add_parser(
        "calibrate", help="measure this machine's CPU, for the cost model of CPU meshes"
    )
    calibrate.add_argument("--devices", type=int, default=8, help="default: 8")
    calibrate.add_argument(
        "--seconds", type=float, default=20.0, help="time to spend [s] (default: 20)"
    )
    calibrate.add_argument(
        "--output", type=Path, metavar="FILE", help="default: the place where plans look for it"
    )
    calibrate.add_argument("--json", action="store_true", help="JSON instead of a table")
    calibrate.set_defaults(run=_calibrate)

    solve = commands.add_parser("solve", help="solve a problem in the form of the ASPLOS contest")
    solve.add_argument("problem", type=Path, help="a .json or .json.gz file")
    solve.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="default: 60"
    )
    solve.add_argument("--solver", default="exact", help="default: exact")
    solve.add_argument("--seed", type=int, default=0, help="default: 0")
    solve.add_argument("--json", action="store_true", help="JSON instead of text")
    solve.set_defaults(run=_solve)

    workloads = commands.add_parser("workloads", help="list the programs that come with autoshard")
    workloads.add_argument("--json", action="store_true", help="JSON instead of a table")
    workloads.set_defaults(run=_workloads)
    return parser


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is going on; silent where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(what) as status:
        yield lambda stage: status.update(f"{what}: {stage}")


def _print_json(value: object) -> None:
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """The same value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _solve(options: argparse.Namespace) -> int:
    from autoshard.problem import load_problem
    from autoshard.solvers import SOLVERS

    if options.seed < 0:
        raise InputError(f"the seed is {options.seed}", fix="give a seed of 0 or more")
    if not options.time_limit > 0:
        raise InputError(
            f"the time limit is {options.time_limit} s", fix="give a positive number of seconds"
        )
    problem = load_problem(options.problem)
    solver = SOLVERS[options.solver]
    with _progress("solving") as say:
        solution = solver.solve(
            problem,
            time_limit_s=options.time_limit,
            seed=options.seed,
            progress=lambda p: say(f"{p.stage}, {p.nodes_left} nodes left, {p.seconds:.0f} s"),
        )
    if options.json:
        _print_json(
            {
                "problem": str(options.problem),
                "solver": options.solver,
                "status": solution.status.name,
                "cost": solution.cost if solution.choices else None,
                "lower_bound": solution.lower_bound,
                "gap": solution.gap if math.isfinite(solution.gap) else None,
                "peak_usage": solution.peak_usage,
                "usage_limit": problem.usage_limit,
                "seconds": solution.seconds,
                "choices": solution.choices,
            }
        )
    else:
        print(f"{options.problem}: {len(problem.costs)} nodes, {len(problem.edges)} edges")
        print(f"  {solution.status.value}")
        if solution.choices:
            bound = f"at least {solution.lower_bound:,}, gap {solution.gap:.4%}"
            print(f"  cost {solution.cost:,} ({bound})")
            limit = "" if problem.usage_limit is None else f" of {problem.usage_limit:,}"
            print(f"  peak usage {solution.peak_usage:,}{limit} bytes")
        print(f"  {solution.seconds:.2f} s")
    return 0 if solution.choices else EXIT_NO_RESULT


def _calibrate(options: argparse.Namespace) -> int:
    from autoshard.cost_models.calibration import save_calibration
    from autoshard.cost_models.microbenchmark import calibrate

    if not 0 < options.seconds <= MAX_CALIBRATION_S:
        raise InputError(
            f"{options.seconds} s are no time to measure for",
            fix=f"give --seconds a number up to {MAX_CALIBRATION_S}",
        )
    mesh = cpu_mesh(parse_mesh(f"x={options.devices}"))
    with _progress("calibrating") as say:
        calibration = calibrate(
            tuple(mesh.devices.flat),
            budget_s=options.seconds,
            progress=lambda what, share: say(f"{what} ({share:.0%})"),
        )
    path = save_calibration(calibration, options.output)
    if options.json:
        _print_json({"path": str(path), **dataclasses.asdict(calibration)})
        return 0
    print(f"{calibration.machine}: {calibration.devices} devices on {calibration.cores} cores")
    print(f"  dispatch {calibration.dispatch_s * 1e6:.0f} us")
    for dtype, fit in calibration.matmul.items():
        print(f"  matmul {dtype}: {_rate(fit.per_unit_s['flops'], 1)} GFLOP/s per device")
    for dtype, fit in calibration.elementwise.items():
        print(f"  elementwise {dtype}: {_rate(fit.per_unit_s['bytes'], 2)} GB/s per device")
    print(f"  written to {path}")
    if calibration.cpu_share < 0.8:
        print(
            f"  note: this process got {calibration.cpu_share:.0%} of the cores while it measured;"
            " calibrate again on a quiet machine",
            file=sys.stderr,
        )
    return 0


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
        _print_json(rows)
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

    _check_folder(options.report)
    workload = make(options.workload, options.size)
    mesh = cpu_mesh(parse_mesh(options.mesh))
    with _progress(f"{workload.name}, {workload.size}") as say:
        compared = compare(workload, mesh, run=not options.no_measure, say=say)
    if options.report is not None:
        write_page(options.report, compared)
    if options.json:
        _print_json(compared.to_json())
    else:
        print(f"{workload.name} ({workload.size}) on {options.mesh}")
        print_comparison(compared)
    return 0


def _check_folder(path: Path | None) -> None:
    """Refuse a place for a page before the work for it is done."""
    if path is not None and not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} for the report",
            at=str(path),
            fix="make the folder first",
        )


def _demo(options: argparse.Namespace) -> int:
    from autoshard.experiments.demo import demo
    from autoshard.experiments.workloads import make

    _check_folder(options.report)
    workload = make("llama", options.size)
    with _progress(f"{workload.name}, {workload.size}") as say:
        demo(workload, cpu_mesh(parse_mesh("data=4,model=2")), options.report, say)
    return 0
