"""`Leader`: whether this server leads the pool, what only a leader says, and what time alone brings about.

Of the servers on one store the one that has `Leadership` plans and watches the time. It begins with an epoch
of its own; what it says later counts under that epoch alone.
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
    """`file` is the operator's pool, `clock` gives seconds since the epoch.

    `take_up` is given what a leader finds to be done when it begins: what the last one was doing is asked for
    again.
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
        """Return the request that takes in what is only a leader's to say: nothing, under a later epoch."""
        epoch = self._epoch
        return Request(lambda _: None, lambda coordinator: event if coordinator.epoch == epoch else None)

    def look(self) -> None:
        """Begin an epoch where leadership was won; follow where it was lost."""
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
        """Take in what time alone has brought about; a server that does not lead only keeps up."""
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
        """Return what the operator now wants of links and queue."""
        rules, links = coordinator.state.rules, self._file.links if self._file else ()
        return PoolSet(now_s=now_s, links=links, objective=rules.objective, patience_s=rules.patience_s)


def quietly(what: str, act: Callable[[], None]) -> None:
    """Do what nobody waits for: where it came too late, or cannot be stored now, that is logged."""
    try:
        act()
    except IsthmusError as error:
        _log.warning("%s: %s", what, error)
