"""`PeerChannel`: texts and files between ranks over the run's transport, of bounded size and verified.

A broken connection is the transport's task: it reconnects and sends again what was not acknowledged. A lost peer
fails every call with `PeerError`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from isthmus.comm.transport.transport import Arrival, Transport
from isthmus.core.errors import ProtocolError

CHUNK_BYTES = 1 << 20
_WINDOW = 16
"""Chunks under way at once where the link is not shared with training."""

_FIRST_TAG = 1 << 41
"""First tag of a channel, above those of the process group and of snapshots."""

_LENGTH = struct.Struct("<q")


class PeerChannel:
    """Messages of this rank; a `topic` is a small number, and messages of one topic between two ranks keep their order.

    `sleep` and `clock` are in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport, self._chunk_bytes, self._clock, self._sleep = transport, chunk_bytes, clock, sleep

    def send_text(self, peer: int, topic: int, text: bytes) -> None:
        """Send a text; return once the peer has it."""
        length = _LENGTH.pack(len(text))
        self._transport.send(peer, _FIRST_TAG + topic, "length", memoryview(length)).result()
        self.send_chunks(peer, topic, (memoryview(text),))

    def receive_text(self, peer: int, topic: int, max_bytes: int) -> bytes:
        """Return the next text of a peer; raise `ProtocolError` if it announces more than `max_bytes`."""
        head = bytearray(_LENGTH.size)
        self._transport.receive(peer, _FIRST_TAG + topic, "length", memoryview(head)).result()
        (length,) = _LENGTH.unpack(head)
        if not 0 <= length <= max_bytes:
            raise ProtocolError(f"rank {peer} announces a text of {length} bytes, {max_bytes} at most")
        text = bytearray(length)
        self.receive_chunks(peer, topic, memoryview(text))
        return bytes(text)

    def send_chunks(self, peer: int, topic: int, parts: Iterable[memoryview], link_share: float = 1.0) -> None:
        """Send parts in chunks; each part must stay unchanged. `link_share` is the share of time the link is used."""
        under_way: deque[Future[None]] = deque()
        for part in parts:
            for begin in range(0, len(part), self._chunk_bytes):
                start_s = self._clock()
                chunk = part[begin : begin + self._chunk_bytes]
                under_way.append(self._transport.send(peer, _FIRST_TAG + topic, "chunk", chunk))
                if link_share < 1:
                    under_way.popleft().result()
                    self._sleep((self._clock() - start_s) * (1 / link_share - 1))
                elif len(under_way) >= _WINDOW:
                    under_way.popleft().result()
        for future in under_way:
            future.result()

    def receive_chunks(self, peer: int, topic: int, into: memoryview) -> None:
        """Fill `into` with what the peer sends as one part."""
        for future in self.post_chunks(peer, topic, into):
            future.result()

    def post_chunks(self, peer: int, topic: int, into: memoryview) -> list[Future[Arrival]]:
        """Let `into` be filled with what the peer sends as one part; it is there once all futures are done."""
        return [
            self._transport.receive(peer, _FIRST_TAG + topic, "chunk", into[begin : begin + self._chunk_bytes])
            for begin in range(0, len(into), self._chunk_bytes)
        ]

    def send_file(self, peer: int, topic: int, file: Path, num_bytes: int, link_share: float = 1.0) -> None:
        """Send the first `num_bytes` of a file; a file that has become shorter arrives with zeros, hence damaged."""
        with file.open("rb") as stream:

            def chunks() -> Iterable[memoryview]:
                for begin in range(0, num_bytes, self._chunk_bytes):
                    size = min(self._chunk_bytes, num_bytes - begin)
                    yield memoryview(stream.read(size).ljust(size, b"\0"))

            self.send_chunks(peer, topic, chunks(), link_share)

    def receive_file(self, peer: int, topic: int, file: Path, num_bytes: int, sha256: str) -> str | None:
        """Write the file that the peer sends and flush it; return why it is not kept, None if it is.

        What cannot be written is received all the same, so that the peer gets an answer.
        """
        digest, failure = hashlib.sha256(), None
        buffer = memoryview(bytearray(min(self._chunk_bytes, num_bytes)))
        descriptor = -1
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            failure = f"cannot write {file}: {error.strerror}"
        try:
            for begin in range(0, num_bytes, self._chunk_bytes):
                chunk = buffer[: min(self._chunk_bytes, num_bytes - begin)]
                self.receive_chunks(peer, topic, chunk)
                digest.update(chunk)
                failure = failure or _write(descriptor, chunk, file)
            if failure is None and digest.hexdigest() != sha256:
                failure = f"{file.name} is damaged: its checksum differs from that of rank {peer}"
            return failure or _flush(descriptor, file)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _write(descriptor: int, data: memoryview, file: Path) -> str | None:
    """Write all of `data`; return the reason if that fails."""
    try:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError as error:
        return f"cannot write {file}: {error.strerror}"
    return None


def _flush(descriptor: int, file: Path) -> str | None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        return f"cannot write {file}: {error.strerror}"
    return None
