"""`JobHistory`: what happened to a job, derived from the coordinator's events alone and bounded.

Repetition takes one entry: waits in a row, and checkpoints in a row, are replaced by the newest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.core.messages.agent_messages import PartEventKind
from isthmus.core.views.api_views import HistoryKind

MAX_ENTRIES = 128
"""Entries kept per job; the oldest are dropped."""
SAME_EVENT_S = 5.0
"""Ranks report one recovery within this time of each other."""

_REPLACED_BY_NEXT: frozenset[HistoryKind] = frozenset({"waiting", "checkpoint"})
_ENDINGS: frozenset[HistoryKind] = frozenset({"lost", "refused", "preempted", "moved", "stopping"})
_KIND_OF_WORKER_EVENT: dict[PartEventKind, HistoryKind] = {
    "died": "worker-lost",
    "frozen": "stalled",
    "stalled": "stalled",
    "resumed": "resumed",
    "saved": "checkpoint",
}


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry; see `isthmus.core.views.api_views.HistoryEvent`."""

    number: int
    time_s: float
    kind: HistoryKind
    attempt: int
    text: str = ""
    cluster: str | None = None
    rank: int | None = None
    step: int | None = None
    seconds: float | None = None
    job: str | None = None


@dataclass(slots=True)
class JobHistory:
    """The newest entries of a job, oldest first."""

    entries: list[HistoryEntry] = field(default_factory=list)
    # Entries that it ever had, and those of them that were dropped as the oldest.
    num_added: int = 0
    num_dropped: int = 0
    # Entries that have made their notices, or happened before anyone subscribed.
    num_noticed: int = 0

    def take_unnoticed(self) -> tuple[HistoryEntry, ...]:
        """Return the entries since the last call, as far as they are kept."""
        found = tuple(one for one in self.entries if one.number > self.num_noticed)
        self.num_noticed = self.num_added
        return found

    def add(
        self,
        kind: HistoryKind,
        time_s: float,
        attempt: int,
        text: str = "",
        *,
        cluster: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        job: str | None = None,
    ) -> None:
        """Add an entry; it replaces the last one of a kind that only repeats."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.kind == kind and last.attempt == attempt and kind in _REPLACED_BY_NEXT:
            self.entries.pop()
        self.num_added += 1
        self.entries.append(
            HistoryEntry(self.num_added, time_s, kind, attempt, text, cluster, rank, step, seconds, job)
        )
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[0]
            self.num_dropped += 1

    def add_ending(
        self, kind: HistoryKind, time_s: float, attempt: int, text: str, cluster: str | None, job: str | None
    ) -> None:
        """Add the end of an attempt; a better explanation replaces the one that came first."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.attempt == attempt and last.kind in _ENDINGS and kind == last.kind:
            self.entries.pop()
        self.add(kind, time_s, attempt, text, cluster=cluster, job=job)

    def add_worker_event(
        self, kind: PartEventKind, time_s: float, attempt: int, text: str, cluster: str, rank: int,
        step: int | None, seconds: float | None,
    ) -> None:  # fmt: skip
        """Add what a worker reported; ranks that report the same recovery make one entry."""
        known = _KIND_OF_WORKER_EVENT.get(kind)
        if known is None or (known == "resumed" and self._has_resumed(time_s, attempt, step)):
            return
        self.add(known, time_s, attempt, text, cluster=cluster, rank=rank, step=step, seconds=seconds)

    def _has_resumed(self, time_s: float, attempt: int, step: int | None) -> bool:
        return any(
            (one.kind, one.attempt, one.step) == ("resumed", attempt, step) and abs(one.time_s - time_s) < SAME_EVENT_S
            for one in self.entries
        )

    def __str__(self) -> str:
        return " | ".join(
            f"{one.time_s:.3f} {one.kind} (attempt {one.attempt}) {one.text}".rstrip() for one in self.entries
        )
