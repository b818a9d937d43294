"""Wire format between two workers: greetings as one line of JSON, then frames of header, label and payload.

Header (network byte order): kind (1 byte), label length (1), message number (8), tag (8, signed), send time
(8, double: epoch seconds on the sender's clock), time of writing this frame (8, the same), message bytes (8), offset
of the payload in the message (8), payload bytes (8). The label is UTF-8.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import PeerError, ProtocolError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s

FORMAT_VERSION = 4
DATA, HEARTBEAT, CLOSE, ACK = 1, 2, 3, 4
"""Frame kinds. `DATA` carries a fragment of a message; `CLOSE` the reason, empty for an orderly close;
`ACK` acknowledges the message of its number. `ACK` and `HEARTBEAT` have no payload."""

MAX_REASON_BYTES = 4096
MAX_MESSAGE_BYTES = 2**40
"""Upper bound on a message; a header above it is malformed."""

_HEADER = struct.Struct("!BBQqddQQQ")
_MAX_LINE_BYTES = 4096
_CHUNK_BYTES = 2**20
_MAX_PAYLOAD_BYTES = {DATA: MAX_MESSAGE_BYTES, HEARTBEAT: 0, CLOSE: MAX_REASON_BYTES, ACK: 0}


@dataclass(frozen=True)
class FrameHeader:
    """A frame header; the payload is `payload_bytes` bytes at `offset` of message `number`, `message_bytes` long."""

    kind: int
    number: int = 0
    tag: int = 0
    sent_s: float = 0.0
    label: str = ""
    message_bytes: int = 0
    offset: int = 0
    payload_bytes: int = 0
    # When a connection began to write the frame.
    left_s: float = 0.0


def pack_header(header: FrameHeader) -> bytes:
    """Return header and label as bytes."""
    label = header.label.encode()
    fixed = _HEADER.pack(
        header.kind,
        len(label),
        header.number,
        header.tag,
        header.sent_s,
        header.left_s,
        header.message_bytes,
        header.offset,
        header.payload_bytes,
    )
    return fixed + label


def read_header(sock: socket.socket, tolerate_silence: Callable[[], bool] = lambda: False) -> FrameHeader:
    """Receive one header and its label.

    Raises `ConnectionResetError` if the peer closed, `TimeoutError` on silence unless `tolerate_silence()`,
    `ValueError` for a malformed header.
    """
    fixed = bytearray(_HEADER.size)
    receive_exactly(sock, memoryview(fixed), tolerate_silence)
    kind, label_bytes, number, tag, sent_s, left_s, num_bytes, offset, size = _HEADER.unpack(fixed)
    if num_bytes > _MAX_PAYLOAD_BYTES.get(kind, -1) or offset + size > num_bytes:
        raise ValueError(f"kind {kind} with {size} of {num_bytes} bytes")
    if not (math.isfinite(sent_s) and math.isfinite(left_s)):
        raise ValueError(f"message {number} has the times {sent_s} and {left_s}")
    label = bytearray(label_bytes)
    receive_exactly(sock, memoryview(label), tolerate_silence)
    return FrameHeader(kind, number, tag, sent_s, label.decode(), num_bytes, offset, size, left_s)


def receive_exactly(
    sock: socket.socket, buffer: memoryview, tolerate_silence: Callable[[], bool] = lambda: False
) -> None:
    """Fill `buffer`. The socket's timeout bounds each read; it is ignored while `tolerate_silence()`."""
    while len(buffer):
        try:
            count = sock.recv_into(buffer[:_CHUNK_BYTES])
        except TimeoutError:
            if not tolerate_silence():
                raise
            continue
        if count == 0:
            raise ConnectionResetError("closed its connection")
        buffer = buffer[count:]


def send_all(sock: socket.socket, data: memoryview, is_stopped: Callable[[], bool]) -> None:
    """Send all of `data`; ignore timeouts of a peer that is busy, until `is_stopped()`."""
    while len(data):
        try:
            data = data[sock.send(data[:_CHUNK_BYTES]) :]
        except TimeoutError:
            if is_stopped():
                raise


