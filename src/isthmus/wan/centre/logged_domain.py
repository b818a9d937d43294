"""`LoggedDomain`: the controller of a domain whose orders are logged before they count, and read again at its start."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, NonNegativeFloat
from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.wan.centre.domain_requests import DomainReply, EndMessage, OrderMessage, ReportMessage, domain_reply
from isthmus.wan.centre.network_log import NetworkLog
from isthmus.wan.control.wan_topology import WanTopology
from isthmus.wan.controller.domain_controller import REMEMBER_S, DomainController
from isthmus.wan.controller.wan_network import WanNetwork


class OrderEvent(FrozenModel):
    """An order with its time, as the log keeps it."""

    now_s: NonNegativeFloat
    message: Annotated[OrderMessage, Field(discriminator="kind")]


class LoggedDomain:
    """The controller of `domain` with its log in `folder`; times never go back, and each start has a later epoch."""

    def __init__(self, topology: WanTopology, domain: str, folder: Path, now_s: float) -> None:
        """Raise `NotFoundError` for a domain without pipes, `FileError` for a damaged log."""
        names = sorted({pipe.domain for pipe in topology.pipes})
        if domain not in names:
            raise NotFoundError(f"the network has no domain {domain!r}", hint=f"available: {', '.join(names)}")
        self._log = NetworkLog(folder, OrderEvent)
        events = list(self._log.read())
        self._now_s = max(now_s, max((event.now_s for event in events), default=0.0))
        self.controller = DomainController(WanNetwork(topology), domain, int(self._now_s * 1e3) + 1)
        for event in events:
            self.controller.handle(event.message.order(), event.now_s)
        held = set(self._held())
        kept = [
            event
            for event in events
            if event.message.key in held or (event.message.kind == "release" and event.now_s + REMEMBER_S > self._now_s)
        ]
        if len(kept) < len(events):
            self._log.replace(kept)

    @property
    def num_bookings(self) -> int:
        """Bookings that are prepared or committed."""
        return len(self._held())

    def handle(self, message: OrderMessage | ReportMessage, now_s: float) -> DomainReply:
        """Return the answer; what it promises is on disk by then. Raise `UnavailableError` if it cannot be."""
        self._now_s = max(self._now_s, now_s)
        if isinstance(message, ReportMessage):
            return domain_reply(self.controller.report(self._now_s))
        if self._log.is_full and not isinstance(message, EndMessage):
            raise UnavailableError("the domain's log is full", hint="restart the controller: it drops what has ended")
        self._log.append(OrderEvent(now_s=self._now_s, message=message))
        return domain_reply(self.controller.handle(message.order(), self._now_s))

    def set_down(self, pipes: Collection[str]) -> None:
        """Record which pipes of the domain have failed: those of `pipes`, and no others. The next report says so."""
        for pipe in self.controller.bookings.capacity_kbps:
            self.controller.set_down(pipe, pipe in pipes)

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _held(self) -> list[object]:
        return list(self.controller.bookings)
