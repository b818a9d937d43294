"""The coordinator: every decision about jobs and chips, as a pure object. Events in, instructions out.

A shell uses it like this (the server and the tests' simulated pool both do):

    if coordinator.admit(event):        # raises where the event is not allowed; False: it changes nothing
        store.append([event])           # durable first,
        act_on(coordinator.handle(event))   # then decided
    reply(coordinator.orders(cluster))  # and only then said

On every report the shell also calls `hear(cluster, now_s)`, and now and then it passes each event of
`due(now_s)` through the same three lines. After a restart: `Coordinator.replay(events)`, then
`act_on(coordinator.handle(Restarted(now_s=...)))`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.control.events import Event, Instruction
from isthmus.core.messages import PartOrder
from isthmus.core.pool import Link
from isthmus.core.views import JobView, PoolView


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The coordinator's times, in seconds."""

    reservation_s: float = 30.0
    start_s: float = 120.0
    lease_s: float = 30.0
    agent_lost_s: float = 10.0
    retry_s: float = 2.0
    retry_most_s: float = 60.0


class Coordinator:
    """The state of the pool and what follows from it."""

    def __init__(self, rules: Rules = Rules()) -> None:
        self.rules = rules

    @classmethod
    def replay(cls, events: Iterable[Event], rules: Rules = Rules()) -> Coordinator:
        """Rebuild the state from the log."""
        raise NotImplementedError

    def admit(self, event: Event) -> bool:
        """Tell whether `event` changes anything and so must be logged and handled.

        Raises `NotFoundError` for an unknown job or plan and `ConflictError` for a step that is not
        allowed now. Changes nothing. `Restarted` is never admitted: hand it to `handle` unlogged.
        """
        raise NotImplementedError

    def handle(self, event: Event) -> list[Instruction]:
        """Take an admitted event in; return what the shell must do."""
        raise NotImplementedError

    def hear(self, cluster: str, now_s: float) -> None:
        """Note that the cluster's agent has just reported (not logged: it is only about being alive)."""
        raise NotImplementedError

    def due(self, now_s: float) -> tuple[Event, ...]:
        """Return what time alone has brought about: `AgentLost` and `DeadlinePassed` events."""
        raise NotImplementedError

    def job_of_key(self, user: str, key: str) -> str | None:
        """Return the job that this user already submitted with `key`; None for a new or an empty key."""
        raise NotImplementedError

    def orders(self, cluster: str) -> tuple[PartOrder, ...]:
        """Return every part that should exist at the cluster, or should no longer exist there."""
        raise NotImplementedError

    def job(self, job_id: str) -> JobView:
        """Return a job with its plans; raise `NotFoundError` if there is none."""
        raise NotImplementedError

    def jobs(self, user: str | None = None) -> tuple[JobView, ...]:
        """Return all jobs (of one user), oldest first, without their plans."""
        raise NotImplementedError

    def pool(self, links: tuple[Link, ...] = ()) -> PoolView:
        """Return the clusters that have ever reported, with `links` as the shell knows them."""
        raise NotImplementedError
