"""`Carrier`: a wire at work: what is on it, and when each message has left and arrives.

Messages of one wire share it in one of two ways (`Sharing`):
- `fifo`: one after the other, each at the full rate, in the order in which they were handed over;
- `fair`: all at once, each at an equal part of the rate, as many TCP flows do.
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
    """What a carrier carries: bytes of one of `weight` equal messages, told when it left and arrives."""

    num_bytes: float
    weight: int
    flow: int

    def depart(self, left_s: float, arrives_s: float) -> None:
        """Learn when the last byte left and when it arrives; called once, not later than `left_s`."""
        ...


class Carrier(ABC):
    """A wire at work: counts its bytes, and draws its delays from `seed`."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        self.wire = wire
        self.carried_bytes = 0.0
        self._kernel = kernel
        self._random = random.Random(seed)
        self._last_s: dict[int, float] = {}

    @abstractmethod
    def carry(self, parcel: Parcel) -> None:
        """Take a parcel now."""

    def _arrival_s(self, left_s: float, flow: int) -> float:
        wire = self.wire
        if not wire.jitter_s:
            return left_s + wire.delay_s
        drawn_s = left_s + max(0.0, self._random.gauss(wire.delay_s, wire.jitter_s))
        self._last_s[flow] = arrives_s = max(drawn_s, self._last_s.get(flow, 0.0))
        return arrives_s


class FifoCarrier(Carrier):
    """One message after the other. A parcel that stands for many is all of them in a row."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        super().__init__(kernel, wire, seed)
        self._free_s = 0.0

    def carry(self, parcel: Parcel) -> None:
        """Take a parcel now."""
        num_bytes = parcel.num_bytes * parcel.weight
        self.carried_bytes += num_bytes
        start_s = max(self._kernel.now, self._free_s)
        self._free_s = left_s = finish_s(self.wire, start_s, num_bytes)
        parcel.depart(left_s, self._arrival_s(left_s, parcel.flow))


@dataclass(order=True)
class _Shared:
    """A parcel on a fair carrier: it has left once every flow has been served `until_bytes`."""

    until_bytes: float
    number: int
    parcel: Parcel = field(compare=False)


class FairCarrier(Carrier):
    """All messages at once. A parcel of weight w takes w shares, one for each message it stands for."""

    def __init__(self, kernel: Kernel, wire: Wire, seed: int | str = 0) -> None:
        super().__init__(kernel, wire, seed)
        self._active: list[_Shared] = []
        self._number = count()
        self._weight = 0
        self._served_bytes = 0.0
        self._at_s = 0.0
        self._plan = 0

    def carry(self, parcel: Parcel) -> None:
        """Take a parcel now."""
        self.carried_bytes += parcel.num_bytes * parcel.weight
        self._advance()
        shared = _Shared(self._served_bytes + parcel.num_bytes, next(self._number), parcel)
        heapq.heappush(self._active, shared)
        self._weight += parcel.weight
        self._expect()

    def _advance(self) -> None:
        now = self._kernel.now
        if self._weight and now > self._at_s:
            self._served_bytes += moved_bytes(self.wire, self._at_s, now) / self._weight
        self._at_s = now

    def _expect(self) -> None:
        """Ask to be called when the next parcel has left, unless another is handed over before."""
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
            parcel = heapq.heappop(self._active).parcel
            self._weight -= parcel.weight
            parcel.depart(now, self._arrival_s(now, parcel.flow))
        if not self._active:
            self._served_bytes = 0.0
        self._expect()


CARRIERS: dict[Sharing, type[FifoCarrier | FairCarrier]] = {"fifo": FifoCarrier, "fair": FairCarrier}
