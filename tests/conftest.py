"""Every test sees 8 virtual CPU devices; golden files are rewritten by ``--update-golden``."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

# Before anything asks JAX for a device: afterwards the number is fixed.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Programs of their own: tests/field_cases runs the first; the others made the data beside them with
# libraries that are not installed here.
collect_ignore_glob = ["field_cases/cases/*", "data/*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


def pytest_report_header() -> str:
    return f"python {platform.python_version()}, jax {jax.__version__}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with ``golden/<test file>/<test name>.txt`` beside the test.

    ``pytest --update-golden`` writes the file instead, to be reviewed as a diff.
    """

    def compare(text: str) -> None:
        folder = Path(request.path).parent / "golden" / Path(request.path).stem
        file = folder / f"{request.node.name}.txt"
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        assert file.exists(), f"{file} is missing: run pytest --update-golden and review it"
        assert text == file.read_text(encoding="utf-8")

    return compare
