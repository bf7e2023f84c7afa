"""The demonstration: a Llama-style train step, planned, compiled, measured, compared, reported."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pandas as pd
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from autoshard.cost_models.microbenchmark import processor_name
from autoshard.experiments.comparison import Comparison, Row, compare
from autoshard.experiments.workloads import Workload
from autoshard.plan_text import nbytes, seconds
from autoshard.report import report_data, write_report
from autoshard.validate import Figures


def comparison_table(compared: Sequence[Row]) -> Table:
    """The rows as a table for the terminal, the fastest of each column in bold."""
    table = Table(title="Per device and step", title_justify="left", box=None, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    columns: list[tuple[str, Callable[[Row], float | None], Callable[[float], str]]] = [
        ("step\npredicted", lambda r: r.predicted.step_s, seconds),
        ("\nmeasured", lambda r: r.measured.step_s, seconds),
        ("GFLOP\npredicted", lambda r: r.predicted.flops, lambda v: f"{v / 1e9:.3f}"),
        ("\ncompiled", lambda r: r.compiled.flops, lambda v: f"{v / 1e9:.3f}"),
        ("sent\npredicted", lambda r: r.predicted.collective_bytes, nbytes),
        ("\ncompiled", lambda r: r.compiled.collective_bytes, nbytes),
        ("peak\npredicted", lambda r: r.predicted.peak_bytes, nbytes),
        ("\ncompiled", lambda r: r.compiled.peak_bytes, nbytes),
    ]
    for title, _, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in compared:
        cells = []
        for _, value, text in columns:
            number = value(row)
            known = [v for r in compared if (v := value(r)) is not None]
            bold = number is not None and number <= min(known) and known.count(number) == 1
            cell = "" if number is None else text(number)
            cells.append(f"[bold]{cell}[/bold]" if bold else cell)
        table.add_row(row.name, *cells)
    return table


def comparison_frame(compared: Sequence[Row]) -> pd.DataFrame:
    """The rows as the report wants them."""
    columns = ["step_s", "flops", "collective_bytes", "peak_bytes"]

    def line(row: Row, figure: str, figures: Figures) -> dict[str, object]:
        return {"plan": row.name, "figure": figure, **figures.to_json()}

    lines = [
        line(row, figure, getattr(row, figure))
        for row in compared
        for figure in ("predicted", "compiled", "measured")
    ]
    frame = pd.DataFrame(lines)
    return frame.astype(dict.fromkeys(columns, float))


def write_page(path: Path, compared: Comparison) -> Path:
    """Write the report of a comparison.

    Args:
        path: The ``.html`` file.
        compared: What to report.
    """
    plan, workload = compared.plan, compared.workload
    data = report_data(
        plan,
        title=f"{workload.description} ({workload.size})",
        machine=f"{processor_name()}, {plan.mesh.devices} virtual CPU devices",
        date=datetime.date.today().isoformat(),
        versions=(
            ("jax", jax.__version__),
            ("jaxlib", importlib.metadata.version("jaxlib")),
            ("Python", platform.python_version()),
        ),
        comparison=comparison_frame(compared.rows),
    )
    return write_report(path, data)


def summary(compared: Comparison) -> str:
    """What became of the plan, and how its measured time compares, in sentences."""
    v, own = compared.validation, compared.own
    lines = []
    if v.max_relative_error is not None:
        lines.append(
            f"Largest difference from the unsharded values: {v.max_relative_error:.1e} of an "
            "array's largest magnitude."
        )
    lines.append(
        f"Collectives in the compiled program that the plan cannot name: "
        f"{len(v.unnamed_collectives)}. Involuntary rematerializations: {v.involuntary_remat}."
    )
    lines += [f"  {name}" for name in v.unnamed_collectives]
    lines += [
        f"  {d.source or '(no source line)'}: {d.what} {d.predicted:,.0f} predicted, "
        f"{d.compiled:,.0f} compiled"
        for d in v.disagreements[:5]
    ]
    timed = {r.name: r.measured.step_s for r in compared.experts if r.measured.step_s is not None}
    if own.measured.step_s is not None and timed:
        best, worst = min(timed, key=timed.__getitem__), max(timed, key=timed.__getitem__)
        lines.append(
            f"{own.name} takes {own.measured.step_s / timed[best]:.2f}x the time of the best "
            f"hand-made plan ({best}) and {own.measured.step_s / timed[worst]:.2f}x that of the "
            f"worst ({worst})."
        )
    return "\n".join(lines)


def print_comparison(compared: Comparison) -> None:
    """Print the table and the summary to standard output."""
    # Wide enough for the table wherever the output goes; a terminal that is narrower wraps it.
    console = Console(width=max(Console().width, 104))
    console.print(comparison_table(compared.rows))
    print(f"\n{summary(compared)}")


def demo(workload: Workload, mesh: Mesh, report: Path, say: Callable[[str], None]) -> Comparison:
    """Print a workload's plan and its comparison with hand-made plans, and write the page.

    Args:
        workload: What to run.
        mesh: Where.
        report: The page's file.
        say: Called with what is going on.
    """
    compared = compare(workload, mesh, say=say)
    print(compared.plan, end="\n\n")
    print_comparison(compared)
    print(f"Report: {write_page(report, compared)}")
    return compared
