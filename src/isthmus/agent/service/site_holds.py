"""`SiteHolds`: keeps the holds at the site's scheduler equal to what the site machine's parts want.

Every wanted hold is asked for again and again, which renews its lease; every other hold of this agent is released. So a
lost reply, a restart of the agent or of the scheduler need no cases of their own. Renewals of granted holds and
releases go before all other calls: a scheduler that is slow to grant a hundred holds lets none of them lapse, and keeps
no cards for a part that has been released.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from isthmus.agent.adapters.scheduler_adapter import (
    ContainerNeed,
    ForeignJob,
    Hold,
    HoldRequest,
    Probe,
    RankNeed,
    SchedulerAdapter,
    SchedulerLook,
)
from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.core.errors import InputError
from isthmus.core.messages.agent_messages import MAX_TIME_S
from isthmus.site import ForeignPart, HoldObserved, PartKey, ProbeObserved, SiteEvent, SitePart, victim_name

WAITING_INTERVAL_S = 0.3
"""Interval at which a hold that is not granted is asked for again."""

MAX_LEASE_S = 60.0
"""Longest lease of a hold whose part does not run: without an agent the cards are free again after it."""

MIN_RUNNING_LEASE_S = 900.0
"""Lease of a hold whose part runs, at least: so long an agent may be away."""

_RENEWALS_PER_LEASE = 6


class SiteHolds:
    """Holds of one site; `key` is the agent's own secret, `observe` gets what became of them.

    `clock` is that of the site machine, `wall_clock` counts from the epoch; both in seconds. `containers` returns what
    the ranks of a part run in, by node group; where that raises `InputError` nothing is asked for, since the part will
    be refused.
    """

    def __init__(
        self,
        adapter: SchedulerAdapter,
        calls: SchedulerCalls,
        key: str,
        observe: Callable[[SiteEvent], object],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        containers: Callable[[SitePart], Mapping[str, ContainerNeed]] = lambda _: {},
    ) -> None:
        self._adapter, self._calls, self._key, self._observe = adapter, calls, key, observe
        self._clock, self._wall_clock, self._containers = clock, wall_clock, containers
        self._due_s: dict[str, float] = {}
        self._probe_due_s: dict[str, float] = {}
        self._unwanted: set[str] = set()
        self._granted: set[str] = set()

    def hold_id(self, part: SitePart) -> str:
        """Return the id of the part's present hold; without the agent's key it cannot be foreseen."""
        text = f"{self._key}/{part.job}/{part.attempt}/{part.num_holds}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def settled(self) -> bool:
        """Whether every hold that no part wants has been released."""
        return not self._unwanted and not self._due_s

    def reconcile(self, parts: Iterable[SitePart], now_s: float, run_lease_s: float) -> None:
        """Ask for the holds and probes that `parts` want, and release the other holds."""
        parts = tuple(parts)
        self._probe((part for part in parts if part.probe == "asked"), now_s)
        wanted = {self.hold_id(part): part for part in parts if part.hold}
        self._granted = {hold_id for hold_id, part in wanted.items() if part.hold == "granted"}
        for hold_id in [hold_id for hold_id in self._due_s if hold_id not in wanted]:
            del self._due_s[hold_id]
            self._unwanted.add(hold_id)
        self._unwanted -= wanted.keys()
        for hold_id in sorted(self._unwanted):
            release, on_answer = partial(self._adapter.release, hold_id), partial(self._released, hold_id)
            self._calls.submit(("release", hold_id), release, on_answer, urgent=True)
        for hold_id, part in wanted.items():
            if now_s >= self._due_s.get(hold_id, now_s):
                victims = (victim_name(key) for key in part.victims if part.commits)
                granted = part.hold == "granted"
                self._due_s[hold_id] = now_s + WAITING_INTERVAL_S
                try:
                    containers = {} if granted else self._containers(part)
                except InputError:
                    continue
                request = replace(_request(hold_id, part, run_lease_s, victims), containers=containers)
                if granted:
                    self._due_s[hold_id] = now_s + request.lease_s / _RENEWALS_PER_LEASE
                call = self._adapter.commit if part.commits else self._adapter.hold
                answer = partial(self._answered, part.key, part.num_holds)
                self._calls.submit(("hold", hold_id), partial(call, request), answer, urgent=granted)

    def observe_look(self, look: SchedulerLook) -> None:
        """Release what the scheduler holds for this agent and no part wants; ask at once for lost ones."""
        self._unwanted |= {hold.id for hold in look.holds} - self._due_s.keys()
        for hold_id in self._granted - {hold.id for hold in look.holds if hold.state == "granted"}:
            self._due_s[hold_id] = -math.inf

    def _probe(self, parts: Iterable[SitePart], now_s: float) -> None:
        """Ask what each of `parts` would preempt; after an error again."""
        asked = {self.hold_id(part): part for part in parts}
        self._probe_due_s = {hold_id: due_s for hold_id, due_s in self._probe_due_s.items() if hold_id in asked}
        for hold_id, part in asked.items():
            if now_s >= self._probe_due_s.get(hold_id, now_s):
                self._probe_due_s[hold_id] = now_s + WAITING_INTERVAL_S
                request = _request(hold_id, part, 0.0, (victim_name(key) for key in part.victims))
                answer = partial(self._probed, part.key, part.victims)
                self._calls.submit(("probe", hold_id), partial(self._adapter.probe, request), answer)

    def _probed(self, key: PartKey, victims: tuple[PartKey, ...], probe: Probe) -> None:
        self._observe(ProbeObserved(now_s=self._clock(), part=key, victims=victims, preempted=probe.victims))

    def _released(self, hold_id: str, _answer: object) -> None:
        self._unwanted.discard(hold_id)

    def _answered(self, key: PartKey, number: int, hold: Hold) -> None:
        now_s, granted_at_s = self._clock(), None
        if hold.granted_at_s is not None:
            granted_at_s = now_s - max(0.0, self._wall_clock() - hold.granted_at_s)
        self._observe(
            HoldObserved(
                now_s=now_s, part=key, number=number, state=hold.state, devices=hold.cards, detail=hold.detail,
                granted_at_s=granted_at_s,
            )
        )  # fmt: skip


def foreign_part(job: ForeignJob, level: str, *, may_preempt: bool) -> ForeignPart:
    """Return a running job of others for the site machine; `level` is that of jobs without one.

    Unless its scheduler `may_preempt` jobs for the pool, none can be a victim.
    """
    devices: dict[str, tuple[str, ...]] = {}
    for card in job.cards:
        group = card.partition("/")[0]
        devices[group] = (*devices.get(group, ()), card)
    return ForeignPart(
        name=job.name, devices=devices, level=job.level or level, preemptible=may_preempt and job.preemptible,
        ends_at_s=job.ends_at_s if 0 <= (job.ends_at_s or 0.0) <= MAX_TIME_S else None,
    )  # fmt: skip


def _request(hold_id: str, part: SitePart, run_lease_s: float, victims: Iterable[str]) -> HoldRequest:
    running = part.state not in ("queued", "ready", "evicting", "prepared")
    lease_s = max(MIN_RUNNING_LEASE_S, run_lease_s) if running else min(part.lease_s or MAX_LEASE_S, MAX_LEASE_S)
    return HoldRequest(
        id=hold_id,
        job=part.job,
        attempt=part.attempt,
        ranks=tuple(
            RankNeed(node_group=worker.node_group, num_cards=worker.chips, node=worker.node)
            for worker in part.workers.values()
        ),
        lease_s=lease_s,
        victims=tuple(victims),
    )
