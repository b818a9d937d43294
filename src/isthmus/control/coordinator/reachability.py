"""Whether the sites of a plan reach each other: checked when agents join, and before a job gets chips.

The agent of a site opens a listener, the agents of other sites dial it through their routes and report the result. A
result holds until one of the two agents restarts; a failed one is checked again for every start of a job.
"""

from __future__ import annotations

from isthmus.control.coordinator.attempts import refuse_in_queue
from isthmus.control.queries.peer_checks import describe_unreached, pending_pairs, unreached_pairs
from isthmus.control.state.events import AgentReported
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord, PeerResult
from isthmus.core.messages.agent_messages import PeerAddress

FAILURE_VALID_S = 1.0
"""How long a failed check counts, so that jobs that wait for the same pair share it."""

RETRY_S = 5.0
"""Time after which a job whose sites do not reach each other is tried again, so that it starts soon once they do."""


def record_peer_checks(state: PoolState, record: ClusterRecord, event: AgentReported, *, restarted: bool) -> None:
    """Adopt the address and the results that a site reports; order checks of a site that is new or has restarted."""
    name, is_new = event.cluster.name, record.peer_address is None and event.peer_address is not None
    moved = None not in (record.peer_address, event.peer_address) and _place(record.peer_address) != _place(
        event.peer_address
    )
    record.peer_address = event.peer_address
    if event.peer_address is None:
        return
    if is_new or restarted or moved:
        others = (key for key, one in state.clusters.items() if key != name and one.peer_address is not None)
        for other in others:
            record.peer_results.pop(other, None)
            state.clusters[other].peer_results.pop(name, None)
            _order_check(state, name, other)
            _order_check(state, other, name)
    for check in event.peer_checks:
        if record.to_check.get(check.cluster) == check.number:
            result = PeerResult(reached=check.reached, detail=check.detail, at_s=event.now_s)
            _record_result(state, record, check.cluster, result)
    if event.peer_address.problem:
        result = PeerResult(reached=False, detail=event.peer_address.problem, at_s=event.now_s)
        for source in sorted(record.checked_by):
            _record_result(state, state.clusters[source], name, result)


def _place(address: PeerAddress | None) -> tuple[object, ...]:
    """Return where the workers of a site listen, without the listener of a check."""
    return () if address is None else (address.host, address.first_port, address.last_port)


def may_start(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether the sites of the job's plan reach each other; otherwise say why and check again.

    A job whose sites do not is tried again every `RETRY_S`, without chips meanwhile.
    """
    if len(job.plan_parts) < 2:
        return True
    for (source, target), result in unreached_pairs(state, job.plan_parts):
        if now_s - result.at_s > FAILURE_VALID_S:
            _order_check(state, source, target)
    waits, closed = pending_pairs(state, job.plan_parts), unreached_pairs(state, job.plan_parts)
    if closed:
        refuse_in_queue(state, job, describe_unreached(state, job.plan_parts), now_s, RETRY_S)
    elif waits and job.reason != (text := describe_unreached(state, job.plan_parts)):
        job.reason = text
        state.changed_jobs.add(job.id)
    return not (waits or closed)


def _order_check(state: PoolState, source: str, target: str) -> None:
    """Order `source` to check that it reaches `target`."""
    state.num_peer_checks += 1
    state.clusters[source].to_check[target] = state.num_peer_checks
    state.clusters[target].checked_by.add(source)


def _record_result(state: PoolState, record: ClusterRecord, target: str, result: PeerResult) -> None:
    """Record the result of an ordered check; jobs that waited for it may start now."""
    del record.to_check[target]
    record.peer_results[target] = result
    state.clusters[target].checked_by.discard(record.cluster.name)
    state.indexes.capacity_freed = True
