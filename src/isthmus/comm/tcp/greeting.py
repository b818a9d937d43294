"""Greetings: the first exchange on a connection, and its form in the clear, for ranks on one machine.

A greeting is one line of JSON, so is its answer; then a few round trips compare the clocks. `sealed_greeting` is the
form with keys.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.comm.channel.channel import Channel, PlainChannel
from isthmus.comm.tcp.wire_format import FORMAT_VERSION
from isthmus.core.errors import PeerError, ProtocolError, RestartError, UnavailableError
from isthmus.core.process.steady_clock import steady_time_s

Claim = Callable[[int, int], bool]
"""(rank, number) -> whether that connection is still expected."""

_MAX_LINE_BYTES = 4096


def send_json_line(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one line of JSON."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def receive_json_line(sock: socket.socket, start: bytes = b"") -> dict[str, Any]:
    """Receive exactly one line after its `start`, a JSON object; raise `ProtocolError` for anything else."""
    line = bytearray(start)
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
    if type(rank) is not int or rank == mine.rank or not 0 <= rank < mine.size:
        return f"rank {rank!r} must be below {mine.size} and another than {mine.rank}"
    return ""


_NUM_PINGS = 4
_TIMES = struct.Struct("!dd")


def send_greeting(
    sock: socket.socket, mine: Greeting, clock: Callable[[], float] = steady_time_s, number: int = 0
) -> float:
    """Greet the dialled peer for connection number `number`; return its clock minus ours in seconds.

    Raises `PeerError` or `ProtocolError` if the peer rejects the greeting, `UnavailableError`
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
    # Step 2: estimate the clock offset, and send it to the peer.
    return measure_clock(PlainChannel(sock), clock)


def answer_greeting(
    sock: socket.socket,
    mine: Greeting,
    clock: Callable[[], float] = steady_time_s,
    claim: Claim = lambda _rank, _number: True,
    start: bytes = b"",
) -> tuple[int, int, float]:
    """Answer the greeting of a dialler; return its rank, connection number, and clock minus ours in seconds.

    `start` is what was read of the greeting. Raises `ProtocolError` for a rejected greeting, `UnavailableError` for
    one that may be repeated, and `RestartError` for a later incarnation, which is rejected as well.
    """
    # Step 1: read the greeting and decide; `later` means that a retry may succeed.
    theirs = receive_json_line(sock, start)
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
    if later:
        raise UnavailableError(f"rejected a greeting: {why}")
    if why:
        raise ProtocolError(f"rejected a greeting: {why}")
    # Step 3: answer the pings and read the clock offset that the dialler computed.
    return int(theirs["rank"]), number, answer_clock(PlainChannel(sock), clock)


def measure_clock(channel: Channel, clock: Callable[[], float]) -> float:
    """Return the peer's clock minus ours in seconds, and send it to the peer, which calls `answer_clock`.

    It comes from the shortest of a few round trips, assumed symmetric (D. Mills, RFC 5905, section 8).
    """
    best = (float("inf"), 0.0)
    for _ in range(_NUM_PINGS):
        start_s = clock()
        channel.write([_TIMES.pack(start_s, 0.0)])
        received_s, answered_s = _read_times(channel)
        end_s = clock()
        round_trip_s = (end_s - start_s) - (answered_s - received_s)
        best = min(best, (round_trip_s, ((received_s - start_s) + (answered_s - end_s)) / 2))
    channel.write([_TIMES.pack(best[1], 0.0)])
    return best[1]


def answer_clock(channel: Channel, clock: Callable[[], float]) -> float:
    """Answer the pings of `measure_clock`; return the dialler's clock minus ours in seconds."""
    for _ in range(_NUM_PINGS):
        _read_times(channel)
        received_s = clock()
        channel.write([_TIMES.pack(received_s, clock())])
    offset_s, _ = _read_times(channel)
    return -offset_s


def _read_times(channel: Channel) -> tuple[float, float]:
    data = bytearray(_TIMES.size)
    channel.read_into(memoryview(data))
    first_s, second_s = _TIMES.unpack(data)
    return first_s, second_s
