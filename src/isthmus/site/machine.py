"""`SiteMachine`: all decisions at a site as a pure object: events in, instructions out; no clock, no I/O.

Agents and the pool simulator drive it. An agent saves `parts` and `fence` before it executes an instruction,
so every running part is in its table; starting a part of the table again is idempotent (`SchedulerAdapter.start`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from isthmus.core.messages.agent_messages import MoveProposal, ObservedLocalJob, ObservedPart, QueueEntry
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.priority import PriorityMap
from isthmus.site import site_report
from isthmus.site.devices.device_allocator import DeviceAllocator
from isthmus.site.evictions import continue_eviction, evict_after_hours, evict_before_shutdown
from isthmus.site.local_jobs import add_local_job, start_local_jobs, sync_local_jobs, withdraw_local_job
from isthmus.site.machine_events import (
    FetchObserved,
    HoldObserved,
    HoursObserved,
    InventoryObserved,
    LocalJobsObserved,
    LocalJobSubmitted,
    LocalJobWithdrawn,
    OrdersReceived,
    PathObserved,
    ProbeObserved,
    QueueObserved,
    ShutdownRequested,
    SiteEvent,
    SiteInstruction,
    WorkersObserved,
)
from isthmus.site.moves.propose_moves import update_proposals
from isthmus.site.orders import apply_orders, observe_fetch
from isthmus.site.part_lifecycle import move_part, release_part, stop_live_workers
from isthmus.site.parts import CLAIMING, PartKey, SitePart
from isthmus.site.scheduler.scheduler_holds import observe_scheduler
from isthmus.site.site_queue import queue_order, reconcile_queue
from isthmus.site.site_state import SiteState
from isthmus.site.worker_watch import (
    check_timeouts,
    fail_after_run_lease,
    is_peer_failure,
    observe_worker,
    renew_run_lease,
    reported_run_lease_s,
)

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL."""

CHECKIN_TIMEOUT_S = 120.0
"""Longest time from a worker's start until it reports its address."""

SILENCE_TIMEOUT_S = 7200.0
"""Longest time that a training worker may write neither metrics nor logs. It exceeds any step or checkpoint
by far and only reclaims devices of stuck workers; peers detect an unresponsive worker much earlier
(`WorkerSpec.peer_timeout_s`)."""


