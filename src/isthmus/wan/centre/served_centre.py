"""`ServedCentre`: a decision centre and the controllers of its own domains in one process, as one state machine.

Orders to these domains and their answers are carried out at once, so that an answer to a client follows from the events
and their times alone: the same events give the same state again. Orders to domains of other operators wait in
`take_orders`; their answers are events.
"""

from __future__ import annotations

from collections import deque

from isthmus.core.errors import NotFoundError
from isthmus.wan.control.wan_topology import WanTopology
from isthmus.wan.controller.booking_record import BookingRecord
from isthmus.wan.controller.controller_messages import CentreEvent, PathChanged, TimePassed, ToDomain
from isthmus.wan.controller.decision_centre import CentreTimes, DecisionCentre
from isthmus.wan.controller.domain_controller import DomainController


class ServedCentre:
    """Call `handle` with each event of a client, and with `TimePassed` at `next_timer_s`."""

    def __init__(
        self, topology: WanTopology, times: CentreTimes | None = None, remote: frozenset[str] = frozenset()
    ) -> None:
        """`remote` names the domains of other operators. Raise `NotFoundError` for one without pipes."""
        self.centre = DecisionCentre(topology, times)
        names = dict.fromkeys(pipe.domain for pipe in topology.pipes)
        if unknown := remote - names.keys():
            raise NotFoundError(
                f"the network has no domain {min(unknown)!r}", hint=f"available: {', '.join(sorted(names))}"
            )
        domains = [name for name in names if name not in remote]
        self.remote = remote
        self._orders: list[ToDomain] = []
        self.domains = {name: DomainController(self.centre.network, name, 1) for name in domains}

    def handle(self, event: CentreEvent, now_s: float) -> list[PathChanged]:
        """Apply an event with all that follows from it; return what clients learn, in order."""
        told: list[PathChanged] = []
        waiting = deque(self.centre.handle(event, now_s))
        while waiting:
            instruction = waiting.popleft()
            if isinstance(instruction, ToDomain) and instruction.domain not in self.domains:
                self._orders.append(instruction)
            elif isinstance(instruction, ToDomain):
                answer = self.domains[instruction.domain].handle(instruction.order, now_s)
                waiting += self.centre.handle(answer, now_s)
            else:
                told.append(instruction)
        return told

    def take_orders(self) -> list[ToDomain]:
        """Return the orders to domains of other operators since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def advance(self, now_s: float) -> list[PathChanged]:
        """Let time pass, once if anything is due; return what clients learn."""
        due_s = self.next_timer_s()
        return self.handle(TimePassed(), now_s) if due_s is not None and due_s <= now_s else []

    def next_timer_s(self) -> float | None:
        """Return when `TimePassed` is due; None if nothing waits."""
        return self.centre.next_timer_s()

    def record(self, name: str) -> BookingRecord | None:
        """Return the booking of a name, None if there is none."""
        return self.centre.records.get(name)
