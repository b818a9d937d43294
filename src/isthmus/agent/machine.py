"""The agent's decisions, pure: `handle(event) -> instructions`. No clock, no file, no process.

The caller saves `parts` and `fence` before it carries an instruction out (`isthmus.agent.shell`); so whatever
is running is in the table, and a part in the table that is not running is started again without harm
(`Adapter.start`). What each event does is in `orders`, `watch`, `local_jobs`, `site_queue` and `preemption`;
the life of a part is the table in `site`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from isthmus.agent import reports
from isthmus.agent.cards import Cards
from isthmus.agent.events import (
    Event,
    FilesSeen,
    HoursSeen,
    Instruction,
    LocalJobsSeen,
    OrdersReceived,
    QueueSeen,
    ShutdownAsked,
    WorkersSeen,
)
from isthmus.agent.local_jobs import start_queued, want_local
from isthmus.agent.orders import obey, see_files
from isthmus.agent.parts import HeldPart, PartKey
from isthmus.agent.preemption import close, pursue
from isthmus.agent.site import LEASED, SiteState, grace_s, move, release, stop_live
from isthmus.agent.site_queue import see_queue
from isthmus.agent.watch import peers_last, see, watch_over
from isthmus.core.messages import LocalJobSeen, ObservedPart
from isthmus.core.policy import OwnerPolicy
from isthmus.core.priority import PriorityMap

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL."""

CHECKIN_TIMEOUT_S = 120.0
"""How long a worker may take from its start until it says where it listens."""

SILENCE_TIMEOUT_S = 7200.0
"""How long a worker that trains may write neither a metrics line nor a log line. Far longer than a step or a
checkpoint takes: it ends what would otherwise hold its cards for ever. A worker that no longer answers its
peers is found by them much earlier (`WorkerSpec.peer_timeout_s`)."""


class AgentMachine:
    """The parts that one site holds, and what to do about them.

    `parts` and `fence` are those of the agent's last life. `inventory` maps a node group to its card ids.
    A site that `fetches` has a storage of its own: jobs start there once their files have come.
    """

    def __init__(
        self,
        cluster: str,
        inventory: Mapping[str, Sequence[str]],
        parts: Iterable[HeldPart] = (),
        *,
        fence: int = 0,
        priorities: PriorityMap | None = None,
        policy: OwnerPolicy | None = None,
        fetches: bool = False,
        now_s: float = 0.0,
        stop_grace_s: float = STOP_GRACE_S,
        checkin_timeout_s: float = CHECKIN_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        self.site = SiteState(
            cluster=cluster,
            cards=Cards(inventory),
            priorities=priorities or PriorityMap(),
            policy=policy or OwnerPolicy(),
            fetches=fetches,
            stop_grace_s=stop_grace_s,
            checkin_timeout_s=checkin_timeout_s,
            silence_timeout_s=silence_timeout_s,
            parts={part.key: part for part in parts},
            fence=fence,
        )
        self.site.arrivals = max((part.arrived for part in self.parts.values()), default=0)
        for part in self.parts.values():
            _wake(self.site, part, now_s)

    @property
    def parts(self) -> dict[PartKey, HeldPart]:
        """Every part of the table, by name."""
        return self.site.parts

    @property
    def fence(self) -> int:
        """The highest fence that orders have come under."""
        return self.site.fence

    @property
    def ending(self) -> bool:
        """Whether the agent is to end and to leave nothing behind."""
        return self.site.ending

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in; return what is to be done, in order."""
        site, now_s = self.site, event.now_s
        match event:
            case OrdersReceived():
                obey(site, event.orders, now_s)
            case WorkersSeen():
                for seen in sorted(event.workers, key=peers_last):
                    see(site, seen, now_s)
            case LocalJobsSeen():
                want_local(site, event.jobs, event.unread, now_s)
            case QueueSeen():
                see_queue(site, event.entries)
            case FilesSeen():
                see_files(site, event)
            case HoursSeen():
                site.is_open = event.is_open
            case ShutdownAsked():
                site.ending = True
        for part in list(self.parts.values()):
            _pass_time(site, part, now_s)
        start_queued(site, now_s)
        out, site.out = site.out, []
        return out

    def observed(self) -> tuple[ObservedPart, ...]:
        """Return what the server is told of the pool's parts."""
        return reports.observed(self.site)

    def local_jobs(self) -> tuple[LocalJobSeen, ...]:
        """Return what the server is told of the site's own jobs."""
        return reports.local_jobs(self.site)

    def free_chips(self) -> dict[str, int]:
        """Return the cards of each node group that a new part of the pool could have."""
        return reports.free_chips(self.site)


def _wake(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Take a part over from the agent's last life; a stop that it may not have carried out is asked again."""
    part.since_s, part.claimed_s, part.rank_map, part.asked = now_s, now_s, None, False
    part.force_at_s = now_s if part.state in ("failed", "stopping") else None
    part.evict_at_s = now_s + site.policy.protect_s if part.evicted else None
    for worker in part.workers.values():
        worker.started, worker.wrote_s = False, now_s
    if part.requeue:
        part.force_at_s = now_s + grace_s(site, part)
        stop_live(site, part, force=False)


def _pass_time(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Do what is due for one part, whatever the event was."""
    if site.ending:
        _wind_up(site, part, now_s)
    elif part.local and part.state in ("succeeded", "failed"):
        release(site, part, now_s)
    elif not part.local and not site.is_open:
        close(site, part, now_s)
    if not part.local and part.state in LEASED:
        _end_lease(site, part, now_s)
    pursue(site, part, now_s)
    if part.state == "running" and not part.local:
        watch_over(site, part, now_s)
    if part.force_at_s is not None and now_s >= part.force_at_s:
        part.force_at_s = now_s + site.stop_grace_s
        stop_live(site, part, force=True)
    if part.state == "stopping" and not part.live:
        move(site, part, "queued" if part.requeue else "released", now_s)
    if part.local and part.withdrawn and part.state == "released":
        move(site, part, "forgotten", now_s)


def _end_lease(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Take cards back that nobody renews, or that the server renews for ever without running the part."""
    if now_s - part.since_s >= part.lease_s:
        release(site, part, now_s, f"not renewed within its lease of {part.lease_s:g} s")
    elif now_s - part.claimed_s >= site.policy.hold_s:
        why = f"held without running for {site.policy.hold_s:g} s, the longest that the owner allows"
        release(site, part, now_s, why)


def _wind_up(site: SiteState, part: HeldPart, now_s: float) -> None:
    """Let go of everything; local jobs that have not begun wait for the agent's next life."""
    if part.local and part.state == "evicting":
        move(site, part, "queued", now_s)
    elif not (part.local and part.state == "queued"):
        ended = part.state in ("succeeded", "failed", "refused")  # and has said why
        release(site, part, now_s, "" if ended else f"the agent of {site.cluster} is being stopped")
