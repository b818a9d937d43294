"""Handles observations of workers: success, failure with its cause, timeouts; and the lease on which they run.

Workers of the pool run only for a time after the last contact with the server, the run lease. It is renewed by each
answer, from when the report was sent: whatever the answer's delay, the server has heard from the site later than that.
Workers that the agent cannot reach end themselves.
"""

from __future__ import annotations

import math

from isthmus.core.messages.agent_messages import WorkerAddress, is_closer_to_root_cause
from isthmus.site.checkpoint_protection import record_checkpoint
from isthmus.site.exit_status import describe_exit, fault_of, was_stopped
from isthmus.site.machine_events import (
    LogWarning,
    ObservedWorker,
    OrdersReceived,
    RenewRunLease,
    StartWorker,
    StopWorker,
)
from isthmus.site.part_lifecycle import fail_part, move_part
from isthmus.site.parts import SitePart, SiteWorker
from isthmus.site.site_report import round_unsaved_s
from isthmus.site.site_state import SiteState

_UNKNOWN_STATUS = 1
_START_INTERVAL_S = 1.0
"""Interval at which a start that a scheduler has not carried out is repeated."""
_RENEWAL_SHARE = 0.1
"""Share of the lease by which its end must move for it to be written again, if that is less than `renewal_s`."""


def observe_worker(site: SiteState, observed: ObservedWorker, now_s: float) -> None:
    """Apply the observation of one worker."""
    part = site.parts.get((observed.job, observed.attempt))
    worker = part.workers.get(observed.rank) if part else None
    if part is None or worker is None or not worker.live:
        return
    address = _with_own_device(observed.address, worker)
    if address is not None and address != worker.address:
        worker.address = address
        site.mark_changed(part)
    if round_unsaved_s(observed.unsaved_s) != round_unsaved_s(worker.unsaved_s):
        part.observation = None
    worker.unsaved_s, worker.protection = observed.unsaved_s, observed.protection or worker.protection
    if observed.wait != worker.wait:
        worker.wait = observed.wait
        site.mark_changed(part)
    if record_checkpoint(part):
        site.mark_changed(part)
    if observed.output_bytes != worker.num_bytes:
        worker.num_bytes, worker.last_write_s = observed.output_bytes, now_s
    if observed.state == "running":
        return
    if observed.state == "absent":
        _observe_absent(site, part, observed.rank, now_s)
        return
    worker.live, worker.exit_status = False, observed.exit_status
    if part.local:
        part.exit_status = _UNKNOWN_STATUS if observed.exit_status is None else observed.exit_status
    if observed.exit_status != 0:
        _observe_failure(site, part, observed, now_s)
    elif part.state == "running" and not part.live:
        move_part(site, part, "succeeded", now_s)


def _with_own_device(address: WorkerAddress | None, worker: SiteWorker) -> WorkerAddress | None:
    """Return a worker's address; a device that the site did not give to it is replaced by its first one."""
    if address is None or address.device in ("", *worker.devices[:1]):
        return address
    return address.model_copy(update={"device": worker.devices[0] if worker.devices else ""})


def is_peer_failure(observed: ObservedWorker) -> bool:
    """Sort key: workers that only lost a peer come after those that may be the cause."""
    return fault_of(observed.exit_status) == "peer"


def check_timeouts(site: SiteState, part: SitePart, now_s: float) -> None:
    """Fail the part if a worker does not check in or writes nothing within its timeout."""
    for rank, worker in part.workers.items():
        late = worker.address is None and now_s - part.since_s >= site.checkin_timeout_s
        silence_s = site.silence_limit_s(part)
        silent = part.rank_map is not None and now_s - worker.last_write_s >= silence_s
        if worker.live and (late or silent):
            limit_s = site.checkin_timeout_s if late else silence_s
            what = "did not check in within" if late else "has written nothing for"
            fail_part(site, part, "own", now_s, f"rank {rank} {what} {limit_s:g} s")
            return


def renew_run_lease(site: SiteState, event: OrdersReceived) -> bool:
    """Renew the lease; return False if the answer is so late that its lease has ended: its orders are void."""
    lease_s = event.orders.run_lease_s
    if event.orders.fence < site.fence:
        return True
    sent_s = event.now_s if event.sent_s is None else event.sent_s
    until_s = sent_s + lease_s if lease_s > 0 else math.inf
    if event.now_s >= until_s:
        site.instructions.append(LogWarning(text=f"dropped orders that arrived {event.now_s - sent_s:g} s late"))
        return False
    if lease_s != site.run_lease_s or until_s - site.run_lease_until_s >= min(_RENEWAL_SHARE * lease_s, site.renewal_s):
        site.run_lease_s, site.run_lease_until_s = lease_s, until_s
        site.instructions.append(RenewRunLease(lease_s=lease_s, until_s=until_s))
    return True


def fail_after_run_lease(site: SiteState, part: SitePart, now_s: float) -> None:
    """Fail a running part whose lease has ended."""
    if part.has_run_lease and now_s >= site.run_lease_until_s:
        detail = f"no contact with the server for {site.run_lease_s:g} s, the longest that workers run without it"
        fail_part(site, part, "own", now_s, detail)


def reported_run_lease_s(site: SiteState) -> float:
    """Return the lease that every worker of the pool here ends itself on; 0 if one runs without."""
    leased = all(part.has_run_lease for part in site.parts.values() if part.live and not part.local)
    return site.run_lease_s if leased else 0.0


def _observe_failure(site: SiteState, part: SitePart, observed: ObservedWorker, now_s: float) -> None:
    """Fail the part; of several failed ranks, report the one whose fault explains most.

    A signal that this agent did not send is the scheduler's if the hold ends, before or soon after it; until then the
    cause is taken to be elsewhere.
    """
    fault = fault_of(observed.exit_status)
    stopped = was_stopped(observed.exit_status)
    if site.asks_for_holds and part.state == "running" and (stopped or fault == "peer"):
        fault = "peer" if part.hold else "evicted"
        part.unexplained_s = now_s if stopped else part.unexplained_s
    words = f": {observed.log_tail}" if observed.log_tail else ""
    detail = f"rank {observed.rank} {describe_exit(observed.exit_status)}{words}"
    if part.state == "running":
        fail_part(site, part, fault, now_s, detail)
    elif not stopped and is_closer_to_root_cause(fault, part.fault):
        part.fault, part.detail = fault, detail
        site.mark_changed(part)


def _observe_absent(site: SiteState, part: SitePart, rank: int, now_s: float) -> None:
    """Start a worker that a previous agent process failed to start, or make sure that it never starts.

    Where a scheduler holds the devices a start may come to nothing while that is down: it is repeated in the same hold
    until the worker is late.
    """
    worker = part.workers[rank]
    is_held = site.asks_for_holds and part.hold == "granted"
    if part.state == "running" and worker.started and is_held and now_s - worker.last_write_s < _START_INTERVAL_S:
        return
    if part.state == "running" and (not worker.started or is_held):
        worker.started, worker.last_write_s = True, now_s
        site.instructions.append(StartWorker(part=part, rank=rank))
        return
    if part.state == "running":
        why = "its hold has ended" if site.asks_for_holds else "its folder is not writable"
        fail_part(site, part, "own", now_s, f"rank {rank} could not be started: {why}")
    site.instructions.append(StopWorker(part=part, rank=rank, force=True))
