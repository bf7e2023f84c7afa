"""``autoshard(fn, mesh)``: trace, plan, rewrite, compile, run; each stage open to the caller."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, overload

import jax
from jax.sharding import Mesh

from autoshard.ahead import compile_lowered, validate_ahead
from autoshard.child import UnsupportedError
from autoshard.cost_models.aot import AheadOfTime
from autoshard.cost_models.protocol import CostModel
from autoshard.errors import InfeasibleError, InputError, warn_of_memory
from autoshard.execute import Executable
from autoshard.given import positive, whole_number
from autoshard.inside import can_constrain, constrained, meshes_of
from autoshard.partition import PARTITIONERS, Partitioner, warn_of_fallback
from autoshard.passes.keep_boundary import KeepBoundary
from autoshard.passes.manager import run_pipeline
from autoshard.passes.partition import around_partition
from autoshard.passes.pipeline import Pipeline
from autoshard.passes.shard import DEFAULT, Shard, around_sharder
from autoshard.pins import Pins
from autoshard.plan import Plan
from autoshard.remesh import on_mesh
from autoshard.search import Options, mesh_shape, pass_context, search
from autoshard.signature import (
    Argnames,
    Argnums,
    Call,
    Convention,
    Signature,
    array_type,
    call_key,
    split,
)
from autoshard.solvers import Progress, Solver
from autoshard.stablehlo import Program
from autoshard.tracing import (
    NotClosedError,
    ResultTree,
    Traced,
    flatten,
    is_planned,
    is_tracing,
    lower_with,
    module_of,
    named,
    trace,
)
from autoshard.validate import Validation, validate

MAX_AXES = 4
"""Mesh axes up to which the planner enumerates every sharding."""


MAX_LEANER = 3
"""Leaner plans that are compiled at most where a program needs more memory than was predicted."""


class Sharded:
    """A function that runs sharded over a mesh; made by :func:`autoshard`.

    Called like the function, it plans and compiles on the first call with arguments of some
    structure, shapes and types, and moves arguments to where the plan wants them. Called inside a
    JAX transformation (``grad``, ``vmap``, ``jit``, ``scan``) it is the function with the planned
    shardings constrained at its boundary; what is in between is left to XLA. It is the plain
    function under ``jax.jit`` where such constraints mean nothing: in the body of a ``shard_map``,
    in a program laid out on another mesh, with sizes that are not known yet, and where it uses
    arrays or named axes of the transformation other than its arguments.

    Attributes:
        mesh: The mesh it runs over.
        convention: Its static and donated arguments.
        options: How plans are searched for.
        partitioner: Who writes the program of one device.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        convention: Convention,
        options: Options,
        plan: Plan | None = None,
        partitioner: Partitioner = "xla",
    ) -> None:
        functools.update_wrapper(self, fn)
        self._name = str(getattr(fn, "__name__", type(fn).__name__))
        self._fn = fn
        self.mesh = mesh
        self.convention = convention
        self.options = options
        self.partitioner: Partitioner = partitioner
        self._given = plan
        self._lock = threading.RLock()
        self._traced: dict[Hashable, Traced] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._executables: dict[Hashable, Executable] = {}
        self._inner: dict[Hashable, tuple[Signature, Callable[..., Any], list[ResultTree]]] = {}
        self._last: Executable | None = None

    def __repr__(self) -> str:
        return f"<{self._name} sharded over {mesh_shape(self.mesh)}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far, one per kind of call."""
        return tuple(self._plans.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run sharded; plans and compiles first if such a call is new."""
        last = self._last
        if last is not None:
            values = last.match(split(self.convention, args, kwargs))
            if values is not None and last.is_alive(values):
                try:
                    outputs = last.compiled(*values)
                except (TypeError, ValueError):
                    # Raised by the checks before execution: other shapes or types, tracers, arrays
                    # that live elsewhere. The careful way sorts it out or meets the error again.
                    pass
                else:
                    return last.traced.result_tree.fill(outputs)
        return self._call(split(self.convention, args, kwargs))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for a call with such arguments: arrays or ``jax.ShapeDtypeStruct``.

        A :class:`Program` knows its arguments; here and below they can be left out.
        """
        call = self._abstract(args, kwargs)
        return self._plan(call, call_key(self.convention, call))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan, and lower with the plan's shardings written into the module."""
        call = self._abstract(args, kwargs)
        key = call_key(self.convention, call)
        return self._lowered(self._traced_for(call, key), self._plan(call, key))

    def compile(self, *args: Any, **kwargs: Any) -> Executable:
        """The executable that a call with such arguments runs; compiled once."""
        call = self._abstract(args, kwargs)
        return self._executable(call, call_key(self.convention, call))

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """What ``jax.jit`` traces of such a call: the function between its planned shardings."""
        call = self._abstract(args, kwargs)
        signature = Signature.of(self.convention, call)

        def inside(*arrays: Any) -> Any:
            given, keywords = signature.arguments_of(arrays)
            return self(*given, **keywords)

        inside.__name__ = inside.__qualname__ = self._name
        return jax.jit(inside).trace(*(leaf.abstract for leaf in signature.arguments))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the result of such a call, as ``jax.eval_shape``; nothing is run."""
        call = self._abstract(args, kwargs)
        traced = self._traced_for(call, call_key(self.convention, call))
        return traced.result_tree.fill([leaf.abstract for leaf in traced.results])

    def cost_analysis(self, *args: Any, **kwargs: Any) -> Any:
        """What XLA says such a call costs on one device."""
        return self.compile(*args, **kwargs).cost_analysis()

    def validate(
        self,
        *args: Any,
        repeats: int = 10,
        budget_s: float = 20.0,
        full: bool = False,
        say: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> Validation:
        """Compile, run and time such a call, and hold the plan's figures against the outcome.

        The program is compiled afresh, because XLA's log is part of the report. Arguments are
        copied where the program would consume them. With a ``jax.ShapeDtypeStruct`` among the
        arguments nothing runs, and there are no values and no times in the report. Nor is anything
        run on a mesh of planned devices (:meth:`autoshard.cost_models.topology.Topology.mesh`):
        the program is compiled ahead of time, by the compiler of those devices.

        Args:
            *args: As for a call.
            repeats: Timed calls at most, one or more.
            budget_s: Time for the timed calls [s].
            full: For planned TPUs: compile to the end, which takes minutes and adds XLA's estimated
                cycles, instead of until the program is scheduled.
            say: Told how a compilation for planned devices goes.
            **kwargs: As for a call.

        Raises:
            InputError: Also where ``repeats`` or ``budget_s`` is no such number.
        """
        repeats = whole_number(repeats, "repeats", least=1, fix="give 1 or more timed calls")
        budget_s = positive(budget_s, "budget_s", fix="give a positive number of seconds")
        call = self._abstract(args, kwargs)
        key = call_key(self.convention, call)
        traced, plan = self._traced_for(call, key), self._plan(call, key)
        if is_planned(self.mesh):
            lowered = self._lowered(traced, plan)
            result = lowered.compile_ahead(full=full, say=say)
            return validate_ahead(plan, result, lowered.partitioner, lowered.fallback_reason)
        values = [call.leaves[i] for i in traced.signature.array_positions]
        abstract = any(isinstance(v, jax.ShapeDtypeStruct) for v in values)
        return validate(
            plan,
            self._lowered(traced, plan).compile,
            None if abstract else values,
            repeats=repeats,
            budget_s=budget_s,
        )

    def _abstract(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call that is meant; a program that knows its arguments need not be told."""
        if isinstance(self._fn, Program) and not args and not kwargs:
            args = self._fn.avals
        return split(self.convention, args, kwargs)

    def _call(self, call: Call) -> Any:
        config: Any = jax.config  # its options are not declared
        if config.jax_disable_jit:  # step by step, for looking at
            signature = Signature.of(self.convention, call)
            args, kwargs = signature.arguments_of(
                [call.leaves[i] for i in signature.array_positions]
            )
            return self._fn(*args, **kwargs)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves)
        if traced or is_tracing(self.mesh):
            return self._transformed(call)
        key = call_key(self.convention, call)
        executable = self._executables.get(key) or self._executable(call, key)
        signature = executable.traced.signature
        values = [call.leaves[i] for i in signature.array_positions]
        for leaf, value in zip(signature.arguments, values, strict=True):
            if isinstance(value, jax.ShapeDtypeStruct):
                raise InputError(
                    f"{leaf.name} is a ShapeDtypeStruct, which has no values to run on",
                    at=f"argument {leaf}",
                    fix="call plan(...), lower(...) or compile(...) with shapes alone",
                )
        executable.check_donated(values)
        outputs = executable.compiled(*executable.place(values))
        self._last = executable
        return executable.traced.result_tree.fill(outputs)

    def _transformed(self, call: Call) -> Any:
        key = call_key(self.convention, call)
        with self._lock:
            if key not in self._inner:
                signature = Signature.of(self.convention, call)
                self._inner[key] = signature, *flatten(self._fn, signature)
        signature, flat, seen = self._inner[key]
        values = [call.leaves[i] for i in signature.array_positions]
        around = meshes_of(values, self.mesh)
        plan = self._plan_inside(call, key) if can_constrain(self.mesh, around) else None
        if plan is None:
            outputs = flat(*values)
            return seen[0].fill(outputs)
        traced = self._traced_for(call, key)
        outputs = constrained(
            flat,
            values,
            (signature.arguments, plan.argument_shardings),
            (traced.results, plan.result_shardings),
            traced.auto_mesh,
            around,
        )
        return seen[0].fill(outputs)

    def _plan_inside(self, call: Call, key: Hashable) -> Plan | None:
        """The plan for a call inside a transformation; None if there can be no plan."""
        shapes = (array_type(leaf).shape for leaf in call.leaves if array_type(leaf) is not None)
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            return None  # symbolic sizes, as jax.export has them
        try:
            return self._plan(call, key)
        except NotClosedError:
            return None

    def _traced_for(self, call: Call, key: Hashable) -> Traced:
        with self._lock:
            if key not in self._traced:
                signature = Signature.of(self.convention, call)
                self._traced[key] = trace(self._fn, signature, self.mesh)
            return self._traced[key]

    def _plan(self, call: Call, key: Hashable) -> Plan:
        with self._lock:
            if key not in self._plans:
                traced = self._traced_for(call, key)
                self._plans[key] = search(traced, self.options, self._given)
            return self._plans[key]

    def _lowered(self, traced: Traced, plan: Plan) -> Lowered:
        return Lowered.of(traced, plan, self.partitioner, self.options)

    def _executable(self, call: Call, key: Hashable) -> Executable:
        with self._lock:
            if key not in self._executables:
                traced, plan = self._traced_for(call, key), self._plan(call, key)
                executable = self._lowered(traced, plan).compile()
                limit = self.options.memory_limit
                if limit is not None and executable.peak_bytes > limit and self._given is None:
                    plan, executable = self._leaner(traced, plan, executable)
                self._plans[key], self._executables[key] = plan, executable
            return self._executables[key]

    def _leaner(
        self, traced: Traced, plan: Plan, executable: Executable
    ) -> tuple[Plan, Executable]:
        """A plan whose compiled program keeps the memory limit, where the one foreseen does not.

        The limit is lowered by as much as the prediction fell short, a few times. If nothing keeps
        the limit, the leanest program is taken, with a warning.
        """
        limit = self.options.memory_limit
        assert limit is not None
        goal, tried = limit, plan
        needed = executable.peak_bytes
        for _ in range(MAX_LEANER):
            goal = min(goal - 1, limit * tried.predicted.peak_bytes // needed)
            try:
                leaner = search(traced, replace(self.options, memory_limit=goal))
            except InfeasibleError:
                break
            spent_s = tried.planning_s + leaner.planning_s
            tried = replace(leaner, memory_limit=limit, planning_s=spent_s)
            compiled = self._lowered(traced, tried).compile()
            needed = compiled.peak_bytes
            if needed < executable.peak_bytes:
                plan, executable = tried, compiled
            if needed <= limit:
                return plan, executable
        warn_of_memory(traced.name, executable.peak_bytes, limit)
        return plan, executable


@dataclass(frozen=True, eq=False, slots=True)
class Lowered:
    """A program with a plan's shardings in it, ready to be compiled.

    Attributes:
        plan: The plan.
        traced: The program it is for.
        lowered: The rewritten program as JAX holds it.
        partitioner: Who has written, or will write, the program of one device.
        fallback_reason: Why that is XLA although Shardy was asked for; else empty.
        options: How the plan was searched for; its pipeline is what the program went through.
        results: What the passes of the pipeline found out, by the names of the passes.
    """

    plan: Plan
    traced: Traced
    lowered: jax.stages.Lowered
    partitioner: Partitioner = "xla"
    fallback_reason: str = ""
    options: Options = field(default_factory=Options)
    results: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traced: Traced,
        plan: Plan,
        partitioner: Partitioner = "xla",
        options: Options | None = None,
    ) -> Lowered:
        """Lower afresh and run the pipeline, whose sharding pass writes the plan.

        What a pipeline does after ``partition`` is left out where XLA partitions.
        """
        options = Options() if options is None else options
        lowered = lower_with(traced, plan.argument_shardings, plan.result_shardings)
        context = pass_context(traced, options)
        context.plan = plan
        before, after = around_partition(options.pipeline)
        run_pipeline(before, module_of(lowered), context, (KeepBoundary(),))
        made = cls(plan, traced, lowered, partitioner, "", options, context.results)
        if partitioner == "shardy":
            after = after if after.passes else Pipeline.parse("partition")
            try:
                run_pipeline(after, module_of(lowered), context, (KeepBoundary(),))
            except UnsupportedError as error:
                return replace(made, partitioner="xla", fallback_reason=str(error))
        return made

    def as_text(self) -> str:
        """The StableHLO module with its shardings."""
        return str(module_of(self.lowered))

    def compiler_ir(self, dialect: str = "stablehlo") -> Any:
        """The module with its shardings, as ``jax.stages.Lowered.compiler_ir``."""
        return self.lowered.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """What XLA says the whole program costs before it is split over devices."""
        return self.lowered.cost_analysis()

    def compile_ahead(
        self,
        *,
        full: bool = False,
        deadline_s: float | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> AheadOfTime:
        """Compile for the planned devices of the mesh, which nobody has to own.

        Args:
            full: On TPU compile to the end, which takes minutes and adds XLA's estimated cycles,
                instead of until the program is scheduled.
            deadline_s: Time after which the compiler is ended [s]; None: five minutes, or an hour.
            compiler_options: XLA's options by name.
            say: Told how it goes.

        Returns:
            What became of it; what the compiler makes of a program is never an exception.

        Raises:
            InputError: The mesh is of real devices, or the compiler is not installed.
        """
        return compile_lowered(
            self.lowered,
            self.traced,
            self.plan,
            full=full,
            deadline_s=deadline_s,
            compiler_options=compiler_options,
            say=say,
        )

    def compile(self) -> Executable:
        """Compile for the devices of the mesh; a fallback to XLA's partitioner warns."""
        if is_planned(self.traced.mesh):
            raise InputError(
                f"the devices of {self.traced.mesh.devices.flat[0].topology} are planned, nothing "
                "can run on them",
                fix="call compile_ahead() here, or validate(...) of the sharded function",
            )
        shardings = named(
            self.traced.signature.arguments, self.plan.argument_shardings, self.traced.mesh
        )
        results = named(self.traced.results, self.plan.result_shardings, self.traced.mesh)
        used, reason = self.partitioner, self.fallback_reason
        try:
            compiled = self.lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if used == "xla":
                raise
            used, reason = "xla", f"XLA refuses the program of one device: {error}"
            again = Lowered.of(self.traced, self.plan, "xla", self.options)
            compiled = again.lowered.compile()
        if reason:
            warn_of_fallback(self.traced.name, reason)
        program = on_mesh(compiled, results)
        return Executable(program, self.traced, shardings, used, reason)


@overload
def autoshard(
    fn: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    static_argnums: Argnums = None,
    static_argnames: Argnames = None,
    donate_argnums: Argnums = None,
    donate_argnames: Argnames = None,
    in_shardings: Pins = None,
    out_shardings: Pins = None,
    memory_limit: int | None = None,
    cost_model: CostModel | str | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    plan: Plan | None = None,
    partitioner: Partitioner = "xla",
    pipeline: str | Pipeline = DEFAULT,
) -> Sharded: ...


@overload
def autoshard(
    fn: None = None,
    mesh: Mesh | None = None,
    *,
    static_argnums: Argnums = None,
    static_argnames: Argnames = None,
    donate_argnums: Argnums = None,
    donate_argnames: Argnames = None,
    in_shardings: Pins = None,
    out_shardings: Pins = None,
    memory_limit: int | None = None,
    cost_model: CostModel | str | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    plan: Plan | None = None,
    partitioner: Partitioner = "xla",
    pipeline: str | Pipeline = DEFAULT,
) -> Callable[[Callable[..., Any]], Sharded]: ...


def autoshard(
    fn: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    *,
    static_argnums: Argnums = None,
    static_argnames: Argnames = None,
    donate_argnums: Argnums = None,
    donate_argnames: Argnames = None,
    in_shardings: Pins = None,
    out_shardings: Pins = None,
    memory_limit: int | None = None,
    cost_model: CostModel | str | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    plan: Plan | None = None,
    partitioner: Partitioner = "xla",
    pipeline: str | Pipeline = DEFAULT,
) -> Sharded | Callable[[Callable[..., Any]], Sharded]:
    """Make ``fn`` run sharded over ``mesh``, with shardings that a solver chooses.

    Without ``fn`` it returns a decorator: ``@autoshard(mesh=mesh)``.

    Args:
        fn: What ``jax.jit`` takes: a function of pytrees of arrays.
        mesh: A ``jax.sharding.Mesh`` of 1 to 4 axes, of any axis types and device order. Explicit
            axes are planned as automatic ones; results come back on the mesh as given.
        static_argnums: As for ``jax.jit``; as are the next three.
        static_argnames: Keywords that are part of the program.
        donate_argnums: Positions whose buffers may be reused; a donated state gets the sharding of
            the result that replaces it.
        donate_argnames: Keywords whose buffers may be reused.
        in_shardings: Arguments whose sharding is fixed: a pytree prefix of the positional arguments
            with ``PartitionSpec``, ``NamedSharding`` or None (free), or a dictionary from paths
            such as ``"[0]['w1']"`` or ``"state.params['w1']"`` to them.
        out_shardings: The same for the result, with paths such as ``"[1]"`` or ``"result[1]"``.
        memory_limit: What one device may use at its peak [bytes]; by default the device's memory,
            and no limit on CPU. Where a compiled program exceeds what is given here although its
            plan does not, leaner plans are made; a warning says if none helps.
        cost_model: A cost model or the name of one; by default the one of the mesh's devices.
        solver: A solver or the name of one.
        time_limit_s: Time the solver may take [s].
        progress: Called with signs of life from the solver.
        plan: A plan to use instead of searching for one; refused if it is for another program.
        partitioner: Who writes the program of one device: ``"xla"`` reads the plan's shardings as
            annotations; with ``"shardy"`` Shardy's passes write it with exactly the plan's
            collectives, and it falls back to ``"xla"``, with a warning, where they cannot.
        pipeline: The compiler passes that the program goes through, as text (see
            ``autoshard opt --list``); one of them shards it. Those before it change the program
            that is planned, those after it the program with its shardings. With ``partition`` in
            it Shardy is the partitioner, and passes after that change the program of one device.

    Returns:
        A :class:`Sharded` function.

    Raises:
        InputError: A mesh, function or option that cannot be used.
    """
    passes = Pipeline.of(pipeline)
    _, sharder, _ = around_sharder(passes)
    if around_partition(passes)[1].passes:
        partitioner = "shardy"
    if isinstance(sharder, Shard):
        memory_limit = _one_of("memory_limit", memory_limit, "memory", sharder.memory)
        solver = _one_of("solver", solver, "solver", sharder.solver)
    options = Options(
        in_shardings, out_shardings, memory_limit, cost_model, solver, time_limit_s, progress,
        passes,
    )  # fmt: skip

    if partitioner not in PARTITIONERS:
        raise InputError(
            f"no partitioner is called {partitioner!r}", fix=f"known: {', '.join(PARTITIONERS)}"
        )

    def wrap(function: Callable[..., Any]) -> Sharded:
        _check_function(function)
        if isinstance(function, Program):
            convention = function.convention(donate_argnums, donate_argnames)
            wishes = function.options(options, _checked_mesh(mesh))
            return Sharded(function, _checked_mesh(mesh), convention, wishes, plan, partitioner)
        convention = Convention.of(
            function, static_argnums, static_argnames, donate_argnums, donate_argnames
        )
        return Sharded(function, _checked_mesh(mesh), convention, options, plan, partitioner)

    if fn is None:
        _checked_mesh(mesh)
        return wrap
    return wrap(fn)


def _one_of(keyword: str, given: Any, option: str, written: Any) -> Any:
    """What is given by keyword or written in the pipeline, which may not contradict each other."""
    if given is not None and written is not None and given != written:
        raise InputError(
            f"{keyword}={given!r} is given, and the pipeline says shard{{{option}={written}}}",
            fix="say it once",
        )
    return written if given is None else given


def _checked_mesh(mesh: Any) -> Mesh:
    example = "jax.make_mesh((4, 2), ('data', 'model'))"
    if mesh is None:
        raise InputError("there is no mesh to shard over", fix=f"pass mesh={example}")
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"mesh is a {type(mesh).__name__}, not a jax.sharding.Mesh", fix=f"pass mesh={example}"
        )
    if not 1 <= len(mesh.axis_names) <= MAX_AXES:
        raise InputError(
            f"the mesh has {len(mesh.axis_names)} axes; 1 to {MAX_AXES} can be planned for",
            at=f"mesh {dict(mesh.shape)}",
            fix=f"make one such as {example}",
        )
    odd = [name for name in mesh.axis_names if not isinstance(name, str)]
    if odd:
        raise InputError(
            f"mesh axis {odd[0]!r} is not named by a string",
            at=f"mesh {dict(mesh.shape)}",
            fix=f"make one such as {example}",
        )
    # XLA ends the process over names with characters beyond ASCII; Shardy cannot read quotes.
    unreadable = [n for n in mesh.axis_names if not n.isascii() or not n.isprintable() or '"' in n]
    if unreadable:
        raise InputError(
            f"mesh axis {unreadable[0]!r} has a name that XLA cannot read",
            at=f"mesh {dict(mesh.shape)}",
            fix="name axes by ASCII letters, digits and '_'",
        )
    return mesh


def _check_function(fn: Any) -> None:
    if isinstance(fn, Mesh):
        raise InputError("the function is missing", fix="say autoshard(fn, mesh)")
    if not callable(fn):
        raise InputError(
            f"a {type(fn).__name__} is no function to shard", fix="say autoshard(fn, mesh)"
        )
