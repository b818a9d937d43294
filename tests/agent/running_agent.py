"""`DrivenAgent`: an agent's service on a real scheduler, driven by a test; one life of it follows another."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from isthmus.agent.service.agent_service import AgentService
from isthmus.core.messages.agent_messages import AgentOrders, PartOrder

LOOP = ("sh", "-c", 'echo "$ISTHMUS_CARDS" > "$1/cards"; while :; do sleep 0.2; done', "worker")
"""A worker that notes its cards and runs until it is stopped."""

LIMIT_S = 120.0


class DrivenAgent(ABC):
    """The agent of one cluster; `restart` is a new life of it with the same state folder."""

    service: AgentService

    @abstractmethod
    def restart(self) -> None:
        """Be another process of the agent: set `service`."""

    def until(self, what: str, happened: Callable[[], object], *parts: PartOrder, timeout_s: float = LIMIT_S) -> None:
        """Tick, and repeat the server's orders, until something has happened."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.service.tick()
            if parts:
                self.service.apply_orders(AgentOrders(parts=parts))
            if happened():
                return
            assert time.monotonic() < deadline_s, f"{what}: {self.states}"
            time.sleep(0.05)

    def tick_for(self, seconds: float) -> None:
        """Tick for a while."""
        for _ in range(round(seconds / 0.05)):
            self.service.tick()
            time.sleep(0.05)

    def until_cards_are_named(self, job: str = "a", attempt: int = 1) -> None:
        """Wait until each rank of a part runs `LOOP`, on the cards that the agent has given it."""
        part = self.service.machine.parts[job, attempt]
        for rank in part.workers:
            cards = self.service.state_folder.worker_folder(part, rank) / "cards"
            self.until("a rank runs", lambda cards=cards: cards.exists() and cards.read_text())
            assert cards.read_text().strip() == ",".join(part.workers[rank].devices)

    @property
    def states(self) -> dict[str, str]:
        """State and detail of each part."""
        return {f"{part.job}/{part.attempt}": f"{part.state} {part.detail}" for part in self.service.observed_parts()}

    def state(self, job: str = "a", attempt: int = 1) -> str:
        """Return the state of a part, "" if there is none."""
        found = [part.state for part in self.service.observed_parts() if (part.job, part.attempt) == (job, attempt)]
        return found[0] if found else ""

    def detail(self, job: str = "a", attempt: int = 1) -> str:
        """Return what a part says of itself, "" if there is none."""
        found = [part.detail for part in self.service.observed_parts() if (part.job, part.attempt) == (job, attempt)]
        return found[0] if found else ""
