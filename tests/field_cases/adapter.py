"""How autoshard is plugged into the field cases (the protocol is in ``cases/README.md``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard import Executable, Plan, Sharded, autoshard


class Adapter:
    """A function sharded by autoshard, and what its last call with arrays ran on."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        options: Mapping[str, Any],
        plan: Plan | None = None,
    ) -> None:
        jit_options = ("donate_argnums", "static_argnums", "static_argnames")
        self.mesh = mesh
        self.sharded: Sharded = autoshard(
            fn,
            mesh,
            **{name: options[name] for name in jit_options if name in options},
            in_shardings=options.get("pins"),
            memory_limit=options.get("memory_limit_bytes"),
            plan=plan,
        )
        self.last: tuple[Executable, Plan] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        if not traced:
            self.last = self.sharded.compile(*args, **kwargs), self.sharded.plan(*args, **kwargs)
        return self.sharded(*args, **kwargs)

    def info(self) -> dict[str, Any]:
        if self.last is None:
            return {"mesh": self.mesh}
        executable, plan = self.last
        memory = executable.memory_analysis()
        return {
            "mesh": self.mesh,
            "in_shardings": executable.leaf_shardings,
            "hlo": executable.as_text(),
            "measured_peak_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes,
            "predicted_peak_bytes": plan.predicted.peak_bytes,
            "plan_seconds": plan.planning_s,
            "plans": len(self.sharded.plans),
        }

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self.sharded.plan(*args, **kwargs)

    def save_plan(self, path: str) -> None:
        assert self.last is not None, "call or plan first"
        self.last[1].save(path)

    @classmethod
    def load_plan(
        cls, path: str, fn: Callable[..., Any], mesh: Mesh, options: Mapping[str, Any]
    ) -> Adapter:
        return cls(fn, mesh, options, Plan.load(path))
