"""`Carrier`: the queue of a simulated link, which computes when each transfer has left and arrives.

Transfers share a link in one of two ways (`Sharing`):
- `fifo`: one after the other at the full rate, in the order of `carry`;
- `fair`: all at once, each at an equal share of the rate, as parallel TCP flows do.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from isthmus.sim.kernel import Kernel
from isthmus.sim.links.wire import Wire, finish_s, moved_bytes

Sharing = Literal["fifo", "fair"]


class Parcel(Protocol):
    """A transfer over a link; it stands for `weight` equal messages of `num_bytes` each."""

    num_bytes: float
    weight: int
    flow: int
    """Number of its flow; messages of one flow arrive in order."""

    def depart(self, left_s: float, arrives_s: float) -> None:
        """Set the times at which the last byte leaves and arrives; called once, not later than `left_s`."""
        ...


class Carrier(ABC):
    """The queue of a link: counts the bytes sent, and draws jittered delays from `seed`."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        self.wire = wire
        self.carried_bytes = 0.0
        self._kernel = kernel
        self._random = random.Random(seed)
        self._last_s: dict[int, float] = {}

    @abstractmethod
    def carry(self, parcel: Parcel) -> None:
        """Queue a transfer now."""

    def _arrival_s(self, left_s: float, flow: int) -> float:
        wire = self.wire
        if not wire.jitter_s:
            return left_s + wire.delay_s
        drawn_s = left_s + max(0.0, self._random.gauss(wire.delay_s, wire.jitter_s))
        self._last_s[flow] = arrives_s = max(drawn_s, self._last_s.get(flow, 0.0))
        return arrives_s


class FifoCarrier(Carrier):
    """A link that sends one message after the other; those of one transfer follow each other."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        super().__init__(kernel, wire, seed)
        self._free_s = 0.0

    def carry(self, parcel: Parcel) -> None:
        """Queue a transfer now."""
        num_bytes = parcel.num_bytes * parcel.weight
        self.carried_bytes += num_bytes
        start_s = max(self._kernel.now, self._free_s)
        self._free_s = left_s = finish_s(self.wire, start_s, num_bytes)
        parcel.depart(left_s, self._arrival_s(left_s, parcel.flow))


@dataclass(order=True)
class _Shared:
    """An active transfer on a fair link: it has left when every flow has been served `until_bytes`."""

    until_bytes: float
    number: int
    parcel: Parcel = field(compare=False)


class FairCarrier(Carrier):
    """A link that sends all messages at once (processor sharing); each message has an equal share."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        super().__init__(kernel, wire, seed)
        self._active: list[_Shared] = []
        self._number = count()
        self._weight = 0
        self._served_bytes = 0.0
        self._at_s = 0.0
        self._plan = 0

    def carry(self, parcel: Parcel) -> None:
        """Queue a transfer now."""
        self.carried_bytes += parcel.num_bytes * parcel.weight
        self._advance()
        shared = _Shared(self._served_bytes + parcel.num_bytes, next(self._number), parcel)
        heapq.heappush(self._active, shared)
        self._weight += parcel.weight
        self._expect()

    def _advance(self) -> None:
        """Add the bytes served per message since the last call."""
        now = self._kernel.now
        if self._weight and now > self._at_s:
            self._served_bytes += moved_bytes(self.wire, self._at_s, now) / self._weight
        self._at_s = now

    def _expect(self) -> None:
        """Schedule the completion of the next transfer; a later call replaces it."""
        self._plan += 1
        if self._active:
            left_bytes = max(0.0, self._active[0].until_bytes - self._served_bytes) * self._weight
            due_s = finish_s(self.wire, self._kernel.now, left_bytes)
            self._kernel.call(due_s, self._finish, self._plan)

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._at_s = now = self._kernel.now
        self._served_bytes = self._active[0].until_bytes
        done_bytes = self._served_bytes * (1 + 1e-12)
        while self._active and self._active[0].until_bytes <= done_bytes:
            done = heapq.heappop(self._active).parcel
            self._weight -= done.weight
            done.depart(now, self._arrival_s(now, done.flow))
        if not self._active:
            self._served_bytes = 0.0
        self._expect()


CARRIERS: dict[Sharing, type[FifoCarrier | FairCarrier]] = {"fifo": FifoCarrier, "fair": FairCarrier}
