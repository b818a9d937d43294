"""`MessageLink`: messages over one connection between the rank that holds the ledger and a rank that decodes.

A message is a JSON object and bytes. With keys of the run both sides prove the key that their sites share (Noise, see
`comm.channel`) and everything is encrypted; without keys a connection stays on one machine.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from typing import Any

from isthmus.comm.channel.channel import MAX_PART_BYTES, Channel, PlainChannel
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.channel.receive_exactly import receive_exactly
from isthmus.comm.channel.sealed_channel import SealedChannel
from isthmus.core.errors import ProtocolError
from isthmus.noise import TAG_BYTES, NoiseHandshake

BEAT_S = 1.0
"""Seconds between two beats of a side that has nothing else to send."""
SILENCE_S = 4.0
"""Seconds without a byte after which a connection counts as cut."""
MAX_HEADER_BYTES = 4 << 20
MAX_CONTENT_BYTES = 16 << 20
_PROLOGUE = b"isthmus rollouts 1"
_SIZES = struct.Struct("!IQ")
_EPHEMERAL_BYTES = 32 + TAG_BYTES
_KEY_ID_BYTES = 16


class MessageLink:
    """One connection. Several threads may send; one receives.

    `sent_bytes` and `received_bytes` are the payload of the connection, handshake and authentication included: what a
    link counts.
    """

    def __init__(self, channel: Channel, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        self._channel, self._lock = channel, threading.Lock()
        channel.socket.settimeout(BEAT_S)
        self._clock = time.monotonic
        self._part_bytes = TAG_BYTES if isinstance(channel, SealedChannel) else 0
        self.sent_bytes, self.received_bytes = sent_bytes, received_bytes

    @classmethod
    def dialled(cls, sock: socket.socket, keys: LinkKeys | None, site: str) -> MessageLink:
        """Return the link over a connection that was opened to a rank of `site`; raises `ConnectionResetError`."""
        if keys is None:
            return cls(PlainChannel(sock))
        handshake = NoiseHandshake(keys.psk(site), _PROLOGUE)
        sock.sendall(keys.key_id(site) + handshake.write_first(b""))
        answer = bytearray(_EPHEMERAL_BYTES)
        receive_exactly(sock, memoryview(answer))
        handshake.read_second(bytes(answer))
        sends, receives = handshake.split()
        return cls(SealedChannel(sock, sends, receives), _KEY_ID_BYTES + _EPHEMERAL_BYTES, _EPHEMERAL_BYTES)

    @classmethod
    def accepted(cls, sock: socket.socket, keys: LinkKeys | None) -> MessageLink:
        """Return the link over a connection that was accepted; raises `ConnectionResetError` for one without a key."""
        if keys is None:
            return cls(PlainChannel(sock))
        greeting = bytearray(_KEY_ID_BYTES + _EPHEMERAL_BYTES)
        receive_exactly(sock, memoryview(greeting))
        site = keys.site_of_key(bytes(greeting[:_KEY_ID_BYTES]))
        if site is None or not keys.is_first_use(bytes(greeting[16:48])):
            raise ConnectionResetError("a caller without a key of the run")
        handshake = NoiseHandshake(keys.psk(site), _PROLOGUE)
        handshake.read_first(bytes(greeting[_KEY_ID_BYTES:]))
        sock.sendall(handshake.write_second(b""))
        receives, sends = handshake.split()
        return cls(SealedChannel(sock, sends, receives), _EPHEMERAL_BYTES, _KEY_ID_BYTES + _EPHEMERAL_BYTES)

    def send(self, header: dict[str, Any], content: bytes = b"") -> None:
        """Send a message; raises `OSError` if the connection is gone."""
        text = json.dumps(header).encode()
        with self._lock:
            self._write(_SIZES.pack(len(text), len(content)))
            for data in (text, content):
                view = memoryview(data)
                for start in range(0, len(data), MAX_PART_BYTES):
                    self._write(view[start : start + MAX_PART_BYTES])

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message.

        Raises `OSError` if the connection is gone, also by silence, and `ProtocolError` for no message of ours.
        """
        sizes = bytearray(_SIZES.size)
        self._read_part(memoryview(sizes))
        num_text, num_content = _SIZES.unpack(bytes(sizes))
        if not 2 <= num_text <= MAX_HEADER_BYTES or num_content > MAX_CONTENT_BYTES:
            raise ProtocolError(f"a message of {num_text} and {num_content} bytes")
        text, content = self._read(num_text), self._read(num_content)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise ProtocolError("a message is not a JSON object")
        return header, content

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        self._channel.shut_down()
        self._channel.close()

    def _write(self, part: bytes | memoryview) -> None:
        self._channel.write([part])
        self.sent_bytes += len(part) + self._part_bytes

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        for start in range(0, num_bytes, MAX_PART_BYTES):
            self._read_part(view[start : start + MAX_PART_BYTES])
        return bytes(data)

    def _read_part(self, into: memoryview) -> None:
        """Fill `into`; silence is tolerated for `SILENCE_S`."""
        start_s = self._clock()
        self._channel.read_into(into, lambda: self._clock() - start_s < SILENCE_S)
        self.received_bytes += len(into) + self._part_bytes
