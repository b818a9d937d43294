"""`SimulatedSite`: one owner's site as its agent runs it: orders in, reports out, the owner's policy between.

It answers an order as the agent's machine does (`isthmus.agent.machine`): control and agent may not import
each other, so a conformance test compares the two. Processes are its world's: every call returns what is to
be done with them, and `checked_in`, `saved` and `exited` are told what became of it.
"""

from __future__ import annotations

from isthmus.control.simulation.site_cards import SiteCards
from isthmus.control.simulation.site_orders import obey
from isthmus.control.simulation.site_parts import Act, LocalJob, PartKey, SitePart
from isthmus.control.simulation.site_preemption import preemptible, pursue
from isthmus.control.simulation.site_queue import start_queued
from isthmus.control.simulation.site_state import SiteBooks, fail, move, release, stop_live
from isthmus.core.messages import (
    AgentOrders,
    AgentReport,
    Fault,
    LocalJobSeen,
    ObservedPart,
    Protection,
    QueueEntry,
    WorkerAddress,
)
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster

UNSAVED_STEP_S = 10.0
"""Unsaved work is told in steps of this, as an agent does."""


class SimulatedSite:
    """The site `cluster` under its owner's `policy`. Times are seconds of the simulated clock.

    `next_s` is when `pass_time` may have something to do next, if nothing else happens.
    """

    def __init__(self, cluster: Cluster, policy: OwnerPolicy | None = None) -> None:
        self.books = SiteBooks(
            cluster=cluster,
            policy=policy or OwnerPolicy(),
            cards=SiteCards({group.name: group.chips for group in cluster.node_groups}),
        )
        self.next_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        """What the site has."""
        return self.books.cluster

    @property
    def parts(self) -> dict[PartKey, SitePart]:
        """Every part of the table, by name."""
        return self.books.parts

    @property
    def quiet(self) -> bool:
        """Whether nothing is left of the pool's here."""
        return all(part.local for part in self.parts.values())

    def obey(self, orders: AgentOrders, now_s: float) -> list[Act]:
        """Carry out the server's orders; repeated, they change nothing."""
        obey(self.books, orders, now_s)
        return self._settle(now_s)

    def pass_time(self, now_s: float) -> list[Act]:
        """Do what is due by now."""
        return self._settle(now_s)

    def checked_in(self, key: PartKey, now_s: float) -> list[Act]:
        """Every rank of a part says where it listens."""
        part = self.parts.get(key)
        if part is not None and part.live and not part.addresses:
            part.addresses = tuple(
                WorkerAddress(rank=rank, cluster=self.cluster.name, host="site", port=rank + 1)
                for rank in part.ranks
            )
            part.told, self.books.news = None, self.books.news + 1
        return self._settle(now_s, part) if part is not None else []

    def saved(self, key: PartKey, checkpoint: Protection, now_s: float) -> list[Act]:
        """Every rank of a part has verified a checkpoint after the same step."""
        part = self.parts.get(key)
        if part is not None and part.live:
            part.saved, part.told = checkpoint, None
            self.books.news += 1
            if part.protect_after is not None and part.protection is None:
                part.protection = checkpoint if checkpoint.step > part.protect_after else None
        return self._settle(now_s, part) if part is not None else []

    def exited(self, key: PartKey, status: int, now_s: float, fault: Fault = "own") -> list[Act]:
        """No process of a part is left; `status` 0 is success, `fault` says where else the cause lies."""
        part = self.parts.get(key)
        if part is not None and part.live:
            part.live, part.told = False, None
            part.exit_status = status if part.local else None
            if part.state == "running" and status:
                fail(self.books, part, fault, now_s, f"rank {part.ranks[0]} ended with status {status}")
            elif part.state == "running":
                move(self.books, part, "succeeded", now_s)
        return self._settle(now_s, part) if part is not None else []

    def unsaved(self, part: SitePart, unsaved_s: float) -> None:
        """Note the work that a part would lose; it is told with the next report, but is no news."""
        if part.unsaved_s // UNSAVED_STEP_S != unsaved_s // UNSAVED_STEP_S:
            part.told = None
        part.unsaved_s = unsaved_s

    def submit(self, job: LocalJob, now_s: float) -> list[Act]:
        """Queue a job of the site's own users; one that is known already changes nothing."""
        books = self.books
        if (job.name, 0) not in books.parts:
            part = SitePart(job=job.name, attempt=0, ranks=(0,), chips={job.node_group: job.chips})
            books.arrive(part)
            part.level, part.preemptible = job.level, job.preemptible
            move(books, part, "queued", now_s)
        return self._settle(now_s)

    def withdraw(self, name: str, now_s: float) -> list[Act]:
        """Let go of a local job: its user no longer wants it, or has seen that it ended."""
        part = self.parts.get((name, 0))
        if part is not None:
            part.withdrawn, part.requeue = True, False
            release(self.books, part, now_s)
            self.books.restless[part.key] = part
        return self._settle(now_s)

    def wake(self, now_s: float) -> list[Act]:
        """Go on as a new agent with the table of the last one: what that had asked for is asked again."""
        books = self.books
        for part in books.parts.values():
            part.since_s, part.claimed_s, part.rank_map, part.asked = now_s, now_s, None, False
            part.force_at_s = now_s if part.state in ("failed", "stopping") else None
            part.evict_at_s = now_s + books.policy.protect_s if part.evicted else None
            if part.requeue:
                part.force_at_s = now_s + books.grace_s(part)
                stop_live(books, part, force=False)
            if part.state == "running" and part.live:
                books.acts.append(Act("start", part))
        books.changed = True
        return self._settle(now_s)

    def report(self, incarnation: str) -> AgentReport:
        """Return what the server is told."""
        books = self.books
        return AgentReport(
            cluster=books.cluster,
            incarnation=incarnation,
            free_chips=self.free_chips(),
            parts=tuple(_observed(part) for part in books.parts.values() if not part.local),
            queue=tuple(QueueEntry(job=part.job, attempt=part.attempt) for part in books.queue()),
            local_jobs=self.local_jobs(),
        )

    def free_chips(self) -> dict[str, int]:
        """Return the cards of each node group that a new part of the pool could have."""
        books = self.books
        free, used = books.cards.free(), books.cards.of_pool()
        for part in books.queued_local.values():
            for group, num in part.chips.items():
                free[group] -= num
        return {group: max(0, min(num, books.limit(group) - used[group])) for group, num in free.items()}

    def local_jobs(self) -> tuple[LocalJobSeen, ...]:
        """Return the site's own jobs that wait or run."""
        return tuple(
            LocalJobSeen(
                name=part.job,
                chips=part.chips,
                level=part.level,
                running=part.state == "running",
                preemptible=preemptible(self.books, part),
                unsaved_s=part.unsaved_s // UNSAVED_STEP_S * UNSAVED_STEP_S,
            )
            for part in self.books.parts.values()
            if part.local and part.state in ("queued", "evicting", "running")
        )

    def _settle(self, now_s: float, touched: SitePart | None = None) -> list[Act]:
        """Do what is due: for all that time may change, or for one part and those that wait for it."""
        books = self.books
        parts = list(books.restless.values() if touched is None else self._with_claimers(touched))
        for part in parts:
            _pass_time(books, part, now_s)
        start_queued(books, now_s)
        parts = list(books.restless.values() if touched is None else self._with_claimers(touched))
        times = [at for part in parts for at in books.due_s(part)]
        if touched is not None and self.next_s is not None:
            times.append(self.next_s)
        self.next_s = min(times, default=None)
        acts, books.acts = books.acts, []
        return acts

    def _with_claimers(self, part: SitePart) -> list[SitePart]:
        return [part, *(one for one in self.books.cards.claimers.values() if one is not part)]


