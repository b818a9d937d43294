"""Wire format between two workers: greetings as one line of JSON, then frames of header, label and payload.

Header (network byte order): kind (1 byte), label length (1), message number (8), tag (8, signed), send time
(8, double: epoch seconds on the sender's clock), message bytes (8), offset of the payload in the message (8),
payload bytes (8). The label is UTF-8.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import PeerError, ProtocolError, RestartError, UnavailableError

FORMAT_VERSION = 3
DATA, HEARTBEAT, LEAVE, RECEIVED = 1, 2, 3, 4
"""Frame kinds. `DATA` carries a fragment of a message; `LEAVE` the reason, empty for an orderly close;
`RECEIVED` acknowledges the message of its number. `RECEIVED` and `HEARTBEAT` have no payload."""

MAX_REASON_BYTES = 4096
MAX_MESSAGE_BYTES = 2**40
"""Upper bound on a message; a header above it is malformed."""

_HEAD = struct.Struct("!BBQqdQQQ")
_MAX_LINE_BYTES = 4096
_CHUNK_BYTES = 2**20
_MAX_PAYLOAD_BYTES = {DATA: MAX_MESSAGE_BYTES, HEARTBEAT: 0, LEAVE: MAX_REASON_BYTES, RECEIVED: 0}


@dataclass(frozen=True)
class Head:
    """A frame header; the payload is `size` bytes at `offset` of message `number`, `num_bytes` long."""

    kind: int
    number: int = 0
    tag: int = 0
    sent_s: float = 0.0
    label: str = ""
    num_bytes: int = 0
    offset: int = 0
    size: int = 0


def pack_head(head: Head) -> bytes:
    """Return header and label as bytes."""
    label = head.label.encode()
    fixed = _HEAD.pack(
        head.kind, len(label), head.number, head.tag, head.sent_s, head.num_bytes, head.offset, head.size
    )
    return fixed + label


def read_head(connection: socket.socket, patient: Callable[[], bool] = lambda: False) -> Head:
    """Receive one header and its label.

    Raises `ConnectionResetError` if the peer closed, `TimeoutError` on silence unless `patient()`,
    `ValueError` for a malformed header.
    """
    fixed = bytearray(_HEAD.size)
    read_into(connection, memoryview(fixed), patient)
    kind, label_bytes, number, tag, sent_s, num_bytes, offset, size = _HEAD.unpack(fixed)
    if num_bytes > _MAX_PAYLOAD_BYTES.get(kind, -1) or offset + size > num_bytes:
        raise ValueError(f"kind {kind} with {size} of {num_bytes} bytes")
    label = bytearray(label_bytes)
    read_into(connection, memoryview(label), patient)
    return Head(kind, number, tag, sent_s, label.decode(), num_bytes, offset, size)


def read_into(
    connection: socket.socket, buffer: memoryview, patient: Callable[[], bool] = lambda: False
) -> None:
    """Fill `buffer`. The socket's timeout bounds each read; it is ignored while `patient()`."""
    while len(buffer):
        try:
            count = connection.recv_into(buffer[:_CHUNK_BYTES])
        except TimeoutError:
            if not patient():
                raise
            continue
        if count == 0:
            raise ConnectionResetError("closed its connection")
        buffer = buffer[count:]


def write(connection: socket.socket, data: memoryview, stopped: Callable[[], bool]) -> None:
    """Send all of `data`; ignore timeouts of a peer that is busy, until `stopped()`."""
    while len(data):
        try:
            data = data[connection.send(data[:_CHUNK_BYTES]) :]
        except TimeoutError:
            if stopped():
                raise


def write_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> dict[str, Any]:
    """Receive exactly one line, a JSON object; raise `ProtocolError` for anything else."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
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


def refusal(mine: Greeting, theirs: dict[str, Any]) -> str:
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


_PINGS = 4
_TIMES = struct.Struct("!dd")


def greet(
    connection: socket.socket, mine: Greeting, clock: Callable[[], float] = time.time, lane: int = 0
) -> float:
    """Greet the dialled peer for connection number `lane`; return its clock minus ours in seconds.

    The offset comes from the shortest of a few round trips, assumed symmetric (D. Mills, RFC 5905,
    section 8). Raises `PeerError` or `ProtocolError` if the peer rejects the greeting, `UnavailableError`
    if a retry may succeed, `RestartError` if the peer has a later incarnation.
    """
    # Step 1: greet, and raise if the peer rejects us.
    write_line(connection, mine.as_dict() | {"lane": lane})
    answer = read_line(connection)
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
    for _ in range(_PINGS):
        start_s = clock()
        connection.sendall(_TIMES.pack(start_s, 0.0))
        received_s, answered_s = _read_times(connection)
        end_s = clock()
        round_trip_s = (end_s - start_s) - (answered_s - received_s)
        best = min(best, (round_trip_s, ((received_s - start_s) + (answered_s - end_s)) / 2))
    connection.sendall(_TIMES.pack(best[1], 0.0))
    return best[1]


def answer(
    connection: socket.socket,
    mine: Greeting,
    clock: Callable[[], float] = time.time,
    claim: Callable[[int, int], bool] = lambda _rank, _number: True,
) -> tuple[int, int, float]:
    """Answer the greeting of a dialler; return its rank, connection number, and clock minus ours in seconds.

    `claim(rank, number)` returns whether that connection is still expected. Raises `ProtocolError` for a
    rejected greeting and `RestartError` for a later incarnation, which is rejected as well.
    """
    # Step 1: read the greeting and decide; `later` means that a retry may succeed.
    theirs = read_line(connection)
    why, number = refusal(mine, theirs), theirs.get("lane", 0)
    if type(number) is not int:
        why, number = why or f"lane must be an integer, got {number!r}", 0
    newer = not why and theirs["incarnation"] > mine.incarnation
    if not why and theirs["incarnation"] != mine.incarnation:
        why, later = f"incarnation is {theirs['incarnation']} there and {mine.incarnation} here", newer
    else:
        later = not why and not claim(theirs["rank"], number)
        why = f"rank {theirs['rank']} is already connected" if later else why
    # Step 2: reply.
    write_line(connection, {"refused": why, "later": later, "incarnation": mine.incarnation})
    if newer:
        raise RestartError(f"rank {theirs['rank']} has restarted", incarnation=theirs["incarnation"])
    if why:
        raise ProtocolError(f"rejected a greeting: {why}")
    # Step 3: answer the pings and read the clock offset that the dialler computed.
    for _ in range(_PINGS):
        _read_times(connection)
        received_s = clock()
        connection.sendall(_TIMES.pack(received_s, clock()))
    offset_s, _ = _read_times(connection)
    return int(theirs["rank"]), number, -offset_s


def _read_times(connection: socket.socket) -> tuple[float, float]:
    data = bytearray(_TIMES.size)
    read_into(connection, memoryview(data))
    first_s, second_s = _TIMES.unpack(data)
    return first_s, second_s
