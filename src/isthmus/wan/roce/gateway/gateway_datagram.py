"""What two gateways exchange: datagrams with a header of 12 bytes, big-endian; data has 8 more.

A header is kind, version (1), flags (1: the sender acknowledges near; 2: `is_shared`), a zero byte, the sender's epoch,
the receiver's epoch as the sender knows it (0 for not at all). Numbers of frames count from 0 in each flow; the wire
carries their low 32 bits.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from isthmus.core.errors import ProtocolError

_HEADER = struct.Struct("!BBBxII")
FRAME_PLACE = struct.Struct("!II")
"""Flow and low number of a frame."""

_FEEDBACK = struct.Struct("!IIIIIIIIH")
_RANGE = struct.Struct("!IH")
_FAILURE = struct.Struct("!IBB")
_FLOW = struct.Struct("!I")
_VERSION = 1
DATA_BYTES = _HEADER.size + FRAME_PLACE.size
HEAD_BYTES = _HEADER.size
MAX_BODY_BYTES = 1200
"""Longest list of entries in a datagram, so that it fits any path."""

MAX_RANGES = 64
NUMBER_SPAN = 2**32
NO_QUEUE_PAIR = 2**32 - 1


class DatagramKind(enum.IntEnum):
    """What a datagram carries."""

    HELLO = 0
    DATA = 1
    FEEDBACK = 2
    FAILED = 3
    PROBE = 4
    """Ask for feedback on flows."""
    FORGET = 5
    """Flows have ended at their sender, with all frames done."""


class FlowFailure(enum.IntEnum):
    """Why a queue pair has failed."""

    LINK = 0
    """The far gateway has not answered."""
    NIC = 1
    """The far NIC has not acknowledged."""
    REFUSED = 2
    """The far NIC has refused a request that was acknowledged here."""
    GAP = 3
    """Frames that were acknowledged are lost, since a gateway has restarted."""
    MEMORY = 4
    """No room at the far gateway."""
    PEER = 5
    """The other direction of the queue pair has failed."""


class DataBody(NamedTuple):
    """A frame of a flow; `low_number` is the low 32 bits of its number."""

    flow: int
    low_number: int
    frame: bytes
    is_shared: bool = False
    """Whether the sender sees several queue pairs at the frame's UDP port and addresses."""


class FeedbackEntry(NamedTuple):
    """What a receiver says of a flow."""

    flow: int
    low_floor: int
    """All frames below it have come."""
    low_done: int
    """All frames below it were handed to the NIC, and acknowledged by it where they are requests."""
    kilobytes_per_s: int
    """Rate at which frames went to the NIC."""
    held_bytes: int
    """Bytes that wait for the NIC."""
    queue_pair: int
    """The requester's queue pair where it is known, else `NO_QUEUE_PAIR`."""
    low_latest: int
    """The frame that came last."""
    age_us: int
    """How long ago it came."""
    missing: tuple[tuple[int, int], ...] = ()
    """First low number and count of ranges that have not come, though later frames have."""


class FailureEntry(NamedTuple):
    """A flow has failed; `is_mine` if the datagram's sender is also the flow's."""

    flow: int
    is_mine: bool
    reason: FlowFailure


class Origin(NamedTuple):
    """What every datagram says of its sender."""

    from_epoch: int
    """Number of the sender's table: another one after a restart."""
    to_epoch: int
    """That of the receiver as far as the sender knows, else 0."""
    acknowledges: bool
    """Whether the sender acknowledges SENDs and WRITEs near their NIC."""


class GatewayDatagram(NamedTuple):
    """A datagram that was read; `body` has one item for `DATA`, none for `HELLO`."""

    kind: DatagramKind
    origin: Origin
    body: Sequence[DataBody | FeedbackEntry | FailureEntry | int] = ()


def build_data(origin: Origin, flow: int, number: int, frame: bytes, *, is_shared: bool = False) -> bytes:
    """Return a datagram with a frame; `is_shared` as in `DataBody`."""
    return data_head(origin, is_shared=is_shared) + FRAME_PLACE.pack(flow, number % NUMBER_SPAN) + frame


def data_head(origin: Origin, *, is_shared: bool) -> bytes:
    """Return what all datagrams with frames begin with; flow, number and frame follow."""
    flags = origin.acknowledges | is_shared << 1
    return _HEADER.pack(DatagramKind.DATA, _VERSION, flags, origin.from_epoch, origin.to_epoch)


def build_list(kind: DatagramKind, origin: Origin, entries: Sequence[bytes]) -> list[bytes]:
    """Return datagrams with all entries, at least one."""
    header = _HEADER.pack(kind, _VERSION, origin.acknowledges, origin.from_epoch, origin.to_epoch)
    found, size = [list[bytes]()], 0
    for entry in entries:
        if size + len(entry) > MAX_BODY_BYTES:
            found.append([])
            size = 0
        found[-1].append(entry)
        size += len(entry)
    return [header + b"".join(part) for part in found]


