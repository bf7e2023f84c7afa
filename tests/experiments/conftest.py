"""Compiles for tests: quick to compile, slow to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

# Together five times faster to compile; the tests' programs are tiny.
QUICK: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
}

Compile = Callable[[Any], Any]


@pytest.fixture(scope="session")
def quick_compile() -> Compile:
    """Compile a lowered function with those of the quick options that this jaxlib knows."""

    def known(name: str) -> bool:
        try:
            jax.jit(lambda x: x).lower(0).compile({name: QUICK[name]})
        except jax.errors.JaxRuntimeError as error:
            if name not in str(error):
                raise
            return False
        return True

    options = {name: value for name, value in QUICK.items() if known(name)}
    return lambda lowered: lowered.compile(options)
