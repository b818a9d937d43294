"""`LinkQueue`: the queue of a simulated link, which computes when each transfer has left and arrives.

Transfers share a link in one of two ways (`Sharing`):
- `fifo`: one after the other at the full rate, in the order of `send`;
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
from isthmus.sim.links.simulated_link import SimulatedLink, send_end_s, transferable_bytes

Sharing = Literal["fifo", "fair"]


class LinkTransfer(Protocol):
    """A transfer over a link; it stands for `weight` equal messages of `num_bytes` each."""

    num_bytes: float
    weight: int
    flow: int
    """Number of its flow; messages of one flow arrive in order."""

    def on_sent(self, left_s: float, arrives_s: float) -> None:
        """Set the times at which the last byte leaves and arrives; called once, not later than `left_s`."""
        ...


class LinkQueue(ABC):
    """The queue of a link: counts the bytes sent, and draws jittered delays from `seed`."""

    def __init__(self, kernel: Kernel, link: SimulatedLink, seed: int | str = 0) -> None:
        self.link = link
        self.sent_bytes = 0.0
        self._kernel = kernel
        self._random = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
        self._last_arrival_s: dict[int, float] = {}

    @abstractmethod
    def send(self, transfer: LinkTransfer) -> None:
        """Queue a transfer now."""

    def _arrival_s(self, left_s: float, flow: int) -> float:
        wire = self.link
        if not wire.jitter_s:
            return left_s + wire.delay_s
        drawn_s = left_s + max(0.0, self._random.gauss(wire.delay_s, wire.jitter_s))
        self._last_arrival_s[flow] = arrives_s = max(drawn_s, self._last_arrival_s.get(flow, 0.0))
        return arrives_s


class FifoLinkQueue(LinkQueue):
    """A link that sends one message after the other; those of one transfer follow each other."""

    def __init__(self, kernel: Kernel, link: SimulatedLink, seed: int | str = 0) -> None:
        super().__init__(kernel, link, seed)
        self._busy_until_s = 0.0

    def send(self, transfer: LinkTransfer) -> None:
        """Queue a transfer now."""
        num_bytes = transfer.num_bytes * transfer.weight
        self.sent_bytes += num_bytes
        start_s = max(self._kernel.now_s, self._busy_until_s)
        self._busy_until_s = left_s = send_end_s(self.link, start_s, num_bytes)
        transfer.on_sent(left_s, self._arrival_s(left_s, transfer.flow))


@dataclass(order=True)
class _ActiveTransfer:
    """An active transfer on a fair link: it has left when every flow has been served `ends_at_bytes`."""

    ends_at_bytes: float
    number: int
    transfer: LinkTransfer = field(compare=False)


class FairLinkQueue(LinkQueue):
    """A link that sends all messages at once (processor sharing); each message has an equal share."""

    def __init__(self, kernel: Kernel, link: SimulatedLink, seed: int | str = 0) -> None:
        super().__init__(kernel, link, seed)
        self._active: list[_ActiveTransfer] = []
        self._sequence = count()
        self._weight = 0
        self._served_bytes = 0.0
        self._updated_s = 0.0
        self._generation = 0

    def send(self, transfer: LinkTransfer) -> None:
        """Queue a transfer now."""
        self.sent_bytes += transfer.num_bytes * transfer.weight
        self._advance()
        shared = _ActiveTransfer(self._served_bytes + transfer.num_bytes, next(self._sequence), transfer)
        heapq.heappush(self._active, shared)
        self._weight += transfer.weight
        self._schedule_completion()

    def _advance(self) -> None:
        """Add the bytes served per message since the last call."""
        now = self._kernel.now_s
        if self._weight and now > self._updated_s:
            self._served_bytes += transferable_bytes(self.link, self._updated_s, now) / self._weight
        self._updated_s = now

    def _schedule_completion(self) -> None:
        """Schedule the completion of the next transfer; a later call replaces it."""
        self._generation += 1
        if self._active:
            left_bytes = max(0.0, self._active[0].ends_at_bytes - self._served_bytes) * self._weight
            due_s = send_end_s(self.link, self._kernel.now_s, left_bytes)
            self._kernel.call_at(due_s, self._complete, self._generation)

    def _complete(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._updated_s = now = self._kernel.now_s
        self._served_bytes = self._active[0].ends_at_bytes
        done_bytes = self._served_bytes * (1 + 1e-12)
        while self._active and self._active[0].ends_at_bytes <= done_bytes:
            done = heapq.heappop(self._active).transfer
            self._weight -= done.weight
            done.on_sent(now, self._arrival_s(now, done.flow))
        if not self._active:
            self._served_bytes = 0.0
        self._schedule_completion()


LINK_QUEUES: dict[Sharing, type[FifoLinkQueue | FairLinkQueue]] = {
    "fifo": FifoLinkQueue,
    "fair": FairLinkQueue,
}
