"""`BookingRecord`: a booking as the decision centre knows it, and the table of its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isthmus.core.errors import IllegalTransitionError
from isthmus.wan.control.wan_topology import PathRequest, TransferRequest
from isthmus.wan.controller.controller_messages import BookingKey
from isthmus.wan.controller.path_plan import PathPlan
from isthmus.wan.controller.pipe_bookings import PipeSpan

BookingState = Literal["preparing", "held", "committing", "booked", "broken", "ended"]

TRANSITIONS: frozenset[tuple[BookingState, BookingState]] = frozenset({
    ("preparing", "preparing"),  # a domain refused: planned again
    ("preparing", "held"), ("preparing", "committing"), ("preparing", "broken"), ("preparing", "ended"),
    ("held", "committing"), ("held", "preparing"), ("held", "broken"), ("held", "ended"),
    ("committing", "booked"), ("committing", "preparing"), ("committing", "broken"), ("committing", "ended"),
    ("booked", "preparing"),  # a pipe failed, or a domain lost what it held
    ("booked", "broken"), ("booked", "ended"),
    ("broken", "preparing"), ("broken", "ended"),
})  # fmt: skip
"""Every transition. `broken` follows only where the path was booked before; a new request ends instead."""


@dataclass(slots=True, kw_only=True)
class BookingRecord:
    """One booking. `waits_for` are the domains whose answer is missing."""

    request: PathRequest | TransferRequest
    holds: bool
    state: BookingState = "preparing"
    version: int = 0
    plan: PathPlan | None = None
    by_domain: dict[str, tuple[PipeSpan, ...]] = field(default_factory=dict)
    waits_for: set[str] = field(default_factory=set)
    avoid: set[str] = field(default_factory=set)
    num_plans: int = 0
    """Plans since the request, or since the failure that it moves away from."""
    was_booked: bool = False
    gives_up_s: float = 0.0
    """When a missing answer, or a missing confirmation, ends the attempt."""
    sent_kbits: float = 0.0
    """Of a transfer: what its earlier plans have sent."""
    wakes_s: float = 0.0

    @property
    def key(self) -> BookingKey:
        """Return the name and present version."""
        return BookingKey(self.request.name, self.version)

    @property
    def ends_s(self) -> float:
        """Return when the time of the request is over."""
        return self.request.end_s if isinstance(self.request, PathRequest) else self.request.deadline_s

    @property
    def plan_ends_s(self) -> float:
        """Return when its last span is over; without a plan, when the time of the request is."""
        return max((end_s for _, end_s, _ in self.plan.rates_kbps), default=0.0) if self.plan else self.ends_s

    def move_to(self, state: BookingState) -> None:
        """Change the state; raise `IllegalTransitionError` for a change that the table lacks."""
        if (self.state, state) not in TRANSITIONS:
            raise IllegalTransitionError(
                f"booking {self.request.name}, version {self.version}: {self.state} to {state}"
            )
        self.state = state
