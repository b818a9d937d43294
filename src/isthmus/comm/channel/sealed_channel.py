"""`SealedChannel`: a channel whose parts are AES-256-GCM records under the keys of its handshake."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from isthmus.comm.channel.channel import Part, SocketChannel, send_all
from isthmus.noise import TAG_BYTES, CipherState


class SealedChannel(SocketChannel):
    """A `Channel` with one record per part; the number of a record is its nonce, so none is repeated or reordered.

    One thread may write while another reads. A part is encrypted from the sender's memory into the buffer that is
    sent, and decrypted from the receive buffer into the receiver's memory.
    """

    tag_bytes = TAG_BYTES

    def __init__(self, sock: socket.socket, sending: CipherState, receiving: CipherState) -> None:
        super().__init__(sock)
        self._sending, self._receiving = sending, receiving
        self._out, self._in = memoryview(bytearray(0)), memoryview(bytearray(0))

    def write(self, parts: Sequence[Part], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send `parts`, each as a record; see `Channel`."""
        size = sum(map(len, parts)) + TAG_BYTES * len(parts)
        if len(self._out) < size:
            self._out = memoryview(bytearray(size))
        at = 0
        for part in parts:
            end = at + len(part) + TAG_BYTES
            self.seal_into(part, self._out[at:end])
            at = end
        send_all(self.socket, self._out[:size], is_stopped)

    def read_into(self, into: memoryview, tolerate_silence: Callable[[], bool] = lambda: False) -> None:
        """Fill `into` with the content of the next record; see `Channel`."""
        size = len(into) + TAG_BYTES
        if len(self._in) < size:
            self._in = memoryview(bytearray(size))
        record = self._in[:size]
        self.receive(record, tolerate_silence)
        self.open_into(record, into)

    def seal_into(self, part: Part, into: memoryview) -> None:
        """Encrypt `part`; see `RecordChannel`."""
        self._sending.encrypt_into(part, into)

    def open_into(self, record: memoryview, into: memoryview) -> None:
        """Decrypt `record`; see `RecordChannel`."""
        self._receiving.decrypt_into(record, into)
