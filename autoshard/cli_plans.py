"""Commands that make plans and ask them: plan, explain, why, diff, lint, specs.

Planning needs the shape of a mesh and no such devices: the mesh is one of virtual CPU devices, and
nothing is run on them. Questions are answered from the plan's file alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.errors import InputError
from autoshard.given import parse_bytes
from autoshard.terminal import EXIT_NO_RESULT, check_folder, cpu_mesh, print_json, progress
from autoshard.typed import (
    check_call,
    example,
    load_object,
    named_pin,
    parse_mesh,
    parse_spec,
    positions,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh


def add_plan_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to a parser's."""
    plan = commands.add_parser("plan", help="plan a function of your own for a mesh")
    plan.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="or FILE.py:FUNCTION, or a StableHLO module (.mlir, .mlirbc)",
    )  # fmt: skip
    plan.add_argument(
        "--example", metavar="MODULE:ARGS",
        help="its arguments, as arrays or jax.ShapeDtypeStruct: a tuple (positional), a dictionary "
        "(by keyword), or a function that returns one; a StableHLO module needs none",
    )  # fmt: skip
    plan.add_argument("--mesh", required=True, help="axes and sizes, e.g. data=4,model=2")
    plan.add_argument(
        "--topology", metavar="CHIP:SHAPE",
        help="devices to plan for that nobody has to own, e.g. v5e:4x4, v5p:4x4x4, h100:8x4; "
        "default: virtual CPU devices",
    )  # fmt: skip
    plan.add_argument(
        "--compile", action="store_true",
        help="also compile the program, for the topology with the compiler of its devices, and "
        "hold the plan's figures against it",
    )  # fmt: skip
    plan.add_argument(
        "--full", action="store_true",
        help="compile to the end: minutes on TPU, and XLA's estimated cycles",
    )  # fmt: skip
    plan.add_argument(
        "--cost-model", help="e.g. v5e; default: the topology's, or this machine's CPU"
    )
    plan.add_argument("--memory-limit", metavar="BYTES", help="per device, e.g. 14GiB")
    plan.add_argument(
        "--pin", action="append", default=[], metavar="NAME=SPEC",
        help="fix an argument (or result...) e.g. \"params['w']=None,model\"; several times",
    )  # fmt: skip
    plan.add_argument("--donate", metavar="POSITIONS", help="arguments to donate, e.g. 0,1")
    plan.add_argument("--static", metavar="POSITIONS", help="static arguments, e.g. 2")
    plan.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="default: 60"
    )
    plan.add_argument("--save", type=Path, metavar="FILE", help="keep the plan")
    plan.add_argument(
        "--write", type=Path, metavar="FILE",
        help="write the program with its shardings: StableHLO as .mlir (text) or .mlirbc",
    )  # fmt: skip
    plan.add_argument(
        "--trace", type=Path, metavar="FILE.json",
        help="write the predicted schedule of a step as a Chrome trace, for Perfetto",
    )  # fmt: skip
    plan.add_argument(
        "--save-problem", type=Path, metavar="FILE",
        help="write the problem that was solved, .json or .json.gz, for `autoshard solve`",
    )  # fmt: skip
    plan.add_argument(
        "--pareto", action="store_true", help="instead of one plan: time against memory"
    )
    plan.add_argument("--json", action="store_true", help="the plan as JSON instead of text")
    plan.set_defaults(run=_plan)

    explain = commands.add_parser("explain", help="why a tensor of a plan is sharded as it is")
    _about_plan(explain)
    explain.add_argument("name", help="argument, result, 'dot_general #12', or model.py:31")
    explain.add_argument(
        "--pin", action="append", metavar="SPEC", help="price this sharding, e.g. None,model"
    )
    explain.add_argument(
        "--alternatives", type=int, default=6, help="shardings to price at most (default: 6)"
    )
    explain.set_defaults(run=_explain)

    why = commands.add_parser("why", help="why a plan has a collective, and how to be rid of it")
    _about_plan(why)
    why.add_argument("collective", help="its number as the plan prints it, or its text")
    why.add_argument(
        "--hlo", type=Path, metavar="FILE",
        help="text of the compiled program: then COLLECTIVE may be the name of an instruction",
    )  # fmt: skip
    why.add_argument("--no-remedy", action="store_true", help="do not plan again without it")
    why.set_defaults(run=_why)

    diff = commands.add_parser("diff", help="what a second plan does otherwise than a first")
    diff.add_argument("before", type=Path, help="a plan that was saved")
    diff.add_argument("after", type=Path, help="another")
    diff.add_argument("--json", action="store_true", help="JSON instead of text")
    diff.set_defaults(run=_diff)

    lint = commands.add_parser("lint", help="what is likely a mistake or a loss in a plan")
    _about_plan(lint)
    lint.add_argument("--large", metavar="BYTES", help="tensors from here on count, e.g. 1MiB")
    lint.set_defaults(run=_lint)

    specs = commands.add_parser("specs", help="a plan's shardings as Python source to paste")
    specs.add_argument("plan", type=Path, help="a plan that was saved")
    specs.add_argument("--flax", action="store_true", help="logical axes and rules for flax")
    specs.add_argument("--argument", help="with --flax: the parameters, e.g. state.params")
    specs.add_argument(
        "--json", action="store_true",
        help="JSON instead of Python: per argument and result, the mesh axes of each dimension",
    )  # fmt: skip
    specs.set_defaults(run=_specs)


