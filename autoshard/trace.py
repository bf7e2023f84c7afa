"""The predicted schedule of a step in the format of Chrome's tracing, which Perfetto opens.

Source:
    "Trace Event Format", Google (complete events ``X``, metadata events ``M``; times in
    microseconds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoshard.streams import COMPUTE

if TYPE_CHECKING:
    from autoshard.plan import Plan


def trace(plan: Plan) -> dict[str, Any]:
    """A trace as JSON values: one row per stream, an event for everything that takes time.

    A collective that keeps the device waiting is on the rows of its links and on that of
    arithmetic. Of a loop the first round is shown, inside the event of the whole loop.
    """
    names = dict.fromkeys(s for event in plan.timeline for s in event.streams)
    rows = {name: row for row, name in enumerate(sorted(names, key=lambda n: (n != COMPUTE, n)))}
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 0,
            "args": {"name": f"one device of {plan.mesh}, predicted by {plan.cost_model}"},
        }
    ]
    for name, row in rows.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row,
                       "args": {"name": name}})  # fmt: skip
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row,
                       "args": {"sort_index": row}})  # fmt: skip
    for event in plan.timeline:
        for stream in event.streams:
            events.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": event.kind,
                    "pid": 0,
                    "tid": rows[stream],
                    "ts": event.start_s * 1e6,
                    "dur": event.seconds * 1e6,
                    "args": {
                        "op": event.op,
                        "executions": event.executions,
                        "device waits": event.kind not in ("compute", "loop")
                        and COMPUTE in event.streams,
                    },
                }
            )
    p = plan.predicted
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "what": "predicted schedule, not a measurement",
            "cost_model": plan.cost_model,
            "fingerprint": plan.fingerprint,
            "schedule_s": p.compute_s + p.exposed_s,
            "compute_sum_s": p.compute_s,
            "communication_sum_s": p.communication_s,
            "hidden_s": p.hidden_s,
            "exposed_s": p.exposed_s,
            "dispatch_s": p.dispatch_s,
        },
    }
