"""What is known of a site (`SiteState`), and the life of a part at it: one table, `(from, to): on the way`.

    pool    queued -> ready -> evicting -> prepared -> running -> succeeded | failed -> stopping -> released
    local   queued -> (evicting) -> running -> succeeded | failed -> stopping -> released, or queued again

Steps in between may be left out; `refused` and `released` can follow on most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from isthmus.agent.cards import Cards
from isthmus.agent.events import Instruction, StartWorker, StopWorker
from isthmus.agent.parts import HeldPart, PartKey, State
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages import Fault, PartState
from isthmus.core.policy import OwnerPolicy
from isthmus.core.priority import PriorityMap

STORY_LENGTH = 16

LEASED: frozenset[State] = frozenset({"ready", "evicting", "prepared"})
"""States in which a part of the pool has cards under a lease, and has done no work yet."""


@dataclass(kw_only=True)
class SiteState:
    """The parts that one site holds, and the rules it holds them by. Times are in seconds.

    `fence` is the highest that orders have come under, `dropped` the latest that was too low. From SIGTERM to
    SIGKILL a worker has `stop_grace_s`; it must check in within `checkin_timeout_s`, and may train without a
    line for `silence_timeout_s`. `arrivals` counts those that have come; `is_open` says that it is an hour at
    which the pool may work here, `fetches` that it has a storage of its own; `out` gathers the instructions
    of the present event.
    """

    cluster: str
    cards: Cards
    priorities: PriorityMap
    policy: OwnerPolicy
    stop_grace_s: float
    checkin_timeout_s: float
    silence_timeout_s: float
    parts: dict[PartKey, HeldPart] = field(default_factory=dict)
    fence: int = 0
    dropped: int | None = None
    arrivals: int = 0
    is_open: bool = True
    fetches: bool = False
    ending: bool = False
    out: list[Instruction] = field(default_factory=list)

    def rank(self, part: HeldPart) -> int:
        """Return the place of a part's level among the site's own, 0 the highest."""
        levels = self.priorities.levels
        return levels.index(part.level) if part.level in levels else len(levels)

    def arrive(self, part: HeldPart) -> None:
        """Take a new part in, behind all that came before it."""
        self.arrivals += 1
        part.arrived = part.place = self.arrivals
        self.parts[part.key] = part

    def limit(self, node_group: str) -> int:
        """Return how many cards of `node_group` the owner lets the pool's jobs have, at its hours."""
        return self.policy.limit(node_group, len(self.cards.inventory.get(node_group, ())))


def move(site: SiteState, part: HeldPart, to: State, now_s: float, detail: str = "") -> None:
    """Take `part` to state `to` as the table says; an illegal step raises with the part's story."""
    step = _TRANSITIONS.get((part.state, to))
    if step is None:
        story = " -> ".join((*part.story, part.state, to))
        raise IllegalTransitionError(f"part {part.job}/{part.attempt} at {site.cluster}: {story}")
    part.story = (*part.story, part.state)[-STORY_LENGTH:]
    if to in LEASED and part.state not in LEASED:
        part.claimed_s = now_s
    part.state, part.since_s = to, now_s
    if detail:
        part.detail = detail
    if to in _REPORTED:
        part.reported = _REPORTED[to]
    step(site, part)


def fail(site: SiteState, part: HeldPart, fault: Fault, now_s: float, detail: str) -> None:
    """Take a part to `failed`, with the reason."""
    part.fault = fault
    move(site, part, "failed", now_s, detail)


def release(site: SiteState, part: HeldPart, now_s: float, detail: str = "") -> None:
    """Begin to leave nothing of `part` at the site; repeated, it changes nothing."""
    if part.state in ("running", "succeeded", "failed"):
        move(site, part, "stopping", now_s, detail)
    elif part.state in ("queued", "ready", "evicting", "prepared", "refused"):
        move(site, part, "released", now_s, detail)


def stop_live(site: SiteState, part: HeldPart, *, force: bool) -> None:
    """Ask every worker of `part` that may live to end, or end it."""
    for rank, worker in part.workers.items():
        if worker.live:
            site.out.append(StopWorker(part=part, rank=rank, force=force))


def grace_s(site: SiteState, part: HeldPart) -> float:
    """Return how long `part` has between SIGTERM and SIGKILL."""
    return site.policy.grace_s if part.requeue else site.stop_grace_s


def _note(_site: SiteState, _part: HeldPart) -> None:
    """Nothing to do."""


def _start(site: SiteState, part: HeldPart) -> None:
    for rank, worker in part.workers.items():
        worker.live, worker.started, worker.wrote_s = True, True, part.since_s
        site.out.append(StartWorker(part=part, rank=rank))


def _stop(site: SiteState, part: HeldPart) -> None:
    if part.force_at_s is None:
        part.force_at_s = part.since_s + grace_s(site, part)
    stop_live(site, part, force=False)


def _free(_site: SiteState, part: HeldPart) -> None:
    part.workers, part.force_at_s, part.spec, part.plan = {}, None, None, None
    part.victims, part.evict_at_s = (), None


def _queue_again(_site: SiteState, part: HeldPart) -> None:
    """Let go of everything but the place in the queue; a preempted job's next run is another one."""
    if part.requeue:
        part.runs += 1
    part.requeue, part.force_at_s, part.exit_status = False, None, None
    for worker in part.workers.values():
        worker.cards, worker.live, worker.started, worker.exit_status = (), False, False, None


def _forget(site: SiteState, part: HeldPart) -> None:
    del site.parts[part.key]


_REPORTED: dict[State, PartState] = {
    **{state: state for state in get_args(PartState)},
    "evicting": "ready",
}
"""What the server is told of a state; of one that is missing here, what it was told before."""

_TRANSITIONS: dict[tuple[State, State], Callable[[SiteState, HeldPart], None]] = {
    ("new", "queued"): _note,
    ("new", "ready"): _note,
    ("new", "evicting"): _note,
    ("new", "prepared"): _note,
    ("new", "refused"): _note,
    ("new", "failed"): _note,
    ("new", "released"): _free,
    ("queued", "ready"): _note,
    ("queued", "evicting"): _note,
    ("queued", "prepared"): _note,
    ("queued", "refused"): _note,
    ("queued", "running"): _start,
    ("queued", "failed"): _note,
    ("queued", "released"): _free,
    ("ready", "evicting"): _note,
    ("ready", "prepared"): _note,
    ("ready", "refused"): _note,
    ("ready", "released"): _free,
    ("evicting", "prepared"): _note,
    ("evicting", "refused"): _free,
    ("evicting", "running"): _start,
    ("evicting", "queued"): _queue_again,
    ("evicting", "released"): _free,
    ("prepared", "running"): _start,
    ("prepared", "released"): _free,
    ("refused", "released"): _free,
    ("running", "succeeded"): _note,
    ("running", "failed"): _stop,
    ("running", "stopping"): _stop,
    ("succeeded", "stopping"): _stop,
    ("failed", "stopping"): _stop,
    ("stopping", "queued"): _queue_again,
    ("stopping", "released"): _free,
    ("released", "forgotten"): _forget,
}
