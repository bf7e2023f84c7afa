"""The command ``autoshard opt``: run a pipeline of compiler passes and look at what it did."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.cli_plans import called
from autoshard.errors import AutoshardError, InputError
from autoshard.given import parse_bytes
from autoshard.terminal import EXIT_NO_RESULT, check_folder, cpu_mesh, print_json, progress
from autoshard.typed import load_module, parse_mesh, positions

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.extend.mlir import ir

    from autoshard.opt_program import Subject
    from autoshard.passes.manager import Instrument
    from autoshard.passes.pipeline import Pipeline
    from autoshard.passes.registry import PassInfo

_SUFFIXES = (".mlir", ".mlirbc")
_LARGEST_TYPED_MESH = "device=1"


def add_opt_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's."""
    opt = commands.add_parser("opt", help="run compiler passes on a program, and measure them")
    opt.add_argument(
        "program", nargs="?", metavar="PROGRAM",
        help="a StableHLO module (.mlir, .mlirbc), a reproducer, MODULE:FUNCTION or "
        "FILE.py:FUNCTION",
    )  # fmt: skip
    opt.add_argument("--list", action="store_true", help="what passes there are")
    opt.add_argument("--pipeline", metavar="TEXT", help="e.g. flatten-calls,shard{memory=14GiB}")
    opt.add_argument("--example", metavar="MODULE:ARGS", help="arguments of the function")
    opt.add_argument("--donate", metavar="POSITIONS", help="arguments to donate, e.g. 0,1")
    opt.add_argument("--static", metavar="POSITIONS", help="static arguments, e.g. 2")
    opt.add_argument("--mesh", help="axes and sizes, e.g. data=4,model=2; default: one device")
    opt.add_argument("--cost-model", help="e.g. v5e; default: this machine's CPU")
    opt.add_argument("--memory-limit", metavar="BYTES", help="per device, e.g. 14GiB")
    opt.add_argument("--load", action="append", default=[], metavar="MODULE",
                     help="import a module (or FILE.py) that registers passes")  # fmt: skip
    opt.add_argument("--numerics", action="store_true",
                     help="run the program after each pass and compare")  # fmt: skip
    opt.add_argument("--predict", action="store_true",
                     help="predicted time and memory after each pass")  # fmt: skip
    opt.add_argument("--snapshots", type=Path, metavar="FOLDER",
                     help="the module after each pass that changed it")  # fmt: skip
    opt.add_argument("--diff", action="store_true", help="what each pass changed, side by side")
    opt.add_argument("--seed", type=int, help="of random values; default: 0")
    opt.add_argument(
        "--bisect", metavar="WHAT",
        help="find the pass and the rewrite that break numerics, cost, or what a command checks "
        "(it is run with the path of a module, and ends with 0 if all is well)",
    )  # fmt: skip
    opt.add_argument(
        "--reproducer", type=Path, metavar="FILE", default=Path("opt-reproducer.mlir"),
        help="written when a pass fails, and by --bisect (default: opt-reproducer.mlir)",
    )  # fmt: skip
    opt.add_argument("-o", "--output", type=Path, metavar="FILE",
                     help=".mlir or .mlirbc; default: the module as text on standard output, the "
                     "report on standard error")  # fmt: skip
    opt.add_argument("--json", action="store_true", help="the report as JSON")
    opt.set_defaults(run=_opt)


def _opt(options: argparse.Namespace) -> int:
    _load(options.load)
    if options.list:
        return _list(options.json)
    if options.program is None:
        raise InputError("there is no program", fix="name one, or ask for --list")
    for path in (options.output, options.reproducer):
        check_folder(path)
    if options.output is not None and options.output.suffix not in _SUFFIXES:
        raise InputError(
            f"a module is not written as {options.output.suffix or 'a file without suffix'}",
            fix="name the file with .mlir or .mlirbc",
        )
    if options.snapshots is not None:
        options.snapshots.mkdir(parents=True, exist_ok=True)
    from autoshard.passes.pipeline import Pipeline

    pipeline = None if options.pipeline is None else Pipeline.parse(options.pipeline)
    # What the caller's own code prints is no part of the result.
    with contextlib.redirect_stdout(sys.stderr), progress(f"reading {options.program}") as say:
        subject = _subject(options)
        if pipeline is None and not subject.pipeline:
            raise InputError(
                "there are no passes to run", fix="give --pipeline; autoshard opt --list tells some"
            )
        chosen = pipeline or Pipeline.parse(subject.pipeline)
        if options.bisect is not None:
            return _bisect(options, subject, chosen, say)
        return _run(options, subject, chosen)


def _load(names: list[str]) -> None:
    """Import modules that register passes."""
    for name in names:
        load_module(name)


