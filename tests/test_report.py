from __future__ import annotations

import dataclasses
import html.parser
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from autoshard.errors import InputError
from autoshard.report import ReportData, render_report, write_report
from autoshard.report.layout import Link, picture
from autoshard.shardings import MeshShape

LAYERS = 4
PARAMETERS = (
    ("embed", (32000, 1024), (("model",), ("data",))),
    ("blocks.attn.wq", (LAYERS, 1024, 1024), ((), ("data",), ("model",))),
    ("blocks.attn.wk", (LAYERS, 1024, 256), ((), ("data",), ("model",))),
    ("blocks.attn.wv", (LAYERS, 1024, 256), ((), ("data",), ("model",))),
    ("blocks.attn.wo", (LAYERS, 1024, 1024), ((), ("model",), ("data",))),
    ("blocks.mlp.gate", (LAYERS, 1024, 2816), ((), ("data",), ("model",))),
    ("blocks.mlp.up", (LAYERS, 1024, 2816), ((), ("data",), ("model",))),
    ("blocks.mlp.down", (LAYERS, 2816, 1024), ((), ("model",), ("data",))),
    ("blocks.norm1", (LAYERS, 1024), ((), ())),
    ("final_norm", (1024,), ((),)),
    ("count", (), ()),
)
SHARDINGS = ("[data, -, model]", "[data, -, -]", "[data, model, -]")
COLLECTIVES = (
    ("all_gather", "data", 61),
    ("all_gather", "data", 66),
    ("reduce_scatter", "data", 66),
    ("all_reduce", "model", 74),
    ("all_reduce", "model", 88),
    ("all_reduce", "data, model", 120),
    ("all_to_all", "model", 91),
)
KINDS = ("dot_general", "add", "multiply", "transpose", "exponential", "reduce", "convert")


