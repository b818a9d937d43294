"""`Leg`: one connection between two proxies, the seam below a tunnel; `check_leg` is its conformance kit."""

from __future__ import annotations

from typing import Protocol

from isthmus.wan.tunnel.tunnel_frame import TunnelFrame


class LegOwner(Protocol):
    """What a leg calls, on the event loop that it runs on."""

    def leg_ready(self) -> None:
        """The leg takes one more frame; called after each frame once most of it has left."""

    def leg_frame(self, frame: TunnelFrame) -> None:
        """A frame has come whole, exactly as it was sent."""

    def leg_broken(self, reason: str) -> None:
        """The leg broke, or the other side closed it or broke its rules; nothing follows."""


class Leg(Protocol):
    """A connection that carries frames both ways, authenticated and encrypted.

    A frame that arrives is the one that was sent. The leg may lose frames only by breaking; whether their order is
    kept, and whether one comes twice, does not matter to a tunnel.
    """

    max_payload_bytes: int
    """Longest payload of a frame that it takes; the same for all legs of a kind."""

    def start(self, owner: LegOwner) -> None:
        """Begin to call `owner`; a started leg is ready for one frame."""

    def send(self, frame: TunnelFrame) -> None:
        """Send a frame; call it once after `start` and after each `leg_ready`."""

    def close(self) -> None:
        """Close without a call of the owner; what was sent may not arrive."""
