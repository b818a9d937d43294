"""Events of a tunnel, and the instructions that it answers with: plain data between `Tunnel` and its shell."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.wan.tunnel.incoming_bytes import Chunk
from isthmus.wan.tunnel.tunnel_frame import MAX_PAYLOAD_BYTES, TunnelFrame


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A worker asked for a connection to `target`, `host:port`; `stream` is `Tunnel.next_stream`."""

    stream: int
    target: str


@dataclass(frozen=True, slots=True)
class StreamConnected:
    """The connection that `Connect` asked for is open."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """The connection that `Connect` asked for cannot be opened."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamData:
    """Bytes that a worker sent."""

    stream: int
    data: Chunk


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The worker sends nothing more."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamTaken:
    """The worker took bytes that `Write` handed out."""

    stream: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The worker's connection broke."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class LegUp:
    """A leg is authenticated and takes a frame. `leg` is unique in the tunnel; a new leg of an index replaces one.

    All legs of a tunnel take payloads of the same `max_payload_bytes`.
    """

    leg: int
    index: int
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class LegReady:
    """A leg takes one more frame."""

    leg: int


@dataclass(frozen=True, slots=True)
class LegDown:
    """A leg broke; frames on it may or may not have arrived."""

    leg: int


@dataclass(frozen=True, slots=True)
class DialFailed:
    """`DialLeg` did not lead to a leg. `is_unknown`: the other proxy has lost the tunnel, so this one ends."""

    index: int
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A whole frame came on a leg."""

    leg: int
    frame: TunnelFrame


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Tunnel.next_tick_s`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the tunnel."""

    reason: str


TunnelEvent = (
    OpenStream
    | StreamConnected
    | StreamRefused
    | StreamData
    | StreamEnded
    | StreamTaken
    | StreamBroken
    | LegUp
    | LegReady
    | LegDown
    | DialFailed
    | FrameArrived
    | Tick
    | Stop
)


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a frame on a leg, which was ready and is not until `LegReady`."""

    leg: int
    frame: TunnelFrame


@dataclass(frozen=True, slots=True)
class DialLeg:
    """Dial the other proxy; answer with `LegUp` or `DialFailed`."""

    index: int


@dataclass(frozen=True, slots=True)
class CloseLeg:
    """Close a leg; no `LegDown` is expected."""

    leg: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to `target`, `host:port`, if the site allows it; answer with `StreamConnected` or `StreamRefused`."""

    stream: int
    target: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The far side has connected to the target."""

    stream: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The far side, or this one, has not connected; the stream is gone."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """Hand bytes to the worker, in this order; answer with `StreamTaken`."""

    stream: int
    data: Chunk


@dataclass(frozen=True, slots=True)
class EndWriting:
    """All bytes were handed out; end this direction after them."""

    stream: int


@dataclass(frozen=True, slots=True)
class SetReading:
    """Read the worker's connection, or leave its bytes in the kernel."""

    stream: int
    is_on: bool


@dataclass(frozen=True, slots=True)
class Break:
    """Reset the worker's connection; the stream is gone."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class TunnelEnded:
    """The tunnel is over; nothing follows."""

    reason: str


TunnelInstruction = (
    SendFrame
    | DialLeg
    | CloseLeg
    | Connect
    | Accepted
    | Refused
    | Write
    | EndWriting
    | SetReading
    | Break
    | TunnelEnded
)
