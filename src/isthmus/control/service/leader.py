"""`Leader`: this server's leadership, the events that only a leader may append, and expired timers.

Of the servers on one store the one that holds `LeaderElection` plans jobs and fires timers. Each leader starts a
new epoch; its later events are valid in that epoch only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.coordinator_actor import ActorRequest, CoordinatorActor
from isthmus.control.state.events import EpochBegan, Event, Instruction, PoolSet, Restarted
from isthmus.control.store.leader_election import LeaderElection
from isthmus.core.errors import IsthmusError
from isthmus.core.pool import Pool
from isthmus.core.views.access_views import AuditRecord

_log = logging.getLogger("isthmus.server")


class Leader:
    """Leadership state and timers of this server.

    `pool_file` is the operator's pool, `clock` returns seconds since the Unix epoch. A new leader passes `on_elected`
    the instructions that its predecessor may have left unfinished. `steady_clock` is never set; it measures leases.
    """

    def __init__(
        self,
        actor: CoordinatorActor,
        leader_election: LeaderElection,
        pool_file: Pool | None,
        clock: Callable[[], float],
        on_elected: Callable[[Iterable[Instruction]], None],
        steady_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady_clock = steady_clock
        self._actor, self._leader_election, self._pool_file, self._clock = (
            actor,
            leader_election,
            pool_file,
            clock,
        )
        self._on_elected = on_elected
        self._epoch = 0
        self.is_leader = False

    def request(self, event: Event) -> ActorRequest:
        """Return a request that appends `event` only while this leader's epoch is the current one."""
        epoch = self._epoch
        return ActorRequest(lambda _: None, lambda coordinator: event if coordinator.epoch == epoch else None)

    def append(self, event: Event) -> bool:
        """Append an event if this server's epoch is the current one; return whether it is."""
        epoch = self._epoch
        is_current = False

        def propose(coordinator: Coordinator) -> Event | None:
            nonlocal is_current
            is_current = self.is_leader and coordinator.epoch == epoch
            return event if is_current else None

        self._actor.propose(propose, lambda _: None)
        return is_current

    def update_leadership(self) -> None:
        """Start an epoch if leadership was won, or if the epoch rose without a new leader; follow if it was lost."""
        if not self._leader_election.try_acquire():
            self.is_leader = False
        elif not self.is_leader or self._actor.query(lambda coordinator: coordinator.epoch) != self._epoch:
            now_s = self._clock()

            def begin(coordinator: Coordinator) -> Event:
                return EpochBegan(now_s=now_s, epoch=coordinator.epoch + 1)

            self._epoch = self._actor.propose(begin, lambda coordinator: coordinator.epoch)
            policy = ActorRequest(
                lambda _: None, lambda coordinator: self._pool_set_event(now_s, coordinator), _policy_lines
            )
            self._actor.execute([policy])[0].value()
            asked = self._actor.query(lambda coordinator: coordinator.handle(self._restarted(now_s)))
            self.is_leader = True
            self._on_elected(asked)

    def tick(self) -> None:
        """Update leadership, apply agents' contact times, and append events of expired timers if leading."""
        self.update_leadership()
        now_s, steady_s = self._clock(), self._steady_clock()
        heard = self._leader_election.report_ages_s()

        def due(coordinator: Coordinator) -> tuple[Event, ...]:
            for cluster, ago_s in heard.items():
                record = coordinator.state.clusters.get(cluster)
                if record is not None and (record.last_report_s or 0) < now_s - ago_s:
                    coordinator.record_report(cluster, now_s - ago_s, steady_s=steady_s - ago_s)
            return coordinator.due_events(now_s, steady_s)

        events = self._actor.query(due)
        if self.is_leader and events:
            requests = [self.request(event) for event in events]
            for event, request in zip(events, self._actor.execute(requests), strict=True):
                log_failure(event.kind, request.value)

    def _restarted(self, now_s: float) -> Restarted:
        return Restarted(now_s=now_s, steady_s=self._steady_clock())

    def _pool_set_event(self, now_s: float, coordinator: Coordinator) -> Event:
        """Return the event with the operator's present links and queue settings."""
        rules, links = coordinator.state.config, self._pool_file.links if self._pool_file else ()
        return PoolSet(
            now_s=now_s, links=links, objective=rules.objective, patience_s=rules.patience_s, planner_turns=True,
            needs_free_chips=True, half_life_s=rules.half_life_s, share_weights=rules.share_weights,
            share_by_tree=True,
        )  # fmt: skip


def _policy_lines(_coordinator: Coordinator, event: Event) -> tuple[AuditRecord, ...]:
    """Return the audit line of a changed policy."""
    if not isinstance(event, PoolSet):
        return ()
    text = f"objective {event.objective}, patience {event.patience_s:g} s, {len(event.links)} links"
    text += f", half-life of usage {event.half_life_s:g} s, {len(event.share_weights)} weights"
    return (AuditRecord(at_s=event.now_s, action="policy-changed", actor="server", detail=text),)


def log_failure(description: str, action: Callable[[], None]) -> None:
    """Run a background action; log an `IsthmusError` instead of raising it."""
    try:
        action()
    except IsthmusError as error:
        _log.warning("%s: %s", description, error)