def _pass_time(books: SiteBooks, part: SitePart, now_s: float) -> None:
    """Do what is due for one part, whatever the event was."""
    if part.local and part.state in ("succeeded", "failed"):
        release(books, part, now_s)
    if books.leased(part) and now_s - part.since_s >= part.lease_s:
        release(books, part, now_s, f"not renewed within its lease of {part.lease_s:g} s")
    elif books.leased(part) and now_s - part.claimed_s >= books.policy.hold_s:
        release(books, part, now_s, f"held without running for {books.policy.hold_s:g} s")
    pursue(books, part, now_s)
    late = part.state == "running" and not part.local and not part.addresses
    if late and now_s - part.since_s >= books.checkin_timeout_s:
        fail(books, part, "own", now_s, f"did not check in within {books.checkin_timeout_s:g} s")
    if part.force_at_s is not None and now_s >= part.force_at_s:
        part.force_at_s = now_s + books.stop_grace_s
        stop_live(books, part, force=True)
    if part.state == "stopping" and not part.live:
        move(books, part, "queued" if part.requeue else "released", now_s)
    if part.local and part.withdrawn and part.state == "released":
        move(books, part, "forgotten", now_s)


def _observed(part: SitePart) -> ObservedPart:
    if part.told is None:
        part.told = ObservedPart(
            job=part.job,
            attempt=part.attempt,
            state=part.reported,
            detail=part.detail,
            fault=part.fault,
            workers=part.addresses,
            unsaved_s=part.unsaved_s // UNSAVED_STEP_S * UNSAVED_STEP_S,
            protection=part.protection,
        )
    return part.told
