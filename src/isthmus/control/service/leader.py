"""`Leader`: this server's leadership, the events that only a leader may append, and expired timers.

Of the servers on one store the one that holds `Leadership` plans jobs and fires timers. Each leader starts a
new epoch; its later events are valid in that epoch only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.actor import Actor, Request
from isthmus.control.state.events import EpochBegan, Event, Instruction, PoolSet, Restarted
from isthmus.control.store.leadership import Leadership
from isthmus.core.errors import IsthmusError
from isthmus.core.pool import Pool

_log = logging.getLogger("isthmus.server")


class Leader:
    """Leadership state and timers of this server.

    `file` is the operator's pool, `clock` returns seconds since the Unix epoch. A new leader passes `take_up`
    the instructions that its predecessor may have left unfinished.
    """

    def __init__(
        self,
        actor: Actor,
        leadership: Leadership,
        file: Pool | None,
        clock: Callable[[], float],
        take_up: Callable[[Iterable[Instruction]], None],
    ) -> None:
        self._actor, self._leadership, self._file, self._clock = actor, leadership, file, clock
        self._take_up = take_up
        self._epoch = 0
        self.leads = False

    def request(self, event: Event) -> Request:
        """Return a request that appends `event` only while this leader's epoch is the current one."""
        epoch = self._epoch
        return Request(lambda _: None, lambda coordinator: event if coordinator.epoch == epoch else None)

    def look(self) -> None:
        """Start an epoch if leadership was won; become a follower if it was lost."""
        if not self._leadership.holds():
            self.leads = False
        elif not self.leads:
            now_s = self._clock()

            def begin(coordinator: Coordinator) -> Event:
                return EpochBegan(now_s=now_s, epoch=coordinator.epoch + 1)

            self._epoch = self._actor.take(begin, lambda coordinator: coordinator.epoch)
            self._actor.take(lambda coordinator: self._pool_set(now_s, coordinator), lambda _: None)
            asked = self._actor.ask(lambda coordinator: coordinator.handle(Restarted(now_s=now_s)))
            self.leads = True
            self._take_up(asked)

    def tick(self) -> None:
        """Update leadership, apply agents' contact times, and append events of expired timers if leading."""
        self.look()
        now_s = self._clock()
        heard = self._leadership.heard()

        def due(coordinator: Coordinator) -> tuple[Event, ...]:
            for cluster, ago_s in heard.items():
                record = coordinator.state.clusters.get(cluster)
                if record is not None and (record.heard_s or 0) < now_s - ago_s:
                    coordinator.hear(cluster, now_s - ago_s)
            return coordinator.due(now_s)

        events = self._actor.ask(due)
        if self.leads and events:
            requests = [self.request(event) for event in events]
            for event, request in zip(events, self._actor.settle(requests), strict=True):
                quietly(event.kind, request.value)

    def _pool_set(self, now_s: float, coordinator: Coordinator) -> Event:
        """Return the event with the operator's present links and queue settings."""
        rules, links = coordinator.state.rules, self._file.links if self._file else ()
        return PoolSet(now_s=now_s, links=links, objective=rules.objective, patience_s=rules.patience_s)


def quietly(what: str, act: Callable[[], None]) -> None:
    """Run a background action; log an `IsthmusError` instead of raising it."""
    try:
        act()
    except IsthmusError as error:
        _log.warning("%s: %s", what, error)
