"""What was priced is what runs: every workload, planned, compiled, run and compared.

One test per workload and mesh does all comparisons, because compiling is what takes long.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from autoshard import autoshard
from autoshard.experiments.workloads import WORKLOADS, make
from autoshard.validate import Validation
from tests.lowering import mesh_of

# Tables that fill the memory, and one block where several are compiled one after another.
OPTIONS: dict[str, dict[str, Any]] = {"dlrm": {"rows": 16_384}, "equinox_mixer": {"layers": 1}}
HELD = {"moe_ragged", "llama_prefill", "dlrm", "equinox_mixer", "haiku_lstm"}
"""Workloads whose peak of memory is compared too."""
QUICK = {("mlp", (2, 2, 2)), ("llama", (4, 2)), ("llama_decode", (4, 2))}


def validated(name: str, sizes: tuple[int, ...]) -> tuple[Validation, float]:
    """The comparison, and the tolerance of the values by the widest type of the result."""
    workload = make(name, **OPTIONS.get(name, {}))
    step = autoshard(
        workload.fn,
        mesh_of(*sizes),
        donate_argnums=workload.donate_argnums,
        time_limit_s=10.0,  # any plan has to be what runs, proved optimal or not
    )
    arguments = workload.init(0)
    result = jax.eval_shape(workload.fn, *arguments)
    types = {leaf.dtype.name for leaf in jax.tree.leaves(result)}
    tolerance = max(workload.tolerance[t] for t in types if t in workload.tolerance)
    return step.validate(*arguments, repeats=1), tolerance


def cases(*meshes: tuple[int, ...]) -> list[object]:
    return [
        pytest.param(
            name,
            sizes,
            id=f"{name}-{sizes}",
            marks=() if (name, sizes) in QUICK else pytest.mark.slow,
        )
        for name in WORKLOADS
        for sizes in meshes
    ]


@pytest.mark.parametrize(("name", "sizes"), cases((4, 2), (2, 2, 2)))
def test_the_compiled_program_does_what_the_plan_says(name: str, sizes: tuple[int, ...]) -> None:
    found, tolerance = validated(name, sizes)
    predicted, compiled = found.predicted, found.compiled
    assert found.max_relative_error is not None
    assert found.max_relative_error <= tolerance, found.worst_value
    assert found.involuntary_remat == 0
    assert found.unnamed_collectives == ()
    assert predicted.flops == pytest.approx(compiled.flops, rel=0.02)
    assert predicted.collective_bytes == pytest.approx(compiled.collective_bytes, rel=0.10)
    if name in HELD:
        assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.15)


@pytest.mark.parametrize(("name", "sizes"), cases((8,), (2, 4, 1)))
def test_the_values_are_those_of_the_function(name: str, sizes: tuple[int, ...]) -> None:
    found, tolerance = validated(name, sizes)
    assert found.max_relative_error is not None
    assert found.max_relative_error <= tolerance, found.worst_value
