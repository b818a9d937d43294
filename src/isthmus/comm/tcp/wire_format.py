"""The bytes between two workers: greetings as one line of JSON, then frames of a fixed head and a payload.

Head (network order): kind (1 byte), label length (1), number of the message (8), tag (8, signed), sent at
(8, seconds since the epoch on the sender's clock), bytes of the whole message (8), where in it the payload
begins (8) and how long that is (8); then the label in UTF-8, then the payload.
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
"""Kinds of frame. The payload of `DATA` is a piece of a message, that of `LEAVE` the reason, empty at an
orderly end; `RECEIVED` says that the message of its number is whole; like a heartbeat it has no payload."""

MAX_REASON_BYTES = 4096
MAX_MESSAGE_BYTES = 2**40
"""No tensor is larger: a head that says so was written by something else."""

_HEAD = struct.Struct("!BBQqdQQQ")
_MAX_LINE_BYTES = 4096
_CHUNK_BYTES = 2**20
_MAX_PAYLOAD_BYTES = {DATA: MAX_MESSAGE_BYTES, HEARTBEAT: 0, LEAVE: MAX_REASON_BYTES, RECEIVED: 0}


@dataclass(frozen=True)
class Head:
    """The head of one frame: of `size` bytes from `offset` on of message `number`, which has `num_bytes`."""

    kind: int
    number: int = 0
    tag: int = 0
    sent_s: float = 0.0
    label: str = ""
    num_bytes: int = 0
    offset: int = 0
    size: int = 0


def pack_head(head: Head) -> bytes:
    """Return head and label as bytes."""
    label = head.label.encode()
    fixed = _HEAD.pack(
        head.kind, len(label), head.number, head.tag, head.sent_s, head.num_bytes, head.offset, head.size
    )
    return fixed + label


def read_head(connection: socket.socket, patient: Callable[[], bool] = lambda: False) -> Head:
    """Read one head.

    Raises `ConnectionResetError` where the peer is gone, `TimeoutError` where it is silent and we are not
    `patient`, `ValueError` where what it sent is no head.
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
    """Fill `buffer`; the socket's time-out bounds each piece, not the whole, unless we are `patient()`."""
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
    """Send `data`; a peer that takes nothing may be computing: it is waited for until `stopped()`."""
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
    """Read one line of JSON and not a byte more; raise `ProtocolError` if it is none."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("closed its connection while greeting")
        line += byte
        if len(line) > _MAX_LINE_BYTES:
            raise ProtocolError("a worker was greeted by something that is no worker")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a worker was greeted by something that is no worker") from error
    if not isinstance(message, dict):
        raise ProtocolError("a worker was greeted by something that is no worker")
    return message


@dataclass(frozen=True)
class Greeting:
    """Who greets: `rank` of attempt `attempt` of run `run` with `size` ranks, at their meeting `incarnation`.

    Ranks of one attempt meet anew when one of them was started again; only those of one incarnation talk, so
    that nothing sent before a loss is ever taken for what is sent after it.
    """

    run: str
    attempt: int
    rank: int
    size: int
    incarnation: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the greeting as it is sent, with format version and byte order."""
        return {"isthmus": FORMAT_VERSION, "byteorder": sys.byteorder, **self.__dict__}


def refusal(mine: Greeting, theirs: dict[str, Any]) -> str:
    """Return why a greeting is not answered by `mine`, or nothing where it is."""
    for key, value in mine.as_dict().items():
        if key not in ("rank", "incarnation") and theirs.get(key) != value:
            return f"{key} is {theirs.get(key)!r} there and {value!r} here"
    if type(theirs.get("incarnation")) is not int:
        return f"incarnation {theirs.get('incarnation')!r} is no number"
    rank = theirs.get("rank")
    if type(rank) is not int or not mine.rank < rank < mine.size:
        return f"rank {rank!r} is none of the ranks above {mine.rank} and below {mine.size}"
    return ""


_PINGS = 4
_TIMES = struct.Struct("!dd")


def greet(
    connection: socket.socket, mine: Greeting, clock: Callable[[], float] = time.time, lane: int = 0
) -> float:
    """Greet as the one who dialled, for lane `lane` to the peer; return its clock minus mine in seconds.

    The offset is that of the shortest of a few round trips, half of each being taken for either way
    (D. Mills, RFC 5905, section 8). Raises `PeerError` or `ProtocolError` where the peer refuses,
    `UnavailableError` where it may not do so later, `RestartError` where it is of a later incarnation.
    """
    write_line(connection, mine.as_dict() | {"lane": lane})
    answer = read_line(connection)
    why = answer.get("refused")
    if why:
        newer = answer.get("incarnation")
        if type(newer) is int and newer > mine.incarnation:
            raise RestartError(f"the worker dialled by rank {mine.rank} has begun anew", incarnation=newer)
        error = ProtocolError if str(why).startswith("isthmus ") else PeerError
        kind = UnavailableError if answer.get("later") else error
        raise kind(f"the worker dialled by rank {mine.rank} refused: {why}")
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
    claim: Callable[[int, int], bool] = lambda _rank, _lane: True,
) -> tuple[int, int, float]:
    """Answer a greeting as the one who was dialled; return the peer's rank, its lane, its clock minus mine.

    `claim(rank, lane)` says whether that one is still awaited. Raises `ProtocolError` for whom is refused,
    `RestartError` for a rank of a later incarnation: it is refused too, until we are of that one.
    """
    theirs = read_line(connection)
    why, lane = refusal(mine, theirs), theirs.get("lane", 0)
    if type(lane) is not int:
        why, lane = why or f"lane {lane!r} is no number", 0
    newer = not why and theirs["incarnation"] > mine.incarnation
    if not why and theirs["incarnation"] != mine.incarnation:
        why, later = f"incarnation is {theirs['incarnation']} there and {mine.incarnation} here", newer
    else:
        later = not why and not claim(theirs["rank"], lane)
        why = f"rank {theirs['rank']} is here already" if later else why
    write_line(connection, {"refused": why, "later": later, "incarnation": mine.incarnation})
    if newer:
        raise RestartError(f"rank {theirs['rank']} has begun anew", incarnation=theirs["incarnation"])
    if why:
        raise ProtocolError(f"a greeting was refused: {why}")
    for _ in range(_PINGS):
        _read_times(connection)
        received_s = clock()
        connection.sendall(_TIMES.pack(received_s, clock()))
    offset_s, _ = _read_times(connection)
    return int(theirs["rank"]), lane, -offset_s


def _read_times(connection: socket.socket) -> tuple[float, float]:
    data = bytearray(_TIMES.size)
    read_into(connection, memoryview(data))
    first_s, second_s = _TIMES.unpack(data)
    return first_s, second_s
