"""Lines of the table for passes that rewrite products, collectives, types and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import Mesh, PartitionSpec

from autoshard import autoshard
from autoshard.cost_models import named_cost_model
from autoshard.cost_models.compiled import CompiledProgram, read_compiled
from autoshard.experiments.passes_bench_row import DEVICES, Row
from autoshard.experiments.workloads import make
from autoshard.passes.collectives import Savings
from autoshard.passes.context import PassContext
from autoshard.passes.contraction import dot_flops
from autoshard.passes.manager import run_pipeline
from autoshard.passes.pad import Padding
from autoshard.passes.quantize import Quantize, QuantizedDot, accuracy
from autoshard.shardings import MeshShape

P = PartitionSpec


def reassociate() -> Sequence[Row]:
    """A low-rank adapter that is multiplied out; a train step, which has nothing to gain."""

    def adapted(x: Any, w: Any, down: Any, up: Any) -> Any:
        def loss(down: Any, up: Any) -> Any:
            return jnp.mean(jnp.tanh(x @ w + x @ (down @ up)) ** 2)

        return jax.grad(loss, (0, 1))(down, up)

    shapes = (512, 1024), (1024, 1024), (1024, 8), (8, 1024)
    adapter = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = []
    llama = make("llama")
    programs: tuple[tuple[str, Any, Any], ...] = (
        ("gradient of a rank-8 adapter of a 1024 x 1024 layer, 512 tokens", adapted, adapter),
        (f"train step of llama ({llama.size})", llama.fn, llama.args),
    )
    for name, fn, args in programs:
        flops, compiled = [], []
        for pipeline in ("flatten-calls", "flatten-calls,reassociate"):
            lowered, module = _lowered(fn, *args)
            run_pipeline(pipeline, module)
            flops.append(dot_flops(module))
            compiled.append(read_compiled(lowered.compile()).flops)
        rows.append(Row(name, "FLOP of products", _pair(flops), _pair(compiled), "one device"))
    return rows


def collectives() -> Sequence[Row]:
    """A gradient accumulation, and a workload whose plan leaves little."""

    def accumulated(w: Any, batches: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ w) ** 2)

        grad = jax.grad(loss)
        return lax.scan(lambda g, x: (g + grad(w, x), None), jnp.zeros_like(w), batches)[0]

    def args(*shapes: tuple[int, ...]) -> list[Any]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    mesh = _mesh((DEVICES,), ("data",))
    pins: Any = {"in_shardings": (P(), P(None, "data")), "out_shardings": P()}
    program = (accumulated, args((64, 64), (4, 4096, 64)), mesh, pins)
    rows = _communication("gradients of 4 batches, data parallel over 8", *program)
    llama = make("llama")
    other = _mesh((4, 2), ("data", "model"))
    donated: Any = {"donate_argnums": llama.donate_argnums, "time_limit_s": 20.0}
    rows += _communication(f"train step of llama ({llama.size}), 4 x 2",
                           llama.fn, llama.args, other, donated)  # fmt: skip
    return rows


def _communication(
    name: str, fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, options: Mapping[str, Any]
) -> list[Row]:
    """Bytes and number of collectives of one plan, with and without the pass."""
    plan, compiled, found = None, [], None
    for passes in ("partition", "partition,collectives"):
        pipeline = f"flatten-calls,shard,{passes}"
        step = autoshard(fn, mesh, pipeline=pipeline, plan=plan, **options)
        plan = step.plan(*args)
        lowered = step.lower(*args)
        found = lowered.results.get("collectives")
        compiled.append(read_compiled(lowered.lowered.compile()))
    assert isinstance(found, Savings)
    applied = ", ".join(f"{k} {v}" for k, v in found.rewrites.items()) or "nothing to do"
    sent = found.before.sent_bytes, found.after.sent_bytes
    count = float(found.before.count), float(found.after.count)
    runs = [float(sum(c.trips for c in program.collectives)) for program in compiled]
    return [
        Row(name, "bytes sent", sent, _pair([c.collective_bytes for c in compiled]), applied),
        Row(name, "collectives run", count, _pair(runs), "XLA:CPU combines all-reduces itself"),
    ]


def collective_matmul() -> Sequence[Row]:
    """The two products of a feed-forward layer whose tokens are split between layers."""

    def layer(x: Any, up: Any, down: Any) -> Any:
        whole = lax.all_gather(x, "model", tiled=True)
        return lax.psum_scatter(
            jnp.tanh(whole @ up) @ down, "model", scatter_dimension=0, tiled=True
        )

    specs = P("model"), P(None, "model"), P("model", None)
    mesh = _mesh((DEVICES,), ("model",))
    mapped: Any = jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=False
    )
    rows = []
    for chip in ("v5e", "v5p"):
        shapes = (8192, 4096), (4096, 14336), (14336, 4096)
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        context = PassContext(
            mesh=MeshShape(("model",), (DEVICES,)),
            cost_model=named_cost_model(chip, {"model": DEVICES}),
        )
        _, module = _lowered(mapped, *args)
        run_pipeline("flatten-calls,collective-matmul{both-ways=true,always=true}", module, context)
        overlaps = context.results["collective-matmul"]
        times = sum(o.apart_s for o in overlaps), sum(o.together_s for o in overlaps)
        rows.append(
            Row(
                f"feed-forward 4096-14336-4096, 8192 tokens in bf16, ring of 8 {chip}",
                "ms for products and collectives",
                (times[0] * 1e3, times[1] * 1e3),
                None,
                "; ".join(f"{o.pattern} gains {o.gain_s * 1e6:.0f} us" for o in overlaps),
            )
        )
    small = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 64), (64, 32))]
    programs = []
    for pipeline in ("flatten-calls", "flatten-calls,collective-matmul{always=true}"):
        lowered, module = _lowered(mapped, *small)
        run_pipeline(pipeline, module)
        programs.append(read_compiled(lowered.compile()))
    name = "the same with 64 tokens and widths 32-64-32 in f32"
    for figure, read in _FIGURES.items():
        pair = _pair([read(program) for program in programs])
        rows.append(Row(name, figure, None, pair, "the pass is to change neither"))
    return rows


_FIGURES: Mapping[str, Callable[[CompiledProgram], float]] = {
    "FLOP of products": lambda program: program.flops,
    "bytes sent": lambda program: program.collective_bytes,
}


def quantize() -> Sequence[Row]:
    """Decoding with weights in few bits."""
    decode = make("llama_decode")
    given = [np.asarray(leaf) for leaf in jax.tree.leaves(decode.init(0))]
    rows = []
    for kind, weights_only in (("int8", True), ("int8", False), ("int4", True)):
        quantization = Quantize(dtype=kind, weights_only=weights_only)  # type: ignore[arg-type]
        _, module = _lowered(decode.fn, *decode.args)
        run_pipeline("flatten-calls", module)
        found = accuracy(module, quantization, given)
        dots = {d.quantized.argument: d.quantized for d in found.dots}
        worst = max(found.result_errors)
        product = max(d.relative_error for d in found.dots)
        rows.append(
            Row(
                f"llama_decode ({decode.size}), {kind}{'' if weights_only else ' activations too'}",
                "bytes of the products' weights, if the caller stored them so",
                (float(sum(d.nbytes for d in dots.values())), float(_stored(dots.values()))),
                None,
                f"{len(found.dots)} products; relative error of a product up to {product:.2%}, of "
                f"results {worst:.2%}; the program that runs rounds what it is given",
            )
        )
    return rows


def _stored(dots: Any) -> int:
    listed: list[QuantizedDot] = list(dots)
    return sum(dot.stored_bytes for dot in listed)


def pad() -> Sequence[Row]:
    """Sizes that eight devices do not divide."""

    def layers(x: Any, weights: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def attend(x: Any, w: Any) -> Any:
        q, k, v = (jnp.einsum("sd,dhk->shk", x, w[n]) for n in range(3))
        shares = jax.nn.softmax(jnp.einsum("shk,thk->hst", q, k))
        return jnp.einsum("hst,thk->shk", shares, v)

    def args(*shapes: tuple[int, ...]) -> list[Any]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    programs: tuple[tuple[str, Any, Any], ...] = (
        ("4 layers of 515 x 515 on 515 rows in a loop", layers, args((515, 515), (4, 515, 515))),
        ("attention of 7 heads over 777 tokens", attend, args((777, 448), (3, 448, 7, 64))),
    )
    mesh = _mesh((DEVICES,), ("model",))
    rows = []
    for name, fn, given in programs:
        plans, compiled = [], []
        made: tuple[Padding, ...] = ()
        for passes in ("flatten-calls,shard", "flatten-calls,pad,shard"):
            step = autoshard(fn, mesh, pipeline=passes)
            plans.append(step.plan(*given).predicted)
            lowered = step.lower(*given)
            compiled.append(read_compiled(lowered.lowered.compile()))
            made = lowered.results.get("pad", ())
        what = ", ".join(str(p.size) + " to " + str(p.padded) for p in made)
        name = f"{name}, {DEVICES} CPU devices"
        remark = f"pads {what or 'nothing'}"
        sent = _pair([p.collective_bytes for p in plans])
        rows += [
            Row(name, "ms a call", _pair([p.step_s * 1e3 for p in plans]), None, remark),
            Row(name, "bytes sent", sent, _pair([c.collective_bytes for c in compiled])),
            Row(name, "FLOP of products", _pair([p.flops for p in plans]),
                _pair([c.flops for c in compiled])),
        ]  # fmt: skip
    return rows


REWRITING: Mapping[str, Callable[[], Sequence[Row]]] = {
    "collective-matmul": collective_matmul,
    "collectives": collectives,
    "pad": pad,
    "quantize": quantize,
    "reassociate": reassociate,
}
"""Lines by name."""


def _lowered(fn: Callable[..., Any], *args: Any) -> tuple[jax.stages.Lowered, ir.Module]:
    """A lowering of its own, and its module."""

    def program(*args: Any) -> Any:
        return fn(*args)

    lowered = jax.jit(program).lower(*args)
    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    return lowered, module


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]).reshape(sizes), names)


def _pair(values: Sequence[float]) -> tuple[float, float]:
    before, after = values
    return before, after
