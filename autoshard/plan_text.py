"""A plan as text: what is sharded how, what it costs, and where the time and memory go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoshard.shardings import Sharding, to_partition_spec

if TYPE_CHECKING:
    from autoshard.plan import Plan
    from autoshard.plan_parts import BoundaryPlan, PlannedCollective
    from autoshard.uneven import Uneven

_ROWS = 40
_UNEVEN_ROWS = 6


def plan_text(plan: Plan) -> str:
    """The plan as a person reads it, one screen for a small program."""
    p, s = plan.predicted, plan.solver
    gap = "nothing proved" if s.gap is None else f"gap {s.gap:.2%}" if s.gap else "proved optimal"
    lines = [
        f"Plan on {plan.mesh} ({plan.mesh.devices} devices), cost model {plan.cost_model}",
        f"  predicted step {seconds(p.step_s)}: compute and memory {seconds(p.compute_s)}, "
        f"communication {seconds(p.communication_s)}"
        + (
            f" ({seconds(p.hidden_s)} of it hidden, {seconds(p.exposed_s)} exposed)"
            if p.hidden_s > 1e-9 * p.communication_s
            else ""
        )
        + (f", starting the call {seconds(p.dispatch_s)}" if p.dispatch_s else ""),
        f"  predicted peak {nbytes(p.peak_bytes)} per device"
        + (f" of {nbytes(plan.memory_limit)}" if plan.memory_limit is not None else "")
        + f"; {nbytes(p.collective_bytes)} sent in {len(plan.collectives)} "
        f"collective{'' if len(plan.collectives) == 1 else 's'}; "
        f"{p.flops / 1e9:.3f} GFLOP in products",
        f"  solver {s.solver}: {gap}; {s.nodes} decisions, {s.edges} edges, {s.seconds:.2f} s "
        f"(planning {plan.planning_s:.2f} s)",
        *(
            [f"  counted once, their trip counts being unknown: loops at {loops}"]
            if (loops := ", ".join(plan.uncounted_loops[:5]))
            else []
        ),
        "",
        "Arguments",
        *_boundary_rows(plan.arguments),
        "",
        "Results",
        *_boundary_rows(plan.results),
    ]
    if plan.collectives:
        lines += ["", "Collectives, dearest first"]
        numbered = enumerate(plan.collectives)
        dearest = sorted(numbered, key=lambda row: -row[1].seconds * row[1].trips)
        width = len(str(len(dearest) - 1))
        lines += [f"  [{i:>{width}}] {collective_text(c)}" for i, c in dearest[:12]]
        if len(dearest) > 12:
            lines.append(f"  … and {len(dearest) - 12} more")
    return "\n".join([*lines, *_uneven_rows(plan.uneven)])


def collective_text(c: PlannedCollective) -> str:
    """A collective on one line: its time in one call, what moves, and for whom."""
    times = f" x{c.trips}" if c.trips > 1 else ""
    return (
        f"{seconds(c.seconds * c.trips):>9}  {c.kind} over {'*'.join(c.axes)}, "
        f"{nbytes(c.nbytes)}{times}: {c.why}" + (f" ({c.source})" if c.source else "")
    )


def _boundary_rows(rows: tuple[BoundaryPlan, ...]) -> list[str]:
    width = max((len(r.name) for r in rows), default=0)
    text = []
    for r in rows[:_ROWS]:
        entries = ", ".join(repr(e) for e in to_partition_spec(r.sharding))
        notes = "".join(f" [{n}]" for n, on in (("donated", r.donated), ("pinned", r.pinned)) if on)
        kind = f"{r.dtype}[{','.join(map(str, r.shape))}]"
        text.append(f"  {r.name:<{width}}  {kind:<20} P({entries})  {nbytes(r.nbytes)}{notes}")
    if len(rows) > _ROWS:
        text.append(f"  … and {len(rows) - _ROWS} more")
    return text


def _uneven_rows(uneven: Uneven) -> list[str]:
    """What the mesh does not divide; nothing if everything is even."""
    lines = []
    if uneven.padded:
        lines.append(
            f"  padded on the way: {len(uneven.padded)} values; {nbytes(uneven.waste_bytes)} of "
            f"padding and {uneven.waste_flops / 1e9:.3g} GFLOP on it, per device"
        )
        lines += [
            f"    {p.name} {p.dtype}[{','.join(map(str, p.shape))}] {_spec(p.sharding)}: "
            f"{nbytes(p.waste_bytes)}, {p.waste_flops / 1e9:.3g} GFLOP"
            for p in uneven.padded[:_UNEVEN_ROWS]
        ]
    if uneven.whole:
        lines.append("  whole along mesh axes that do not divide them, the largest first:")
        for w in uneven.whole[:_UNEVEN_ROWS]:
            others = f" and {len(w.values) - 2} more" if len(w.values) > 2 else ""
            lines.append(
                f"    {w.size} along {'*'.join(w.axes)} in {', '.join(w.values[:2])}{others}, "
                f"{nbytes(w.nbytes)} per device: pad to {w.pad_to} to split it {w.ways} ways"
            )
    if uneven.loosened:
        lines.append("  prescribed by the function and not to be had:")
        lines += [f"    {text}" for text in uneven.loosened[:_UNEVEN_ROWS]]
    return ["", "Uneven dimensions", *lines] if lines else []


def _spec(sharding: Sharding) -> str:
    return f"P({', '.join(repr(e) for e in to_partition_spec(sharding))})"


def seconds(value: float) -> str:
    """A time with a unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def nbytes(value: float) -> str:
    """Bytes with a binary unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"
