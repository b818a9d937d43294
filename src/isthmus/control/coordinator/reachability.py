"""Whether the sites of a plan reach each other: checked when agents join, and before a job gets chips.

The agent of a site opens a listener, the agents of other sites dial it through their routes and report the result. A
result, with the round trip and rate that were measured, holds until one of the two agents restarts; a failed one is
checked again for every start of a job. A check for which a job waits has a limit: a site that takes no part in it is
named, and the job takes a plan without the two.
"""

from __future__ import annotations

from isthmus.control.coordinator.attempts import refuse_in_queue
from isthmus.control.coordinator.job_preflight import avoid_silent_pair
from isthmus.control.coordinator.sites.peer_check_results import order_peer_check, record_peer_result
from isthmus.control.queries.peer_checks import describe_unreached, pending_pairs, unreached_pairs
from isthmus.control.state.events import PeerCheckTimedOut
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.control.state.queue_order import queue_head
from isthmus.control.state.site_records import PeerResult
from isthmus.control.state.update_indexes import job_at_key

FAILURE_VALID_S = 1.0
"""How long a failed check counts, so that jobs that wait for the same pair share it."""

RETRY_S = 5.0
"""Time after which a job whose sites do not reach each other is tried again, so that it starts soon once they do."""


def may_start(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether the sites of the job's plan reach each other; otherwise say why and check again.

    A job whose sites do not is tried again every `RETRY_S`, without chips meanwhile.
    """
    if len(job.plan_parts) < 2:
        return True
    for (source, target), result in unreached_pairs(state, job.plan_parts):
        if now_s - result.at_s > FAILURE_VALID_S:
            order_peer_check(state, source, target, now_s)
    waits, closed = pending_pairs(state, job.plan_parts), unreached_pairs(state, job.plan_parts)
    for source, target in waits:
        state.clusters[source].check_waits.setdefault(target, now_s)
    if closed:
        refuse_in_queue(state, job, describe_unreached(state, job.plan_parts), now_s, RETRY_S)
    elif waits and job.reason != (text := describe_unreached(state, job.plan_parts)):
        job.reason = text
        state.changed_jobs.add(job.id)
    return not (waits or closed)


def end_unanswered_check(state: PoolState, event: PeerCheckTimedOut) -> None:
    """Count a check without a result as failed; jobs of the queue's head take a plan without the two sites, if any."""
    record, target = state.clusters[event.source], state.clusters[event.target]
    limit = f"within {state.config.peer_check_timeout_s:g} s"
    if target.peer_address is None or target.peer_address.port is None:
        silent, detail = event.target, f"site {event.target} has not opened a port for site {event.source} {limit}"
    else:
        silent, detail = event.source, f"site {event.source} has not tried to reach site {event.target} {limit}"
    result = PeerResult(reached=False, detail=detail, at_s=event.now_s, silent=silent)
    record_peer_result(state, record, event.target, result)
    pair = event.source, event.target
    for key in list(queue_head(state, state.config.queue_window)):
        job = job_at_key(state, key)
        if job.state in WAITING_STATES and pair in dict(unreached_pairs(state, job.plan_parts)):
            avoid_silent_pair(state, job, frozenset(pair), detail, event.now_s)