def send_json_line(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one line of JSON."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def receive_json_line(sock: socket.socket) -> dict[str, Any]:
    """Receive exactly one line, a JSON object; raise `ProtocolError` for anything else."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            raise ConnectionResetError("closed its connection while greeting")
        line += byte
        if len(line) > _MAX_LINE_BYTES:
            raise ProtocolError("malformed greeting: the other side is not an Isthmus worker")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed greeting: the other side is not an Isthmus worker") from error
    if not isinstance(message, dict):
        raise ProtocolError("malformed greeting: the other side is not an Isthmus worker")
    return message


@dataclass(frozen=True)
class Greeting:
    """The identity that a rank sends when it connects.

    The ranks of an attempt reconnect as the next `incarnation` when one of them restarts. Only ranks of
    the same incarnation talk, so messages sent before a loss are never matched after it.
    """

    run: str
    attempt: int
    rank: int
    size: int
    """Number of ranks in the run."""
    incarnation: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the greeting as sent, with format version and byte order."""
        return {"isthmus": FORMAT_VERSION, "byteorder": sys.byteorder, **self.__dict__}


def refusal_reason(mine: Greeting, theirs: dict[str, Any]) -> str:
    """Return why `mine` rejects the greeting `theirs`; empty if it accepts."""
    for key, value in mine.as_dict().items():
        if key not in ("rank", "incarnation") and theirs.get(key) != value:
            return f"{key} is {theirs.get(key)!r} there and {value!r} here"
    if type(theirs.get("incarnation")) is not int:
        return f"incarnation {theirs.get('incarnation')!r} is not an integer"
    rank = theirs.get("rank")
    if type(rank) is not int or not mine.rank < rank < mine.size:
        return f"rank {rank!r} must be above {mine.rank} and below {mine.size}"
    return ""


_NUM_PINGS = 4
_TIMES = struct.Struct("!dd")


def send_greeting(
    sock: socket.socket, mine: Greeting, clock: Callable[[], float] = steady_time_s, number: int = 0
) -> float:
    """Greet the dialled peer for connection number `number`; return its clock minus ours in seconds.

    The offset comes from the shortest of a few round trips, assumed symmetric (D. Mills, RFC 5905,
    section 8). Raises `PeerError` or `ProtocolError` if the peer rejects the greeting, `UnavailableError`
    if a retry may succeed, `RestartError` if the peer has a later incarnation.
    """
    # Step 1: greet, and raise if the peer rejects us.
    send_json_line(sock, mine.as_dict() | {"lane": number})
    answer = receive_json_line(sock)
    why = answer.get("refused")
    if why:
        newer = answer.get("incarnation")
        if type(newer) is int and newer > mine.incarnation:
            raise RestartError(f"the worker dialled by rank {mine.rank} has restarted", incarnation=newer)
        error = ProtocolError if str(why).startswith("isthmus ") else PeerError
        kind = UnavailableError if answer.get("later") else error
        raise kind(f"the worker dialled by rank {mine.rank} refused: {why}")
    # Step 2: estimate the clock offset, and tell the peer.
    best = (float("inf"), 0.0)
    for _ in range(_NUM_PINGS):
        start_s = clock()
        sock.sendall(_TIMES.pack(start_s, 0.0))
        received_s, answered_s = _read_times(sock)
        end_s = clock()
        round_trip_s = (end_s - start_s) - (answered_s - received_s)
        best = min(best, (round_trip_s, ((received_s - start_s) + (answered_s - end_s)) / 2))
    sock.sendall(_TIMES.pack(best[1], 0.0))
    return best[1]


def answer_greeting(
    sock: socket.socket,
    mine: Greeting,
    clock: Callable[[], float] = steady_time_s,
    claim: Callable[[int, int], bool] = lambda _rank, _number: True,
) -> tuple[int, int, float]:
    """Answer the greeting of a dialler; return its rank, connection number, and clock minus ours in seconds.

    `claim(rank, number)` returns whether that connection is still expected. Raises `ProtocolError` for a
    rejected greeting and `RestartError` for a later incarnation, which is rejected as well.
    """
    # Step 1: read the greeting and decide; `later` means that a retry may succeed.
    theirs = receive_json_line(sock)
    why, number = refusal_reason(mine, theirs), theirs.get("lane", 0)
    if type(number) is not int:
        why, number = why or f"lane must be an integer, got {number!r}", 0
    newer = not why and theirs["incarnation"] > mine.incarnation
    if not why and theirs["incarnation"] != mine.incarnation:
        why, later = f"incarnation is {theirs['incarnation']} there and {mine.incarnation} here", newer
    else:
        later = not why and not claim(theirs["rank"], number)
        why = f"rank {theirs['rank']} is already connected" if later else why
    # Step 2: reply.
    send_json_line(sock, {"refused": why, "later": later, "incarnation": mine.incarnation})
    if newer:
        raise RestartError(f"rank {theirs['rank']} has restarted", incarnation=theirs["incarnation"])
    if why:
        raise ProtocolError(f"rejected a greeting: {why}")
    # Step 3: answer the pings and read the clock offset that the dialler computed.
    for _ in range(_NUM_PINGS):
        _read_times(sock)
        received_s = clock()
        sock.sendall(_TIMES.pack(received_s, clock()))
    offset_s, _ = _read_times(sock)
    return int(theirs["rank"]), number, -offset_s


def _read_times(sock: socket.socket) -> tuple[float, float]:
    data = bytearray(_TIMES.size)
    receive_exactly(sock, memoryview(data))
    first_s, second_s = _TIMES.unpack(data)
    return first_s, second_s