def _subject(options: argparse.Namespace) -> Subject:
    from autoshard.opt_program import lower_function, read_file

    typed = None if options.mesh is None else parse_mesh(options.mesh)
    if options.program.endswith(_SUFFIXES):
        if options.example is not None:
            raise InputError(
                "a StableHLO module says itself what its arguments are",
                at=f"--example {options.example}",
                fix="leave out --example",
            )
        subject = read_file(Path(options.program), typed, options.cost_model)
        cpu_mesh(subject.context.mesh or parse_mesh(_LARGEST_TYPED_MESH))
    else:
        mesh = cpu_mesh(typed or parse_mesh(_LARGEST_TYPED_MESH))
        function, args, kwargs = called(options.program, options.example)
        subject = lower_function(
            function,
            args,
            kwargs,
            mesh,
            options.cost_model,
            positions(options.donate),
            positions(options.static),
        )
    if options.memory_limit is not None:
        subject.context.memory_limit = parse_bytes(options.memory_limit)
    if options.seed is not None:
        subject.context.seed = options.seed
    return subject


def _run(options: argparse.Namespace, subject: Subject, pipeline: Pipeline) -> int:
    from autoshard.passes.instruments import Snapshots, Verify
    from autoshard.passes.manager import run_pipeline
    from autoshard.passes.numerics import Numerics
    from autoshard.passes.prediction import Prediction
    from autoshard.passes.report import Watch
    from autoshard.passes.reproducer import WriteReproducer

    watch = Watch(
        numerics=Numerics() if options.numerics else None,
        prediction=Prediction() if options.predict else None,
    )
    reproducer = WriteReproducer(options.reproducer)
    looking: list[Instrument] = [reproducer]
    if options.snapshots is not None or options.diff:
        tell = (lambda text: print(text, file=sys.stderr)) if options.diff else None
        looking.append(Snapshots(options.snapshots, tell))
    looking += [*watch.instruments[:-2], Verify(), *watch.instruments[-2:]]
    try:
        run_pipeline(pipeline, subject.module, subject.context, looking)
    except AutoshardError:
        if reproducer.written:
            print(f"a reproducer is in {options.reproducer}", file=sys.stderr)
        raise
    with contextlib.redirect_stdout(sys.__stdout__ or sys.stdout):
        if options.output is not None:
            options.output.write_bytes(_written(subject.module, options.output.suffix))
        if options.json:
            told = watch.to_json(pipeline, subject.context)
            if options.output is None:
                told["module"] = _written(subject.module, ".mlir").decode()
            print_json(told)
        else:
            text = watch.text(pipeline, subject.context)
            if options.output is None:
                print(_written(subject.module, ".mlir").decode())
                print(text, file=sys.stderr)
            else:
                print(text)
    return 0


def _bisect(
    options: argparse.Namespace, subject: Subject, pipeline: Pipeline, say: Callable[[str], None]
) -> int:
    from autoshard.passes import properties
    from autoshard.passes.bisect import bisect

    if options.bisect == "numerics":
        broken = properties.numerics(subject.context.seed)
    elif options.bisect == "cost":
        broken = properties.cost(subject.context)
    else:
        broken = properties.command(options.bisect)
    found = bisect(pipeline, subject.module, broken, subject.context, say=say)
    if found is not None:
        options.reproducer.write_text(found.reproducer, encoding="utf-8")
    with contextlib.redirect_stdout(sys.__stdout__ or sys.stdout):
        if options.json:
            print_json(
                {
                    "found": None if found is None else found.to_json(),
                    "reproducer": None if found is None else str(options.reproducer),
                }
            )
        elif found is None:
            print(f"no pass of {pipeline} breaks it")
        else:
            print(f"{found}, in {options.reproducer}")
    return EXIT_NO_RESULT if found is None else 0


def _written(module: ir.Module, suffix: str) -> bytes:
    from autoshard.passes.module_state import to_bytes

    if suffix == ".mlirbc":
        return to_bytes(module)
    return str(module.operation.get_asm(enable_debug_info=True)).encode()


def _list(as_json: bool) -> int:
    from autoshard.passes.registry import registered

    found = registered()
    if as_json:
        print_json([info.to_json() for info in found])
        return 0
    for info in found:
        print("\n".join(_described(info)))
    print("mlir:NAME{options}\n  Any pass that MLIR, StableHLO or Shardy has under that name")
    return 0


def _described(info: PassInfo) -> list[str]:
    lines = [info.name, f"  {info.summary}"]
    lines += [f"  {option}" for option in info.options]
    lines.append(f"  preserves: {', '.join(info.preserves) or 'nothing'}")
    if info.not_idempotent:
        lines.append(f"  twice is not once: {info.not_idempotent}")
    return lines
