"""`RayHold`: what is known of a hold on disk.

Beside the files of every `HoldFolder`, of which the couriers of its ranks carry the lease:

request.json   the request, as first asked for, and the number of the holder job that holds it
granted.json   the cards of each rank
released       when the hold ended, on the clock of which start of this machine; its id is used up
"""

from __future__ import annotations

import contextlib
import json

from isthmus.agent.adapters.hold_folder import HoldFolder
from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.process.boot_clock import boot_id, boot_time_s

END_MARGIN_S = 30.0
"""Beyond the lease: the longest that an answer of the courier is under way, and that processes take to end."""


class RayHold(HoldFolder):
    """The folder of a hold."""

    def release(self) -> None:
        """Use up the id; what runs in the hold ends."""
        if not self.is_released:
            write_atomically(self.path / "released", json.dumps({"boot": boot_id(), "at_s": boot_time_s()}))

    def renew(self, request: HoldRequest, holder: int) -> None:
        """Renew the lease; the first time also store the request, for the holder job of that number."""
        if not (self.path / "request.json").exists():
            ranks = [(rank.node_group, rank.num_cards) for rank in request.ranks]
            write_atomically(self.path / "request.json", json.dumps({"ranks": ranks, "holder": holder}))
        self.renew_lease(request.lease_s)

    def ranks(self) -> list[tuple[str, int]]:
        """Return node group and number of cards of each rank; none for an unknown hold."""
        with contextlib.suppress(OSError):
            return [(group, num) for group, num in json.loads((self.path / "request.json").read_bytes())["ranks"]]
        return []

    def holder(self) -> int:
        """Return the number of the holder job that holds it, 0 for an unknown hold."""
        with contextlib.suppress(OSError):
            return int(json.loads((self.path / "request.json").read_bytes())["holder"])
        return 0

    def grant(self, cards: tuple[tuple[str, ...], ...]) -> Hold:
        """Store the cards of each rank; return the granted hold."""
        write_atomically(self.path / "granted.json", json.dumps(cards))
        return Hold(id=self.id, state="granted", cards=cards)

    def granted(self) -> Hold | None:
        """Return the hold with its cards, None before it is granted."""
        with contextlib.suppress(FileNotFoundError):
            cards = json.loads((self.path / "granted.json").read_bytes())
            return Hold(id=self.id, state="granted", cards=tuple(tuple(rank) for rank in cards))
        return None

    def is_over(self) -> bool:
        """Return whether nothing of the hold can run: it was released longer ago than any worker can have seen it."""
        try:
            found = json.loads((self.path / "released").read_bytes())
        except (OSError, ValueError):
            return False
        if found["boot"] != boot_id():
            write_atomically(self.path / "released", json.dumps({"boot": boot_id(), "at_s": boot_time_s()}))
            return False
        return boot_time_s() > float(found["at_s"]) + self.lease()[1] + END_MARGIN_S


def rank_order(hold_id: str, bundle: int, ticket: str) -> dict[str, object]:
    """Return the order to the holder to start a rank."""
    return {"hold": hold_id, "bundle": bundle, "ticket": ticket}