def made_up(ops: int = 600, seed: int = 0) -> ReportData:
    """A report like that of a Llama-style train step, with numbers that nobody measured."""
    rng = np.random.default_rng(seed)
    mesh = MeshShape(("data", "model"), (4, 2))
    arguments = pd.DataFrame(
        [
            (f"state.{part}['{path}']", "f32", shape, sharding, 4 * math.prod(shape) // ways)
            for part in ("params", "opt.mu", "opt.nu")
            for path, shape, sharding in PARAMETERS
            for ways in [math.prod(mesh.size(axes) for axes in sharding)]
        ],
        columns=["path", "dtype", "shape", "sharding", "bytes"],
    )
    name = rng.choice(KINDS, ops, p=[0.16, 0.24, 0.26, 0.12, 0.04, 0.08, 0.10])
    dot = name == "dot_general"
    trips = np.where((np.arange(ops) // (ops // 6)) % 3 == 1, LAYERS, 1)
    size = rng.integers(1, 40, ops) * 65536
    table = pd.DataFrame(
        {
            "index": np.arange(ops),
            "name": [f"stablehlo.{n}" for n in name],
            "source": [f"llama.py:{40 + i // 4}" for i in range(ops)],
            "shapes": [f"bf16[16,512,{s // 8192}]" for s in size],
            "sharding": [SHARDINGS[i % 3] for i in range(ops)],
            "compute_s": np.where(dot, size * 1.4e-10, size * 2e-13) * trips,
            "hbm_s": size * 1.1e-11 * trips,
            "comm_s": np.where(dot & (rng.random(ops) < 0.3), size * 6e-11, 0.0) * trips,
            "bytes": size,
            "trips": trips,
        }
    )  # fmt: skip
    up, down = np.linspace(40, 150, ops // 2), np.linspace(150, 36, ops - ops // 2)
    memory = pd.DataFrame(
        {
            "time": np.arange(ops),
            "bytes": ((np.concatenate([up, down]) + rng.normal(0, 3, ops)) * 2**20).astype(int),
            "label": [f"{n} llama.py:{40 + i // 4}" for i, n in enumerate(name)],
        }
    )
    chain = [(i, i + 1, "", 0.0) for i in range(ops - 1)]
    skips = [(i, ops - 1 - i, "", 0.0) for i in range(0, ops // 2 - 5, 9)]
    side = [
        (int(i), min(int(i + rng.integers(2, 40)), ops - 1), "", 0.0)
        for i in rng.integers(0, max(ops - 41, 1), 60)
    ]
    steps = ["all-gather model", "all-to-all model: 2→1", "slice data, all-gather model"]
    reshards = [
        (int(i), int(i + 2), str(rng.choice(steps)), 4e-4) for i in rng.integers(0, ops - 3, 7)
    ]
    collectives = pd.DataFrame(
        [
            (kind, axes, int(b), LAYERS, b * 6e-11 * LAYERS, f"llama.py:{line}")
            for kind, axes, line in COLLECTIVES
            for b in rng.integers(2**18, 2**23, 3)
        ],
        columns=["kind", "axes", "bytes", "trips", "seconds", "source"],
    )  # fmt: skip
    plans = [("autoshard", 1.0), ("2d", 1.08), ("fsdp", 1.22), ("tp", 1.61), ("dp", 1.9)]
    rows: list[tuple[str, str, float, float, float, float]] = []
    for plan, worse in plans:
        dots, nan, peak = 9.61e9 * (1.5 if plan == "dp" else 1), math.nan, 148 * 2**20 * worse
        step_s = 0.438 * worse * (1 + 0.02 * len(plan))
        rows += [
            (plan, "predicted", 0.412 * worse, dots, 61e6 * worse**2, peak),
            (plan, "compiled", nan, dots * 1.005, 62.9e6 * worse**2, peak * 1.02),
            (plan, "measured", step_s, nan, nan, nan),
        ]
    comparison = pd.DataFrame(
        rows, columns=["plan", "figure", "step_s", "flops", "collective_bytes", "peak_bytes"]
    )
    edges = pd.DataFrame(
        chain + skips + side + reshards, columns=["producer", "consumer", "reshard", "seconds"]
    )
    return ReportData(
        title="llama, small: one train step",
        mesh=mesh,
        machine="A machine that does not exist, 8 virtual CPU devices",
        date="2026-11-30",
        versions=(("autoshard", "0.1.0"), ("jax", "0.10.2"), ("Python", "3.11.7")),
        solver_status="optimal: no plan is cheaper under this cost model",
        solver_gap=0.0,
        planning_s=1.84,
        memory_limit_bytes=160 * 2**20,
        arguments=arguments,
        ops=table,
        collectives=collectives,
        memory=memory,
        edges=edges,
        comparison=comparison,
    )  # fmt: skip


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{data}}",
    "&lt;b&gt; \u2028 \"'",
)


def hostile() -> ReportData:
    """A report in which everything that comes from a program tries to be markup."""
    data = made_up(40)
    bad = [HOSTILE[i % len(HOSTILE)] for i in range(40)]
    return dataclasses.replace(
        data,
        title=HOSTILE[0] + HOSTILE[2],
        mesh=MeshShape(("<i>", "a|b"), (4, 2)),
        machine=HOSTILE[1],
        arguments=data.arguments.assign(
            path=(bad * 2)[: len(data.arguments)],
            sharding=pd.Series([()] * len(data.arguments), dtype=object),
        ),
        ops=data.ops.assign(name=bad, source=bad, shapes=bad, sharding=bad),
        collectives=data.collectives.assign(kind=HOSTILE[0], axes=HOSTILE[1], source=HOSTILE[3]),
        memory=data.memory.assign(label=bad),
        edges=data.edges.assign(reshard=HOSTILE[0]),
        comparison=data.comparison.assign(plan=HOSTILE[1]),
    )


class Tags(html.parser.HTMLParser):
    """The tags of a page, its attributes, and the text between script tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)
        if self.tags and self.tags[-1] == "title":
            self.title += data


def embedded(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Tags(page).scripts[0])
    return found


def test_every_table_arrives_in_the_page_whole() -> None:
    data = made_up(600)
    shown = embedded(render_report(data))
    for name in ("arguments", "ops", "collectives", "memory", "comparison"):
        table: pd.DataFrame = getattr(data, name)
        assert len(shown[name]["rows"]) == len(table)
        assert set(shown[name]["columns"]) <= set(table.columns)
    column = shown["ops"]["columns"].index("comm_s")
    assert [r[column] for r in shown["ops"]["rows"]] == list(data.ops["comm_s"])


def test_an_absent_number_is_null_and_never_nan() -> None:
    shown = embedded(render_report(made_up(40)))["comparison"]
    row = dict(zip(shown["columns"], shown["rows"][1], strict=True))
    assert row["figure"] == "compiled"
    assert row["step_s"] is None


def test_names_from_a_program_cannot_become_markup() -> None:
    calm, attacked = (Tags(render_report(d)) for d in (made_up(40), hostile()))
    assert attacked.tags == calm.tags
    assert attacked.title.strip() == f"{HOSTILE[0]}{HOSTILE[2]} · autoshard"
    shown = json.loads(attacked.scripts[0])
    assert shown["ops"]["rows"][0][1] == HOSTILE[0]
    assert shown["ops"]["rows"][2][1] == HOSTILE[2]
    assert shown["ops"]["rows"][3][1] == HOSTILE[3]


def test_the_script_puts_nothing_on_the_screen_as_markup() -> None:
    script = Tags(render_report(made_up(40))).scripts[-1]
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in script  # fmt: skip


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = render_report(made_up(40))
    tags = Tags(page)
    assert {name for name, _ in tags.attributes} <= {
        "charset", "class", "content", "http-equiv", "id", "lang", "name", "type",
    }  # fmt: skip
    addresses = set(re.findall(r"\bhttps?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG's namespace, never fetched
    assert "@import" not in page
    assert "url(" not in page


def test_write_report_writes_what_render_report_returns(tmp_path: Path) -> None:
    data = made_up(40)
    path = write_report(tmp_path / "report.html", data)
    assert path.read_text(encoding="utf-8") == render_report(data)


def test_a_table_without_a_column_is_refused_by_name() -> None:
    data = made_up(40)
    with pytest.raises(InputError, match=r"no column 'trips'\n.*ReportData\.ops"):
        dataclasses.replace(data, ops=data.ops.drop(columns="trips"))


def test_a_figure_that_is_none_of_the_three_is_refused() -> None:
    data = made_up(40)
    with pytest.raises(InputError, match="no figure called 'guessed'"):
        dataclasses.replace(data, comparison=data.comparison.assign(figure="guessed"))


def test_a_report_of_nothing_but_a_title_can_be_written() -> None:
    data = made_up(40)
    empty = ReportData("empty", data.mesh, "m", "2026-11-30", (), "loaded")
    assert embedded(render_report(empty))["ops"]["rows"] == []


def test_ten_thousand_ops_fit_in_a_page() -> None:
    page = render_report(made_up(10_000))
    assert len(page) < 5_000_000


PAGES: dict[str, Callable[[], ReportData]] = {
    "large": lambda: made_up(10_000),
    "hostile": hostile,
    "empty": lambda: ReportData("empty", MeshShape(("x",), (1,)), "m", "d", (), "loaded"),
}


@pytest.mark.parametrize("which", PAGES)
def test_a_browser_draws_the_page_and_runs_no_foreign_script(which: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    path = write_report(tmp_path / "report.html", PAGES[which]())
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    tags = Tags(done.stdout).tags
    assert tags.count("script") == 2
    assert "img" not in tags
    assert "footer" in tags  # the last thing that the script draws
    assert "svg" in tags
    rows = tags.count("tr")
    assert rows < 200  # 10,000 ops are in the data, only those in view are in the page


def test_the_picture_keeps_the_most_expensive_ops_and_the_dearest_reshards() -> None:
    cost_s = {i: 1.0 + (i == 17) * 100 for i in range(50)}
    links = [Link(i, i + 1) for i in range(49)] + [Link(40, 44, "all-gather x", 5.0)]
    drawn = picture(cost_s, links, most=6)
    assert {n for n, *_ in drawn.nodes} >= {17, 40, 44}
    assert len(drawn.nodes) == 6
    reshard = next(e for e in drawn.edges if e.reshard)
    assert (reshard.producer, reshard.consumer, reshard.through) == (40, 44, False)


def test_every_edge_of_the_picture_goes_down_and_no_two_boxes_touch() -> None:
    rng = np.random.default_rng(3)
    cost_s = {i: float(c) for i, c in enumerate(rng.random(200))}
    pairs = rng.integers(0, 200, (500, 2))
    links = [Link(int(a), int(b), "r" * int(b % 7 == 0), 1.0) for a, b in pairs]
    drawn = picture(cost_s, links, most=30)
    layer = {n: depth for n, _, depth, _ in drawn.nodes}
    for edge in drawn.edges:
        depths = [depth for _, depth in edge.points]
        assert depths == list(range(layer[edge.producer], layer[edge.consumer] + 1))
        assert len(depths) > 1
    for depth in set(layer.values()):
        row = sorted(x for _, x, d, _ in drawn.nodes if d == depth)
        assert all(b - a >= 1 for a, b in itertools.pairwise(row))
    assert min(x for _, x, *_ in drawn.nodes) >= 0


def test_a_dotted_edge_stands_for_a_real_path_through_dropped_ops() -> None:
    drawn = picture({0: 9.0, 1: 0.1, 2: 0.1, 3: 9.0}, [Link(0, 1), Link(1, 2), Link(2, 3)], most=2)
    (edge,) = drawn.edges
    assert (edge.producer, edge.consumer, edge.through) == (0, 3, True)
    assert picture({0: 9.0, 1: 0.1, 3: 9.0}, [Link(0, 1)], most=2).edges == ()