def _about_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan that was saved")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def _plan(options: argparse.Namespace) -> int:
    check_folder(options.save)
    check_folder(options.write)
    check_folder(options.trace)
    check_folder(options.save_problem)
    limit = None if options.memory_limit is None else parse_bytes(options.memory_limit)
    pins = dict(named_pin(text) for text in options.pin)
    donated, static = (positions(text) for text in (options.donate, options.static))
    mesh = _mesh(options)

    from autoshard.api import Sharded, autoshard
    from autoshard.problem import save_problem

    # What the caller's own code prints is no part of the result.
    with contextlib.redirect_stdout(sys.stderr), progress(f"planning {options.function}") as say:
        function, args, kwargs = called(options.function, options.example)
        if isinstance(function, Sharded):
            raise InputError(
                f"{options.function} is sharded already",
                fix="name the plain function, or ask its own .plan(...)",
            )
        results = {name: pin for name, pin in pins.items() if name.startswith("result")}
        sharded = autoshard(
            function,
            mesh,
            donate_argnums=donated,
            static_argnums=static,
            in_shardings={n: pin for n, pin in pins.items() if n not in results} or None,
            out_shardings=results or None,
            memory_limit=limit,
            cost_model=options.cost_model,
            time_limit_s=options.time_limit,
            progress=lambda p: say(f"{p.stage}, {p.nodes_left} decisions left, {p.seconds:.0f} s"),
        )
        plan = sharded.plan(*args, **kwargs)
        validation = None
        if options.compile:
            args, kwargs = _shapes(args), _shapes(kwargs)
            validation = sharded.validate(*args, full=options.full, say=say, **kwargs)
        front = plan.pareto(time_limit_s=options.time_limit, say=say) if options.pareto else None
    if options.save_problem is not None:
        save_problem(plan.problem(), options.save_problem)
    if options.save is not None:
        plan.save(options.save)
    if options.trace is not None:
        plan.write_trace(options.trace)
    if options.write is not None:
        plan.write_stablehlo(options.write)
    if front is not None:
        return _tell(front, options.json)
    if options.json:
        told = plan.to_json()
        print_json(
            told if validation is None else {"plan": told, "validation": validation.to_json()}
        )
    else:
        print(plan)
        if validation is not None:
            print(f"\n{validation}")
    ahead = None if validation is None else validation.ahead
    return 0 if ahead is None or ahead.outcome == "fits" else EXIT_NO_RESULT