def pack_feedback(entry: FeedbackEntry) -> bytes:
    """Return the bytes of an entry."""
    ranges = entry.missing[:MAX_RANGES]
    head = _FEEDBACK.pack(
        entry.flow, entry.low_floor, entry.low_done, min(entry.kilobytes_per_s, NUMBER_SPAN - 1),
        min(entry.held_bytes, NUMBER_SPAN - 1), entry.queue_pair, entry.low_latest,
        min(entry.age_us, NUMBER_SPAN - 1), len(ranges),
    )  # fmt: skip
    return head + b"".join(_RANGE.pack(first, count) for first, count in ranges)


def pack_failure(entry: FailureEntry) -> bytes:
    """Return the bytes of an entry."""
    return _FAILURE.pack(entry.flow, entry.is_mine, entry.reason)


def pack_flow(flow: int) -> bytes:
    """Return the bytes of a flow's number."""
    return _FLOW.pack(flow)


def parse_datagram(data: bytes) -> GatewayDatagram:
    """Return what a datagram says; raise `ProtocolError` for one that no gateway builds."""
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a datagram of {len(data)} bytes between gateways")
    number_of_kind, version, flags, from_epoch, to_epoch = _HEADER.unpack_from(data)
    if version != _VERSION or number_of_kind > DatagramKind.FORGET or flags > 3 or data[3] or not from_epoch:
        raise ProtocolError(f"a datagram between gateways of kind {number_of_kind}, version {version}")
    origin = Origin(from_epoch, to_epoch, flags & 1 == 1)
    if number_of_kind == DatagramKind.DATA:
        if len(data) < DATA_BYTES:
            raise ProtocolError("a datagram with a frame is cut short")
        flow, low = FRAME_PLACE.unpack_from(data, _HEADER.size)
        return GatewayDatagram(DatagramKind.DATA, origin, (DataBody(flow, low, data[DATA_BYTES:], flags > 1),))
    kind = DatagramKind(number_of_kind)
    if len(data) > _HEADER.size + MAX_BODY_BYTES:
        raise ProtocolError(f"a datagram of {len(data)} bytes without a frame")
    try:
        body = _PARSERS[kind](data, _HEADER.size)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a datagram {kind.name} is malformed: {error}") from None
    return GatewayDatagram(kind, origin, body)


def full_number(low: int, near: int) -> int:
    """Return the number whose low 32 bits are `low` and that is nearest to `near`; negative if that is before 0."""
    half = NUMBER_SPAN // 2
    return near + (low - near + half) % NUMBER_SPAN - half


def _parse_nothing(data: bytes, place: int) -> list[int]:
    if len(data) != place:
        raise ValueError("it has a body")
    return []


def _parse_feedback(data: bytes, place: int) -> list[FeedbackEntry]:
    found: list[FeedbackEntry] = []
    while place < len(data):
        flow, floor, done, rate, held, queue_pair, latest, age, num_ranges = _FEEDBACK.unpack_from(data, place)
        place += _FEEDBACK.size
        if num_ranges > MAX_RANGES:
            raise ValueError(f"{num_ranges} ranges")
        ranges: tuple[tuple[int, int], ...] = ()
        if num_ranges:
            ranges = tuple(_RANGE.unpack_from(data, place + _RANGE.size * one) for one in range(num_ranges))
            place += _RANGE.size * num_ranges
        found.append(FeedbackEntry(flow, floor, done, rate, held, queue_pair, latest, age, ranges))
    return found


def _parse_failures(data: bytes, place: int) -> list[FailureEntry]:
    found: list[FailureEntry] = []
    for at in range(place, len(data), _FAILURE.size):
        flow, is_mine, reason = _FAILURE.unpack_from(data, at)
        if is_mine > 1:
            raise ValueError(f"side {is_mine}")
        found.append(FailureEntry(flow, bool(is_mine), FlowFailure(reason)))
    return found


def _parse_flows(data: bytes, place: int) -> list[int]:
    return [_FLOW.unpack_from(data, at)[0] for at in range(place, len(data), _FLOW.size)]


_PARSERS: Mapping[DatagramKind, Callable[[bytes, int], Sequence[FeedbackEntry | FailureEntry | int]]] = {
    DatagramKind.HELLO: _parse_nothing,
    DatagramKind.FEEDBACK: _parse_feedback,
    DatagramKind.FAILED: _parse_failures,
    DatagramKind.PROBE: _parse_flows,
    DatagramKind.FORGET: _parse_flows,
}
