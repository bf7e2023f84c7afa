"""How autoshard is plugged into the field cases (the protocol is in ``cases/README.md``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
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
        self.planned: Plan | None = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        if not traced:
            executable = self.sharded.compile(*args, **kwargs)
            self.planned = self.sharded.plan(*args, **kwargs)
            self.last = executable, self.planned
        return self.sharded(*args, **kwargs)

    def info(self) -> dict[str, Any]:
        if self.last is None:
            found = {"mesh": self.mesh, "plans": len(self.sharded.plans)}
            return found if self.planned is None else found | _prediction(self.planned)
        executable, plan = self.last
        return {
            "mesh": self.mesh,
            "in_shardings": executable.leaf_shardings,
            "plans": len(self.sharded.plans),
            **_prediction(plan),
            **_compiled(executable),
        }

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        self.planned = self.sharded.plan(*args, **kwargs)
        return self.planned

    def save_plan(self, path: str) -> None:
        assert self.planned is not None, "call or plan first"
        self.planned.save(path)

    @classmethod
    def load_plan(
        cls, path: str, fn: Callable[..., Any], mesh: Mesh, options: Mapping[str, Any]
    ) -> Adapter:
        return cls(fn, mesh, options, Plan.load(path))

    @classmethod
    def plan_aot(
        cls,
        fn: Callable[..., Any],
        topology: str,
        mesh_shape: Sequence[int],
        axis_names: Sequence[str],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Plan and compile for TPUs that are not there."""
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        devices: Any = np.array(topologies.get_topology_desc(topology, platform="tpu").devices)
        made = cls(fn, Mesh(devices.reshape(mesh_shape), tuple(axis_names)), options)
        executable, plan = made.sharded.compile(*args), made.sharded.plan(*args)
        return {
            "platform": devices.flat[0].platform,
            **_prediction(plan),
            **_compiled(executable),
        }


def _prediction(plan: Plan) -> dict[str, Any]:
    return {"predicted_peak_bytes": plan.predicted.peak_bytes, "plan_seconds": plan.planning_s}


def _compiled(executable: Executable) -> dict[str, Any]:
    return {"hlo": executable.as_text(), "measured_peak_bytes": executable.peak_bytes}
