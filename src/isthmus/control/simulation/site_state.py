"""`SiteBooks`: what is known of a simulated site, and the life of a part at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.control.simulation.site_cards import SiteCards
from isthmus.control.simulation.site_parts import CLAIMING, Act, PartKey, SitePart, SiteState
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages import Fault
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL, as of an agent."""

CHECKIN_TIMEOUT_S = 120.0
"""How long workers may take to check in, as at an agent."""

_RELEASED_AT_ONCE = ("queued", "ready", "evicting", "prepared", "refused")
_STEPS: dict[SiteState, tuple[SiteState, ...]] = {
    "new": ("queued", "ready", "evicting", "prepared", "refused", "failed", "released"),
    "queued": ("ready", "evicting", "prepared", "refused", "running", "failed", "released"),
    "ready": ("evicting", "prepared", "refused", "released"),
    "evicting": ("prepared", "running", "queued", "released"),
    "prepared": ("running", "released"),
    "refused": ("released",),
    "running": ("succeeded", "failed", "stopping"),
    "succeeded": ("stopping",),
    "failed": ("stopping",),
    "stopping": ("queued", "released"),
    "released": ("forgotten",),
}


@dataclass(kw_only=True, eq=False)
class SiteBooks:
    """The parts of a site and the rules they are held by.

    `fence` is the highest that orders have come under. `restless` are the parts that time alone may change,
    `queued_local` and `queued_pool` those that wait; `changed` says that one of them might start now.
    `news` counts what the server has not been told before; `acts` gathers what the present event asks of the
    world.
    """

    cluster: Cluster
    policy: OwnerPolicy
    cards: SiteCards
    stop_grace_s: float = STOP_GRACE_S
    checkin_timeout_s: float = CHECKIN_TIMEOUT_S
    parts: dict[PartKey, SitePart] = field(default_factory=dict)
    restless: dict[PartKey, SitePart] = field(default_factory=dict)
    queued_local: dict[PartKey, SitePart] = field(default_factory=dict)
    queued_pool: dict[PartKey, SitePart] = field(default_factory=dict)
    fence: int = 0
    arrivals: int = 0
    changed: bool = False
    news: int = 0
    acts: list[Act] = field(default_factory=list)

    def rank(self, part: SitePart) -> int:
        """Return the place of a part's level among the site's own, 0 the highest."""
        levels = self.cluster.priorities.levels
        return levels.index(part.level) if part.level in levels else len(levels)

    def arrive(self, part: SitePart) -> None:
        """Take a new part in, behind all that came before it."""
        self.arrivals += 1
        part.arrived = part.place = self.arrivals
        self.parts[part.key] = part

    def queue(self) -> list[SitePart]:
        """Return what waits, first to start first: local jobs by level, the pool's in its order, merged."""
        local = sorted(self.queued_local.values(), key=lambda part: (self.rank(part), part.place))
        merged: list[SitePart] = []
        at = 0
        for part in sorted(self.queued_pool.values(), key=lambda part: part.place):
            while at < len(local) and self._first(local[at], part):
                merged.append(local[at])
                at += 1
            merged.append(part)
        return merged + local[at:]

    def _first(self, local: SitePart, part: SitePart) -> bool:
        return (self.rank(local), local.arrived) < (self.rank(part), part.arrived)

    def limit(self, node_group: str) -> int:
        """Return how many cards of `node_group` the owner lets the pool's jobs have."""
        return self.policy.limit(node_group, self.cards.inventory.get(node_group, 0))

    def grace_s(self, part: SitePart) -> float:
        """Return how long `part` has between SIGTERM and SIGKILL."""
        return self.policy.grace_s if part.requeue else self.stop_grace_s

    def leased(self, part: SitePart) -> bool:
        """Tell whether `part` holds or claims its cards under a lease."""
        return part.state in ("ready", "evicting", "prepared") and not part.local

    def due_s(self, part: SitePart) -> Iterator[float]:
        """Yield when time alone does something to `part`."""
        if self.leased(part):
            yield min(part.since_s + part.lease_s, part.claimed_s + self.policy.hold_s)
        if part.force_at_s is not None:
            yield part.force_at_s
        if part.state == "running" and not part.local and not part.addresses:
            yield part.since_s + self.checkin_timeout_s
        if part.evicted and part.evict_at_s is not None:
            yield part.evict_at_s


def move(books: SiteBooks, part: SitePart, to: SiteState, now_s: float, detail: str = "") -> None:
    """Take `part` to state `to`; raise `IllegalTransitionError` where an agent has no such step."""
    before = part.state
    if to not in _STEPS.get(before, ()):
        raise IllegalTransitionError(f"{part.job}/{part.attempt} at {books.cluster.name}: {before} -> {to}")
    part.state, part.since_s, part.told = to, now_s, None
    part.detail = detail or part.detail
    if to in CLAIMING | {"prepared"} and before not in CLAIMING:
        part.claimed_s = now_s
    if to == "evicting":
        part.reported = "ready"
    elif to != "new" and to != "forgotten" and to != "stopping":
        part.reported = to
    books.cards.change(part, before, to)
    _enter(books, part, to)
    book = books.queued_local if part.local else books.queued_pool
    if to == "queued":
        book[part.key] = part
    else:
        book.pop(part.key, None)
    if _restless(part) or part.evicted:
        books.restless[part.key] = part
    else:
        books.restless.pop(part.key, None)
    books.changed, books.news = True, books.news + 1


def fail(books: SiteBooks, part: SitePart, fault: Fault, now_s: float, detail: str) -> None:
    """Take a part to `failed`, with the reason."""
    part.fault = fault
    move(books, part, "failed", now_s, detail)


def release(books: SiteBooks, part: SitePart, now_s: float, detail: str = "") -> None:
    """Begin to leave nothing of `part` at the site; repeated, it changes nothing."""
    if part.state in ("running", "succeeded", "failed"):
        move(books, part, "stopping", now_s, detail)
    elif part.state in _RELEASED_AT_ONCE:
        move(books, part, "released", now_s, detail)


def stop_live(books: SiteBooks, part: SitePart, *, force: bool) -> None:
    """Ask the processes of `part` to end, or end them."""
    if part.live:
        books.acts.append(Act("stop", part, force=force))


def _enter(books: SiteBooks, part: SitePart, to: SiteState) -> None:
    """Do what belongs to entering a state."""
    if to == "running":
        part.live = True
        books.acts.append(Act("start", part))
    elif to in ("failed", "stopping"):
        if part.force_at_s is None and (part.live or to == "stopping"):
            part.force_at_s = part.since_s + books.grace_s(part)
        stop_live(books, part, force=False)
    elif to == "queued":
        part.requeue, part.force_at_s, part.exit_status, part.live = False, None, None, False
    elif to == "released":
        part.force_at_s, part.evict_at_s, part.victims, part.addresses = None, None, (), ()
        part.unsaved_s = 0.0
    elif to == "forgotten":
        del books.parts[part.key]
        books.restless.pop(part.key, None)


def _restless(part: SitePart) -> bool:
    """Tell whether time alone, or the end of another part, may change `part`."""
    if part.state in CLAIMING or part.state in ("prepared", "stopping"):
        return True
    if part.local:
        return part.state in ("succeeded", "failed") or (part.state == "released" and part.withdrawn)
    return part.live and (part.state == "failed" or (part.state == "running" and not part.addresses))
