"""Switches and workers on a virtual clock: packets are lost, doubled, delayed and reordered by a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(frozen=True)
class Faults:
    """Probabilities of loss and duplication of a packet; a packet takes `delay_s` to three times as long."""

    loss: float = 0.0
    doubled: float = 0.0
    delay_s: float = 1e-3


class VirtualClock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()
        self._wakes: dict[int, float | None] = {}

    def at(self, when_s: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._number), action))

    def wake(self, key: int, when_s: float | None, action: Callable[[], Any]) -> None:
        """Call `action` at `when_s`, in place of what `key` asked for before."""
        if self._wakes.get(key) == when_s:
            return
        self._wakes[key] = when_s
        if when_s is not None:

            def fire() -> None:
                if self._wakes.get(key) == when_s:
                    self._wakes[key] = None
                    action()

            self.at(when_s, fire)

    def run(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Run until `is_over`; fails if the events end, or `limit_s` passes, before: something hangs."""
        while not is_over():
            assert self._events, "no event is left, and the workers are not done"
            when_s, _, action = heapq.heappop(self._events)
            assert when_s <= limit_s, f"not done after {limit_s} s"
            self.now_s = when_s
            action()


class LossyNetwork:
    """Delivers each packet of a datagram by itself, as faults and the random numbers have it."""

    def __init__(self, clock: VirtualClock, faults: Faults, random_numbers: random.Random) -> None:
        self._clock, self._faults, self._random = clock, faults, random_numbers
        self.payload_bytes = 0

    def send(self, data: bytes, packet_bytes: int, deliver: Callable[[bytes, int], Any]) -> None:
        if self._faults == Faults():
            self._clock.at(self._clock.now_s + 1e-3, lambda: deliver(data, packet_bytes))
            return
        for start in range(0, len(data), packet_bytes):
            packet = data[start : start + packet_bytes]
            for _ in range(2 if self._random.random() < self._faults.doubled else 1):
                if self._random.random() >= self._faults.loss:
                    delay_s = self._faults.delay_s * (1 + 2 * self._random.random())
                    self._clock.at(self._clock.now_s + delay_s, lambda one=packet: deliver(one, len(one)))
