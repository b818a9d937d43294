"""The end of a lost site's parts without its report: by the lease on which its workers end themselves, or by an act."""

from __future__ import annotations

from isthmus.control.coordinator.advance_job import advance_job, notify_preemptor
from isthmus.control.coordinator.part_observations import apply_observation
from isthmus.control.queries.enrolled_agent import enrolment_obstacle
from isthmus.control.queries.sites.require_site import require_site_record
from isthmus.control.state.events import RunLeaseEnded, SiteEnrolling, SiteGone
from isthmus.control.state.job_records import PoolState
from isthmus.control.state.reconcile_log import forget_site
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import ObservedPart


def admit_lease_end(state: PoolState, event: RunLeaseEnded) -> bool:
    """Return whether the site is still lost and has parts that end with the lease."""
    record = state.clusters.get(event.cluster)
    return record is not None and not record.connected and bool(record.parts) and record.run_lease_s > 0


def admit_site_gone(state: PoolState, event: SiteGone) -> bool:
    """Return whether the site is not declared gone yet; raise if it is unknown or its agent is in contact."""
    record = require_site_record(state, event.cluster)
    if record.connected:
        raise ConflictError(
            f"the agent of cluster '{event.cluster}' is in contact with the server",
            hint="stop the agent: it ends its workers and reports that",
        )
    return bool(record.parts) or (record.agent is not None and record.agent.id not in record.gone_agents)


def admit_enrolling(state: PoolState, event: SiteEnrolling) -> bool:
    """Return whether the agreement is new; raise if another agent cannot take the place of the enrolled one now."""
    record = require_site_record(state, event.cluster)
    if obstacle := enrolment_obstacle(record):
        raise ConflictError(
            obstacle,
            hint="stop the agent and wait until its lease has ended, or, if nothing runs there: "
            f"isthmus site gone {event.cluster} --yes",
        )
    return not record.enrolling


def end_parts_by_lease(state: PoolState, event: RunLeaseEnded) -> None:
    """Release the parts of a site whose workers have ended themselves."""
    record = state.clusters[event.cluster]
    reason = f"no contact with {event.cluster}: its workers have ended themselves after {record.run_lease_s:g} s"
    _release_parts(state, record, reason, event.now_s)


def declare_site_gone(state: PoolState, event: SiteGone) -> None:
    """Release the parts of a site on the word of the operator; its agent is never admitted again."""
    record = state.clusters[event.cluster]
    if record.agent is not None:
        record.gone_agents.add(record.agent.id)
    forget_site(state, event.cluster)
    _release_parts(state, record, f"{event.by} declared {event.cluster} gone", event.now_s)


def agree_to_enrolment(state: PoolState, event: SiteEnrolling) -> None:
    """Let the next new agent of the cluster take the place of the enrolled one."""
    state.clusters[event.cluster].enrolling = True


def _release_parts(state: PoolState, record: ClusterRecord, reason: str, now_s: float) -> None:
    """Count every part of the site as released, then advance their jobs, which may take plans without the site."""
    record.reported_parts = {}
    parts = list(record.parts.values())
    for part in parts:
        seen = ObservedPart(job=part.job, attempt=part.attempt, state="released", detail=reason)
        apply_observation(state, part, seen)
    for job in [state.jobs[name] for name in dict.fromkeys(part.job for part in parts)]:
        job.plan_fixed = job.plan_fixed and not job.auto_plan
        advance_job(state, job, now_s)
        notify_preemptor(state, job, now_s)
    state.indexes.capacity_freed = True
