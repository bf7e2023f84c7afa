"""Fill the page's template.

Names in a program are not to be trusted: the data goes into the page as JSON without ``<``, ``>``
and ``&``, and the page's script puts it on the screen as text, never as markup.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from autoshard.report.data import COLUMNS, ReportData
from autoshard.report.layout import Link, Picture, picture


def write_report(path: str | Path, data: ReportData) -> Path:
    """Write the page to ``path`` and return it.

    Args:
        path: An ``.html`` file; replaced if it exists.
        data: What to show.
    """
    path = Path(path)
    path.write_text(render_report(data), encoding="utf-8")
    return path


def render_report(data: ReportData) -> str:
    """The page as text: no script, style, font or picture comes from outside."""
    parts = importlib.resources.files("autoshard.report")
    fill = {
        "{{title}}": html.escape(data.title),
        "{{style}}": (parts / "page.css").read_text(encoding="utf-8"),
        "{{script}}": (parts / "page.js").read_text(encoding="utf-8"),
        "{{data}}": _script_json(_payload(data)),
    }
    page = (parts / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{\w+\}\}", lambda mark: fill[mark[0]], page)


def _payload(data: ReportData) -> dict[str, Any]:
    return {
        "title": data.title,
        "mesh": {"names": data.mesh.names, "sizes": data.mesh.sizes},
        "machine": data.machine,
        "date": data.date,
        "versions": data.versions,
        "solver": {"status": data.solver_status, "gap": data.solver_gap},
        "planning_s": data.planning_s,
        "memory_limit_bytes": data.memory_limit_bytes,
        "picture": _drawn(data),
        **{name: _columnar(getattr(data, name), name) for name in COLUMNS if name != "edges"},
    }


def _columnar(table: pd.DataFrame, name: str) -> dict[str, Any]:
    columns = COLUMNS[name]
    return {"columns": columns, "rows": list(zip(*(table[c] for c in columns), strict=True))}


def _drawn(data: ReportData) -> dict[str, Any]:
    ops, edges = data.ops, data.edges
    cost_s = ops["compute_s"] + ops["hbm_s"] + ops["comm_s"]
    drawn: Picture = picture(
        {int(i): float(c) for i, c in zip(ops["index"], cost_s, strict=True)},
        [
            Link(int(a), int(b), str(r), float(s))
            for a, b, r, s in zip(*(edges[c] for c in COLUMNS["edges"]), strict=True)
        ],
    )
    return {
        "nodes": drawn.nodes,
        "edges": [
            {"reshard": e.reshard, "seconds": e.seconds, "through": e.through, "points": e.points}
            for e in drawn.edges
        ],
        "ops": drawn.ops,
    }


def _script_json(value: object) -> str:
    """JSON that is safe between script tags: an HTML parser sees no tag and no entity in it."""
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: object) -> object:
    """The same value in JSON's own types; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
