"""`Wire`: one direction of a path (rate, delay, jitter, interfering traffic), and what it carries when.

A message occupies its wire for its bytes over the rate that is left to it, and arrives a delay later.
Messages of one wire share it in one of two ways (`Sharing`):
- `fifo`: one after the other, each at the full rate, in the order in which they were handed over;
- `fair`: all at once, each at an equal part of the rate, as many TCP flows do.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from isthmus.core.errors import InputError
from isthmus.core.link_physics import effective_bytes_per_s
from isthmus.core.pool import Link
from isthmus.sim.kernel import Kernel

Sharing = Literal["fifo", "fair"]


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Traffic of others on a wire, which does not yield: `bytes_per_s` for `on_s`, then nothing for `off_s`.

    It starts at `start_s`, and is constant where `off_s` is 0.
    """

    bytes_per_s: float
    start_s: float = 0.0
    on_s: float = 1.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0 or self.start_s < 0 or self.on_s <= 0 or self.off_s < 0:
            raise InputError(f"interference {self}", hint="on_s must be positive, nothing may be negative")


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One direction of a path between stages. Boundaries that name the same wire share its rate.

    `jitter_s` is the standard deviation of the delay, drawn per message and never negative in sum; messages
    of one flow stay in order. `interference` takes its bytes off the rate while it is on.
    """

    name: str
    bytes_per_s: float
    delay_s: float
    jitter_s: float = 0.0
    interference: Interference | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.delay_s < 0 or self.jitter_s < 0:
            raise InputError(
                f"wire {self.name}: rate {self.bytes_per_s}, delay {self.delay_s}, jitter {self.jitter_s}",
                hint="the rate must be positive, the others not negative",
            )
        other = self.interference
        if other is not None and other.off_s == 0 and other.bytes_per_s >= self.bytes_per_s:
            raise InputError(
                f"wire {self.name}: constant interference of {other.bytes_per_s:g} bytes/s leaves nothing of "
                f"{self.bytes_per_s:g}",
                hint="give it less, or pauses (off_s)",
            )


def wire_of(link: Link, reverse: Link | None = None, interference: Interference | None = None) -> Wire:
    """Return the wire that a link of the pool is to one TCP flow: loss is the rate it costs.

    `reverse` is the way back, for the round trip. Jitter and delay are the link's.
    """
    return Wire(
        name=f"{link.source}>{link.target}",
        bytes_per_s=effective_bytes_per_s(link, reverse),
        delay_s=link.delay_s,
        jitter_s=link.jitter_ms / 1e3,
        interference=interference,
    )


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


def moved_bytes(wire: Wire, from_s: float, to_s: float) -> float:
    """Return the bytes that `wire` can move from `from_s` to `to_s` beside its interference."""
    whole = wire.bytes_per_s * (to_s - from_s)
    other = wire.interference
    if other is None:
        return whole
    taken_per_s = min(other.bytes_per_s, wire.bytes_per_s)
    return whole - taken_per_s * (_on_s(other, to_s) - _on_s(other, from_s))


def finish_s(wire: Wire, start_s: float, num_bytes: float) -> float:
    """Return when `num_bytes` that start at `start_s` have left, beside the wire's interference."""
    other = wire.interference
    if other is None:
        return start_s + num_bytes / wire.bytes_per_s
    left_bytes, now_s = num_bytes, start_s
    period_s = other.on_s + other.off_s
    slow_per_s = wire.bytes_per_s - min(other.bytes_per_s, wire.bytes_per_s)
    period_bytes = slow_per_s * other.on_s + wire.bytes_per_s * other.off_s
    while True:
        phase_s = now_s - other.start_s
        if phase_s >= 0 and left_bytes > period_bytes:  # whole periods at once
            periods = math.floor(left_bytes / period_bytes)
            now_s, left_bytes = now_s + periods * period_s, left_bytes - periods * period_bytes
            phase_s = now_s - other.start_s
        inside_s = phase_s % period_s
        on = phase_s >= 0 and (inside_s < other.on_s or not other.off_s)
        span_s = -phase_s if phase_s < 0 else (other.on_s if on else period_s) - inside_s
        rate = slow_per_s if on else wire.bytes_per_s
        if left_bytes <= rate * span_s:
            return now_s + (left_bytes / rate if left_bytes else 0.0)
        left_bytes -= rate * span_s
        now_s += max(span_s, math.ulp(now_s))


def _on_s(other: Interference, time_s: float) -> float:
    """Return how long `other` has been on by `time_s`."""
    phase_s = time_s - other.start_s
    if phase_s <= 0:
        return 0.0
    periods, inside_s = divmod(phase_s, other.on_s + other.off_s)
    return periods * other.on_s + min(inside_s, other.on_s)
