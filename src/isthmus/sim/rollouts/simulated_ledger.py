"""`SimulatedLedger`: groups of samples by the rules of the trajectory ledger, counted instead of named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.sim.rollouts.meet_deadlines import meet_counted_deadlines


class SlotHolder(Protocol):
    """What the ledger knows of an engine: its name, the version that it decodes with, and its free slots."""

    name: str
    known_version: int
    free_slots: int


@dataclass(kw_only=True, eq=False)
class SampleGroup:
    """The samples of a prompt: those that wait for a slot, those that run, and the versions that began them."""

    number: int
    waiting: list[int]
    # By sample: the engine that decodes it, and the lease.
    running: dict[int, tuple[SlotHolder, int]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        """Return the oldest version of its tokens; infinite while none has begun."""
        return min(self.begun.values(), default=math.inf)


GiveSample = Callable[[SampleGroup, int, SlotHolder], None]


class SimulatedLedger:
    """Gives samples to engines and groups to the trainer: earliest deadline first, none that could become too stale."""

    def __init__(self, group: int, batch_prompts: int, max_staleness: int, *, aborts: bool = False) -> None:
        self._group, self._batch, self._staleness, self._aborts = group, batch_prompts, max_staleness, aborts
        self._open: dict[int, SampleGroup] = {}
        self._counts: Counter[float] = Counter()
        self._num_opened = 0
        self._lease = 0
        self.next_step = 0
        self.version = 0

    def assign(self, engines: Sequence[SlotHolder], give: GiveSample) -> None:
        """Start what may start; `give` gets group, sample and engine."""
        blocked = False
        for group in sorted((one for one in self._open.values() if one.waiting), key=self._order):
            while group.waiting and not blocked:
                blocked = not self._start(group, engines, give)
        while not blocked:
            fresh = SampleGroup(number=self._num_opened, waiting=list(range(self._group)))
            if not self._start(fresh, engines, give):
                return
            self._num_opened += 1
            self._open[fresh.number] = fresh
            while fresh.waiting and not blocked:
                blocked = not self._start(fresh, engines, give)

    def end(self, group: SampleGroup, sample: int, lease: int) -> bool:
        """Take in a complete sample and free its slot; return False for one whose lease is over."""
        holder, current = group.running.get(sample, (None, 0))
        if holder is None or current != lease:
            return False
        del group.running[sample]
        holder.free_slots += 1
        return True

    def abort_unfinished(self) -> list[tuple[SlotHolder, SampleGroup, int]]:
        """Let all samples that run begin again, and free their slots; return what engines are to drop."""
        dropped = []
        for group in self._open.values():
            before = self._deadline(group)
            for sample, (holder, _) in group.running.items():
                holder.free_slots += 1
                del group.begun[sample]
                dropped.append((holder, group, sample))
            group.waiting = sorted((*group.waiting, *group.running))
            group.running = {}
            self._move(before, self._deadline(group))
        return dropped

    def claim(self) -> list[SampleGroup] | None:
        """Return the groups of the next step and begin it, or None while they are not ready."""
        ready = [one for one in self._open.values() if not one.waiting and not one.running]
        if self.version != self.next_step or len(ready) < self._batch:
            return None
        chosen = sorted(ready, key=self._order)[: self._batch]
        counts = self._counts.copy()
        counts.subtract(self._deadline(one) for one in chosen)
        if not meet_counted_deadlines(counts, self.next_step + 1, self._batch):
            return None
        self._counts = counts
        self.next_step += 1
        for one in chosen:
            del self._open[one.number]
        return chosen

    def _order(self, group: SampleGroup) -> tuple[float, int]:
        return self._deadline(group), group.number

    def _deadline(self, group: SampleGroup) -> float:
        return group.oldest + self._staleness

    def _start(self, group: SampleGroup, engines: Sequence[SlotHolder], give: GiveSample) -> bool:
        """Start a sample on the engine with the newest weights, of these the one with most free slots, if one may."""
        least = self.version if self._aborts else 0
        free = [one for one in engines if one.free_slots > 0 and one.known_version >= least]
        tried: int | None = None
        for one in sorted(free, key=lambda one: (one.known_version, one.free_slots, one.name), reverse=True):
            if one.known_version != tried and self._may_begin(group, one.known_version):
                sample = group.waiting.pop(0)
                group.begun[sample] = one.known_version
                self._lease += 1
                group.running[sample] = one, self._lease
                one.free_slots -= 1
                give(group, sample, one)
                return True
            tried = one.known_version
        return False

    def _may_begin(self, group: SampleGroup, version: int) -> bool:
        """Return whether all groups fit with a sample of this one begun under `version`; if so note its deadline."""
        before, after = self._deadline(group), min(group.oldest, version) + self._staleness
        self._move(before, after)
        if meet_counted_deadlines(self._counts, self.next_step, self._batch):
            return True
        self._move(after, before)
        return False

    def _move(self, before: float, after: float) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1