class SiteMachine:
    """The state machine of one site.

    `devices` allocates its devices; `parts`, `fence` and the run lease are those that a previous agent process saved.
    A site that `has_own_storage` has its own storage: jobs start once their files have been copied there. One that
    `asks_for_holds` has a scheduler that owns its devices: parts start once it has granted their hold. With
    `asks_for_probes` it also agrees to the victims of a part before that claims them. One that `asks_for_paths` has a
    decision centre of the network: a part that is promised bandwidth is prepared once it holds its paths. Unless it
    `knows_inventory`, parts wait for the first look at the scheduler. With `renewal_s` workers on other machines see
    within that time that the run lease is renewed.
    """

    def __init__(
        self,
        cluster: str,
        devices: DeviceAllocator,
        parts: Iterable[SitePart] = (),
        *,
        fence: int = 0,
        run_lease_s: float = 0.0,
        run_lease_until_s: float = math.inf,
        renewal_s: float = math.inf,
        priorities: PriorityMap | None = None,
        policy: OwnerPolicy | None = None,
        has_own_storage: bool = False,
        asks_for_holds: bool = False,
        asks_for_probes: bool = False,
        asks_for_paths: bool = False,
        knows_inventory: bool = True,
        now_s: float = 0.0,
        stop_grace_s: float = STOP_GRACE_S,
        checkin_timeout_s: float = CHECKIN_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        self.site = SiteState(
            cluster=cluster,
            devices=devices,
            priorities=priorities or PriorityMap(),
            policy=policy or OwnerPolicy(),
            has_own_storage=has_own_storage,
            asks_for_holds=asks_for_holds,
            asks_for_probes=asks_for_probes,
            asks_for_paths=asks_for_paths,
            knows_inventory=knows_inventory,
            stop_grace_s=stop_grace_s,
            checkin_timeout_s=checkin_timeout_s,
            silence_timeout_s=silence_timeout_s,
            parts={part.key: part for part in parts},
            fence=fence,
            run_lease_s=run_lease_s,
            run_lease_until_s=run_lease_until_s,
            renewal_s=renewal_s,
        )
        self.next_due_s: float = math.inf
        self.site.num_arrivals = max((part.arrived for part in self.parts.values()), default=0)
        for part in self.parts.values():
            self.site.devices.record_transition(part, "new", part.state)
        self._restore_parts(now_s)

    @property
    def parts(self) -> dict[PartKey, SitePart]:
        """All parts by key."""
        return self.site.parts

    @property
    def fence(self) -> int:
        """The highest fencing token of all orders so far."""
        return self.site.fence

    @property
    def shutting_down(self) -> bool:
        """Whether the agent is shutting down."""
        return self.site.shutting_down

    def handle(self, event: SiteEvent) -> list[SiteInstruction]:
        """Handle one event; return the instructions in order.

        Afterwards `next_due_s` is when the next timer expires (infinite: never).
        """
        touched = self._apply(event)
        if touched is None:
            self._apply_due_changes(list(self._due_parts()), event.now_s)
            self.next_due_s = self._earliest_due_s(self.site.time_dependent.values())
        else:
            self._apply_due_changes(self._with_claimers(touched), event.now_s)
            self.next_due_s = min(self.next_due_s, self._earliest_due_s(self._with_claimers(touched)))
        update_proposals(self.site, event.now_s)
        self.next_due_s = min(self.next_due_s, self.site.moves_due_s)
        out, self.site.instructions = self.site.instructions, []
        return out

    def restart(self, now_s: float) -> list[SiteInstruction]:
        """Continue as a new agent process with the previous table; return the instructions to repeat."""
        self._restore_parts(now_s)
        return self.handle(WorkersObserved(now_s=now_s))

    def observed_parts(self) -> tuple[ObservedPart, ...]:
        """Return the pool's parts as reported to the server."""
        return site_report.observed_parts(self.site)

    def local_jobs(self) -> tuple[ObservedLocalJob, ...]:
        """Return the local jobs as reported to the server."""
        return site_report.observed_local_jobs(self.site)

    def free_chips(self) -> dict[str, int]:
        """Return the number of devices by node group available to a new part of the pool."""
        return site_report.free_chips(self.site)

    def moves(self) -> tuple[MoveProposal, ...]:
        """Return the moves of running parts that are proposed to the server, so that waiting ones have a place."""
        return self.site.proposals

    def run_lease_s(self) -> float:
        """Return the lease that all workers of the pool here end themselves on, 0 if one runs without."""
        return reported_run_lease_s(self.site)

    def queue(self) -> tuple[QueueEntry, ...]:
        """Return the waiting jobs in starting order."""
        return tuple(QueueEntry(job=part.job, attempt=part.attempt) for part in queue_order(self.site))

    def _apply(self, event: SiteEvent) -> SitePart | None:
        """Apply an event; return the part that it concerns if it concerns only one."""
        site, now_s = self.site, event.now_s
        match event:
            case OrdersReceived():
                self._receive_orders(event)
            case WorkersObserved(workers=workers):
                for seen in sorted(workers, key=is_peer_failure):
                    observe_worker(site, seen, now_s)
                keys = {(seen.job, seen.attempt) for seen in workers}
                return self.parts.get(keys.pop()) if len(keys) == 1 else None
            case LocalJobsObserved():
                sync_local_jobs(site, event.jobs, event.unreadable, now_s)
            case LocalJobSubmitted():
                add_local_job(site, event.job, now_s)
            case LocalJobWithdrawn():
                withdraw_local_job(site, event.name, now_s)
            case QueueObserved():
                reconcile_queue(site, event.entries)
            case FetchObserved():
                observe_fetch(site, event)
            case InventoryObserved() | HoldObserved() | ProbeObserved() | PathObserved():
                observe_scheduler(site, event)
            case HoursObserved():
                self._observe_hours(event)
            case ShutdownRequested():
                site.shutting_down, site.saves_first = True, event.saves_first
        return None

    def _observe_hours(self, event: HoursObserved) -> None:
        self.site.may_move = event.may_move
        if event.is_open != self.site.is_open:
            self.site.is_open, self.site.may_start_local = event.is_open, True
            self.site.num_changes += 1

    def _receive_orders(self, event: OrdersReceived) -> None:
        """Renew the run lease, and apply the orders unless their answer is older than the lease."""
        if renew_run_lease(self.site, event):
            self.site.objections = event.objections
            apply_orders(self.site, event.orders, event.now_s)

    def _apply_due_changes(self, parts: Iterable[SitePart], now_s: float) -> None:
        """Apply due changes: claimers last, since other parts may release what they wait for."""
        for part in sorted(parts, key=lambda part: part.state in CLAIMING):
            if part.state != "forgotten":
                _apply_timers(self.site, part, now_s)
        start_local_jobs(self.site, now_s)

    def _due_parts(self) -> Iterable[SitePart]:
        site = self.site
        return (site.parts if site.shutting_down or not site.is_open else site.time_dependent).values()

    def _with_claimers(self, part: SitePart) -> list[SitePart]:
        claimers = (other for other in self.site.time_dependent.values() if other.state in CLAIMING)
        return [part, *(other for other in claimers if other is not part)]

    def _earliest_due_s(self, parts: Iterable[SitePart]) -> float:
        return min((at_s for part in parts for at_s in self.site.due_times_s(part)), default=math.inf)

    def _restore_parts(self, now_s: float) -> None:
        """Restore parts of a previous agent process; repeat stops that it may not have executed."""
        site = self.site
        # Moves of the previous process are not known: those of the hour count as made.
        site.moved_at_s = [now_s] * site.policy.moves.per_hour if self.parts else []
        for part in self.parts.values():
            part.since_s, part.claimed_s, part.rank_map = now_s, now_s, None
            part.unexplained_s = None
            part.checkpoint_requested = False
            part.force_at_s = now_s if part.state in ("failed", "stopping") else None
            part.evict_at_s = now_s + site.policy.protect_s if part.evicted else None
            for worker in part.workers.values():
                worker.started, worker.last_write_s = False, now_s
            if part.requeue:
                part.force_at_s = now_s + site.grace_s(part)
                stop_live_workers(site, part, force=False)
            site.mark_changed(part)


def _apply_timers(site: SiteState, part: SitePart, now_s: float) -> None:
    """Apply the changes that are due for one part, independent of the event."""
    if site.shutting_down:
        _shut_down(site, part, now_s)
    elif part.local and part.state in ("succeeded", "failed"):
        release_part(site, part, now_s)
    elif not part.local and not site.is_open:
        evict_after_hours(site, part, now_s)
    if site.is_leased(part):
        _expire_lease(site, part, now_s)
    continue_eviction(site, part, now_s)
    if part.state == "running" and not part.local:
        fail_after_run_lease(site, part, now_s)
    if part.state == "running" and not part.local:
        check_timeouts(site, part, now_s)
    if part.force_at_s is not None and now_s >= part.force_at_s:
        part.force_at_s = now_s + site.stop_grace_s
        stop_live_workers(site, part, force=True)
    if part.state == "stopping" and not part.live and now_s >= site.verdict_due_s(part):
        move_part(site, part, "queued" if part.requeue else "released", now_s)
    if part.local and part.withdrawn and part.state == "released":
        move_part(site, part, "forgotten", now_s)


def _expire_lease(site: SiteState, part: SitePart, now_s: float) -> None:
    """Release devices whose lease expired, or that were held too long without the part running."""
    if now_s - part.since_s >= part.lease_s:
        release_part(site, part, now_s, f"lease of {part.lease_s:g} s not renewed")
    elif now_s - part.claimed_s >= site.policy.hold_s:
        detail = f"held without running for {site.policy.hold_s:g} s, the longest that the owner allows"
        release_part(site, part, now_s, detail)


def _shut_down(site: SiteState, part: SitePart, now_s: float) -> None:
    """Release everything; local jobs that have not started stay queued for the next agent process."""
    if site.saves_first and part.state == "running" and not part.local:
        evict_before_shutdown(site, part, now_s)
    elif part.local and part.state == "evicting":
        move_part(site, part, "queued", now_s)
    elif not (part.local and part.state == "queued"):
        ended = part.state in ("succeeded", "failed", "refused")  # and `detail` says why
        release_part(site, part, now_s, "" if ended else f"the agent of {site.cluster} is being stopped")
