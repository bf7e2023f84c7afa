"""What a call through autoshard costs over one through ``jax.jit`` with the same shardings.

``python -m autoshard.experiments.dispatch`` prints it. Both run one program on 8 virtual CPU
devices whose state has 50 donated arrays; rounds alternate, and the ratio is their median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autoshard import autoshard

ARRAYS = 50
ROUNDS = 40
CALLS = 40


def ratios() -> tuple[list[float], list[float]]:
    """Times of a call in each round [s]: through autoshard, and through ``jax.jit``."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    state = {f"p{i}": jnp.ones((64, 32)) for i in range(ARRAYS)}
    x = jnp.ones((64, 32))

    def step(state: Any, x: Any) -> Any:
        return {k: v + x.sum() for k, v in state.items()}, x.mean()

    ours = autoshard(step, mesh, donate_argnums=0)
    plan = ours.plan(state, x)
    theirs = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
    )
    _, placed = plan.place(state, x)

    def run(fn: Callable[..., Any], state: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        for _ in range(CALLS):
            state, _ = fn(state, placed)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / CALLS, state

    states = {fn: plan.place(jax.tree.map(jnp.copy, state)) for fn in (ours, theirs)}
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    for round_ in range(ROUNDS + 1):
        for fn in (ours, theirs):
            seconds, states[fn] = run(fn, states[fn])
            if round_:  # the first one compiles
                times[fn].append(seconds)
    return times[ours], times[theirs]


def main() -> None:
    """Print the comparison."""
    jax.config.update("jax_num_cpu_devices", 8)
    ours, theirs = ratios()
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(
        f"autoshard {statistics.median(ours) * 1e6:.0f} us, jax.jit "
        f"{statistics.median(theirs) * 1e6:.0f} us a call; ratio {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
