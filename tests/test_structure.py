"""The arrows between modules, read from their imports, and a few promises about the tree."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autoshard"

# A module may import modules of its own layer and of those above it in this list, never below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "given", "table", "shardings", "records", "child", "json_file"),
    (
        "traps",
        "graph",
        "counting",
        "extract",
        "problem",
        "program",
        "grouped",
        "windows",
        "ragged",
        "rules",
        "written",
        "signature",
        "pins",
    ),
    ("cost_models", "solvers"),
    (
        "reads",
        "branches",
        "reshard",
        "local",
        "localize",
        "narrowing",
        "reassociated",
        "onehot",
        "kinds",
        "pooling",
        "buffers",
        "schedule",
        "streams",
        "memory",
        "fusion",
        "padding",
        "work",
        "manual",
        "twins",
        "uneven",
        "strategies",
        "pricing",
    ),
    ("emit", "collectives_lowering"),
    (
        "annotations",
        "origin",
        "plan",
        "plan_parts",
        "plan_text",
        "trace",
        "piecewise",
        "rewrite",
        "remesh",
        "tracing",
        "execute",
    ),
    ("pieces", "indexing", "global_to_local"),
    ("shardy_passes", "partition"),
    ("inside", "module_text"),
    ("coarse",),
    ("budget",),
    ("interpret", "moves", "timeline"),
    ("unknown",),
    ("planner",),
    ("passes",),
    ("estimates",),
    ("validate", "report", "diff", "replan", "subject", "finding"),
    ("ahead",),
    ("question", "remedy"),
    ("explain", "why", "tradeoff", "lint", "lint_rules", "lint_hints"),
    ("search",),
    ("foreign",),
    ("api", "stablehlo", "opt_program"),
    ("terminal", "typed", "solve_files", "solve_runs"),
    ("cli_plans", "cli_solve", "cli_accuracy"),
    ("cli_bench", "cli_opt"),
    ("cli", "__main__"),
)
# A plan opens these rooms above it when it is asked a question, inside the method that asks.
DOORS: dict[str, frozenset[str]] = {
    "plan": frozenset(
        {"diff", "explain", "finding", "lint", "module_text", "replan", "tradeoff", "why"}
    ),
}
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the package, through its links."""
    folders = [PACKAGE]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts), path


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


IMPORTS = {name: imports(path) for name, path in modules()}


def room(module: str) -> str:
    """``autoshard.cost_models.chips`` -> ``cost_models``; the package itself -> ``""``."""
    return module.partition(".")[2].partition(".")[0]


def imports_of(room_name: str) -> set[str]:
    return {i for m, found in IMPORTS.items() if room(m) == room_name for i in found}


def is_under(imported: str, package: str) -> bool:
    return imported == package or imported.startswith(package + ".")


@pytest.mark.parametrize("module", sorted(m for m in IMPORTS if room(m) in LAYER))
def test_a_module_imports_its_own_layer_and_lower_ones_only(module: str) -> None:
    depth = LAYER[room(module)]
    upward = {
        imported
        for imported in IMPORTS[module]
        if is_under(imported, "autoshard")
        and LAYER.get(room(imported), -1) > depth
        and room(imported) not in DOORS.get(room(module), frozenset())
    }
    assert not upward


def test_every_module_has_a_layer() -> None:
    placed = {*LAYER, "experiments", "__init__"}
    assert {room(m) for m in IMPORTS if m != "autoshard"} <= placed


@pytest.mark.parametrize("room_name", ["solvers", "problem"])
def test_solvers_and_the_problem_do_not_know_jax(room_name: str) -> None:
    assert not {i for i in imports_of(room_name) if is_under(i, "jax") or is_under(i, "jaxlib")}


def test_cost_models_do_not_know_ortools() -> None:
    assert not {i for i in imports_of("cost_models") if is_under(i, "ortools")}


def test_only_the_command_line_imports_experiments() -> None:
    guests = {
        module
        for module, found in IMPORTS.items()
        if room(module) not in {"experiments", "cli", "cli_accuracy", "cli_bench"}
        and any(is_under(i, "autoshard.experiments") for i in found)
    }
    assert not guests


def test_experiments_use_only_what_any_user_has() -> None:
    private = {
        i
        for i in imports_of("experiments")
        if is_under(i, "autoshard") and any(part.startswith("_") for part in i.split("."))
    }
    assert not private


def test_nothing_imports_private_jax() -> None:
    private = {
        (module, i)
        for module, found in IMPORTS.items()
        for i in found
        if is_under(i, "jax._src") or is_under(i, "jaxlib._src")
    }
    assert not private


def test_public_names_exist_and_say_what_they_are() -> None:
    package = importlib.import_module("autoshard")
    names: list[str] = list(package.__all__)
    assert len(names) == len(set(names))
    silent = [n for n in names if not (inspect.getdoc(getattr(package, n)) or "").strip()]
    assert not silent


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_tree_names_no_package_registry() -> None:
    # Spelt in pieces, or this file would be found.
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "conda" + ".anaconda", "npmjs" + ".org"]
    named = [
        (path.relative_to(ROOT), host)
        for path in tracked_files()
        if path.suffix not in {".gz", ".mlirbc", ".npz", ".png"}
        for host in hosts
        if host in path.read_text(encoding="utf-8")
    ]
    assert not named


def test_the_links_into_the_package_are_relative() -> None:
    for name in ("passes", "cost_models", "experiments"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
