"""`agent_refusals`: the parts that a site's agent refuses with a report, for the audit log."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.events import AgentReported
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.site_records import PartRecord


def agent_refusals(state: PoolState, event: AgentReported) -> Iterator[tuple[PartRecord, str]]:
    """Yield the parts that a report refuses for the first time, with the agent's reason; `state` is that before it."""
    record = state.clusters.get(event.cluster.name)
    if record is None:
        return
    for seen in event.parts:
        part = record.parts.get((seen.job, seen.attempt))
        if part is not None and seen.state == "refused" and part.state in ("ordered", "queued", "ready", "prepared"):
            yield part, seen.detail