def _mesh(options: argparse.Namespace) -> Mesh:
    """The mesh to plan for: of a topology's planned devices, or of virtual CPU devices."""
    if options.topology is None:
        if options.full:
            raise InputError(
                "--full is for the compiler of a topology", fix="give --topology and --compile too"
            )
        return cpu_mesh(parse_mesh(options.mesh))
    if options.full and not options.compile:
        raise InputError("--full says how to compile", fix="give --compile too")
    import jax

    from autoshard.cost_models.topology import Topology

    jax.config.update("jax_platforms", "cpu")  # no TPU of this machine is looked for
    topology = Topology(options.topology)
    shape = parse_mesh(options.mesh, most=topology.devices)
    return topology.mesh(dict(zip(shape.names, shape.sizes, strict=True)))


def _shapes(tree: Any) -> Any:
    """The same arguments without their values: what is only compiled is not run."""
    import jax

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, tree)


def called(function: str, given: str | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is to be planned, and its arguments.

    Args:
        function: As it is typed: ``MODULE:FUNCTION``, or a StableHLO file.
        given: What names its arguments, as it is typed; None for a file.
    """
    if function.endswith((".mlir", ".mlirbc")):
        if given is not None:
            raise InputError(
                "a StableHLO module says itself what its arguments are",
                at=f"--example {given}",
                fix="leave out --example",
            )
        from autoshard.stablehlo import Program

        return Program.from_stablehlo(Path(function)), (), {}
    found = load_object(function)
    if given is None:
        raise InputError(
            f"the arguments of {function} are not known", fix="name them with --example MODULE:ARGS"
        )
    args, kwargs = example(load_object(given), given)
    check_call(found, function, args, kwargs, given)
    return found, args, kwargs


def _explain(options: argparse.Namespace) -> int:
    from autoshard.plan import Plan

    if options.alternatives < 0:
        raise InputError(
            f"{options.alternatives} alternatives cannot be priced", fix="give 0 or more"
        )
    pins = None if options.pin is None else [parse_spec(text) for text in options.pin]
    plan = Plan.load(options.plan)
    with progress(f"explaining {options.name}") as say:
        told = plan.explain(options.name, pins=pins, alternatives=options.alternatives, say=say)
    return _tell(told, options.json)


def _why(options: argparse.Namespace) -> int:
    from autoshard.plan import Plan

    program = None if options.hlo is None else _text(options.hlo)
    plan = Plan.load(options.plan)
    with progress(f"asking about {options.collective}") as say:
        told = plan.why(options.collective, program=program, remedy=not options.no_remedy, say=say)
    return _tell(told, options.json)


def _diff(options: argparse.Namespace) -> int:
    from autoshard.plan import Plan

    return _tell(Plan.load(options.before).diff(Plan.load(options.after)), options.json)


def _lint(options: argparse.Namespace) -> int:
    from autoshard.plan import Plan

    large = None if options.large is None else parse_bytes(options.large)
    plan = Plan.load(options.plan)
    with progress("looking at the plan") as say:
        told = plan.lint(large_bytes=large, say=say)
    return _tell(told, options.json)


def _specs(options: argparse.Namespace) -> int:
    from autoshard.plan import Plan

    if options.argument is not None and not options.flax:
        raise InputError("--argument is for --flax", fix="give --flax too, or leave it out")
    if options.json and options.flax:
        raise InputError("flax's rules are Python source", fix="give --flax or --json, not both")
    plan = Plan.load(options.plan)
    if options.json:
        print_json(
            {
                "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
                "arguments": {a.name: a.sharding for a in plan.arguments},
                "results": {r.name: r.sharding for r in plan.results},
            }
        )
    else:
        print(plan.to_flax_rules(options.argument) if options.flax else plan.to_partition_specs())
    return 0


def _tell(told: Any, as_json: bool) -> int:
    if as_json:
        print_json(told.to_json())
    else:
        print(told)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a program: {error}", at=str(path), fix="check it") from error
