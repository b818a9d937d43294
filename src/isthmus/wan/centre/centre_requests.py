"""What clients ask of a decision centre, and its answers: one line of JSON each, which the log keeps as it came."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat
from isthmus.wan.centre.domain_requests import DomainMessage, PortRequest
from isthmus.wan.control.wan_topology import PathRequest, TransferRequest
from isthmus.wan.controller.controller_messages import AskPath, CentreEvent, ConfirmPath, ReleasePath, RenewHold

MAX_LINE_BYTES = 2**16


class AskMessage(FrozenModel):
    """Hold a path for bandwidth, or for a transfer."""

    kind: Literal["ask"] = "ask"
    request: PathRequest | TransferRequest

    def event(self) -> CentreEvent:
        """Return what the centre handles."""
        return AskPath(request=self.request, holds=True)

    @property
    def name(self) -> str:
        """The name of the path."""
        return self.request.name


class NameMessage(FrozenModel):
    """Confirm, renew or release a path."""

    kind: Literal["confirm", "renew", "release"]
    name: Name

    def event(self) -> CentreEvent:
        """Return what the centre handles."""
        if self.kind == "confirm":
            return ConfirmPath(self.name)
        return RenewHold(self.name) if self.kind == "renew" else ReleasePath(self.name)


class LookMessage(FrozenModel):
    """Ask for the state of a path; changes nothing."""

    kind: Literal["look"] = "look"
    name: Name


class TickMessage(FrozenModel):
    """Time has passed; in the log only."""

    kind: Literal["tick"] = "tick"


class LoggedEvent(FrozenModel):
    """An event with its time, as the log keeps it."""

    now_s: NonNegativeFloat
    message: Annotated[AskMessage | NameMessage | DomainMessage | TickMessage, Field(discriminator="kind")]


class ClientRequest(PortRequest):
    """A line of a client."""

    message: Annotated[AskMessage | NameMessage | LookMessage, Field(discriminator="kind")]


class PathState(FrozenModel):
    """The answer: what became of a path. `unknown`: there is none of this name."""

    name: Name
    state: Literal["preparing", "held", "committing", "booked", "moved", "broken", "refused", "released", "unknown"]
    pipes: tuple[Name, ...] = ()
    gbps: float = 0.0
    delay_ms: float = 0.0
    reason: str = ""


CLIENT_REQUEST: TypeAdapter[ClientRequest] = TypeAdapter(ClientRequest)
