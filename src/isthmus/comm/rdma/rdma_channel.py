"""`RdmaChannel`: a connection whose parts cross by RDMA, beside the TCP connection that has opened it.

The parts of a frame are one message. A short one is a SEND into a posted receive; a longer one is written (RDMA WRITE)
into the next block of the receiver's region, with its length as the immediate, which uses a posted receive too. Both
sides have as many receives and blocks, and a side sends only what the other has room for: the reader gives back what it
has read as credits, with its next SEND or, from half of all on, by one of its own, for which receives are kept apart.

Where the TCP channel has keys, parts are its records, numbered on from those of the greeting. TCP carries nothing more,
but it says at once that the peer's process has ended. A thread of the channel (the proxy) takes completions.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.comm.channel.channel import MAX_PART_BYTES, Part, RecordChannel
from isthmus.comm.rdma.verbs import Completion, PairRecord, VerbsDevice, VerbsPair

SLOT_BYTES, NUM_SLOTS = 4096, 32
"""Of a SEND, and how many messages a side may send before a credit."""
NUM_CREDIT_SLOTS = 4
"""Receives for credits alone. A credit gives back half of the slots or of the blocks, so no more are on the way."""
BLOCK_BYTES, NUM_BLOCKS = MAX_PART_BYTES + 4096, 4
"""Of a WRITE: a fragment with header and label."""

LINGER_S = 1.0
"""Longest time for which a channel that is shut down goes on to deliver what was written."""

_NUM_RECEIVES = NUM_SLOTS + NUM_CREDIT_SLOTS
_SENDS_AT = _NUM_RECEIVES * SLOT_BYTES
_OUT_AT = 2 * _SENDS_AT
REGION_AT = _OUT_AT + NUM_BLOCKS * BLOCK_BYTES
REGION_BYTES = NUM_BLOCKS * BLOCK_BYTES
MEMORY_BYTES = REGION_AT + REGION_BYTES
DEPTH = _NUM_RECEIVES + NUM_BLOCKS

_HEAD = struct.Struct("!HHI")
"""Before the data of a SEND: slots and blocks that were read, bytes of data."""
_SLOT, _BLOCK, _CREDIT = "slot", "block", "credit"
_ROOM = {_SLOT: NUM_SLOTS, _BLOCK: NUM_BLOCKS, _CREDIT: NUM_CREDIT_SLOTS}
_WAIT_S, _READY_WAIT_S = 0.2, 0.05


@dataclass
class _Message:
    """A received message: what was not read of it, the receive that it used, and whether it lies in a block."""

    left: memoryview
    slot: int
    in_block: bool


class RdmaChannel:
    """A `Channel` over a queue pair of `device`, for one thread that writes and one that reads."""

    part_bytes = MAX_PART_BYTES
    """Bytes of a message to take at a time."""

    def __init__(self, inner: RecordChannel, device: VerbsDevice) -> None:
        """Open a pair and post its receives; raises `OSError` if the device has none."""
        self.socket, self.part_timeout_s = inner.socket, math.inf
        self._inner = inner
        self._memory = memoryview(mmap.mmap(-1, MEMORY_BYTES))
        self._changed = threading.Condition()
        self._peer: PairRecord | None = None
        self._error: OSError | None = None
        self._is_shut = self._is_closed = False
        self._arrived: deque[_Message] = deque()
        self._reading: _Message | None = None
        # Posted sends, in order; how many of a kind were ever posted, are not complete, and what the peer has room for.
        self._sends: deque[str] = deque()
        self._num_posted: Counter[str] = Counter()
        self._num_sending: Counter[str] = Counter()
        self._room = {_SLOT: NUM_SLOTS, _BLOCK: NUM_BLOCKS}
        # What has arrived and was not read, what was read and not given back, and blocks that were ever written here.
        self._num_held: Counter[str] = Counter()
        self._num_read: Counter[str] = Counter()
        self._num_written = 0
        self._proxy = threading.Thread(target=self._run, name="isthmus-rdma", daemon=True)
        self._pair: VerbsPair = device.open_pair(self._memory, REGION_AT, REGION_BYTES, DEPTH)
        self._waker = -1
        try:
            self._waker = os.eventfd(0, os.EFD_NONBLOCK)
            for number in range(_NUM_RECEIVES):
                self._pair.post_receive(number, number * SLOT_BYTES, SLOT_BYTES)
        except BaseException:
            self._release()
            raise

    @property
    def record(self) -> PairRecord:
        """What the peer has to know of this side's queue pair."""
        return self._pair.record

    def connect(self, peer: PairRecord) -> None:
        """Join the pair `peer`, whose side has its receives posted."""
        self._peer = peer
        self._pair.connect(peer)

    def start(self) -> None:
        """Begin: nothing more comes over TCP."""
        self._proxy.start()

    def write(self, parts: Sequence[Part], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Send `parts` as one message; see `Channel`."""
        tag = self._inner.tag_bytes
        size = sum(map(len, parts)) + tag * len(parts)
        kind = _SLOT if size <= SLOT_BYTES - _HEAD.size else _BLOCK
        if size > BLOCK_BYTES:
            raise ValueError(f"parts of {size} bytes; a message has {BLOCK_BYTES} at most")
        self._wait(lambda: self._has_room(kind), math.inf, is_stopped)
        start = at = self._place(kind) + (_HEAD.size if kind == _SLOT else 0)
        for part in parts:
            end = at + len(part) + tag
            self._inner.seal_into(part, self._memory[at:end])
            at = end
        with self._changed:
            self._raise_error()
            self._room[_SLOT] -= 1
            if kind == _SLOT:
                self._send(kind, size)
            else:
                self._room[_BLOCK] -= 1
                self._write_block(start, size)

    def wait_ready(self, before_wait: Callable[[], None] = lambda: None) -> bool:
        """Return whether `write` would not wait; before False, call `before_wait` and block for some milliseconds."""
        with self._changed:
            if self._would_not_wait():
                return True
        before_wait()
        with self._changed:
            return self._changed.wait_for(self._would_not_wait, _READY_WAIT_S)

    def wait_until_sent(self, limit_s: float) -> None:
        """Wait until the peer's device has acknowledged what was written; raises `TimeoutError` after `limit_s`."""
        self._wait(lambda: not self._sends, limit_s, lambda: False)

    def read_into(self, into: memoryview, tolerate_silence: Callable[[], bool] = lambda: False) -> None:
        """Fill `into` with the next part; see `Channel`."""
        size = len(into) + self._inner.tag_bytes
        one = self._reading or self._next_message(tolerate_silence)
        if len(one.left) < size:
            raise ConnectionResetError(f"sent a message of {len(one.left)} bytes where {size} were expected")
        record, one.left = one.left[:size], one.left[size:]
        # Anyone with its key can write to the region of blocks, so what is authenticated is a copy.
        self._inner.open_into(memoryview(bytes(record)) if one.in_block and self._inner.tag_bytes else record, into)
        self._reading = one if len(one.left) else None
        if self._reading is None:
            self._give_back(one)

    def shut_down(self) -> None:
        """End reading and writing here; what was written still reaches the peer, which then sees an end."""
        with self._changed:
            was_shut, self._is_shut = self._is_shut, True
            self._changed.notify_all()
            if not was_shut:  # the proxy reads it once
                os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """Shut down, and release the queue pair and the socket."""
        self.shut_down()
        if self._proxy.ident is not None:
            self._proxy.join()
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._release()
            self._inner.close()

    def _release(self) -> None:
        self._pair.close()
        if self._waker >= 0:
            os.close(self._waker)

    # --- waiting

    def _wait(self, is_ready: Callable[[], bool], limit_s: float, is_stopped: Callable[[], bool]) -> None:
        end_s = time.monotonic() + limit_s
        with self._changed:
            while not is_ready():
                self._raise_error()
                if (left_s := end_s - time.monotonic()) <= 0 or is_stopped():
                    raise TimeoutError("timed out")
                self._changed.wait(min(left_s, _WAIT_S))
            if self._is_shut:
                self._raise_error()

    def _raise_error(self) -> None:
        if self._is_shut:
            raise ConnectionAbortedError("was shut down here")
        if self._error is not None:
            raise ConnectionResetError(str(self._error))

    def _next_message(self, tolerate_silence: Callable[[], bool]) -> _Message:
        while True:
            limit_s = self.socket.gettimeout()
            try:
                self._wait(lambda: bool(self._arrived), math.inf if limit_s is None else limit_s, lambda: False)
            except TimeoutError:
                if not tolerate_silence():
                    raise
                continue
            return self._arrived.popleft()

    # --- posting; the lock is held

    def _would_not_wait(self) -> bool:
        return self._error is not None or self._is_shut or self._has_room(_BLOCK)

    def _has_room(self, kind: str) -> bool:
        return self._num_sending[kind] < _ROOM[kind] and min(self._room[_SLOT], self._room[kind]) > 0

    def _place(self, kind: str) -> int:
        """Return where the next message of `kind` is put together."""
        number = self._num_posted[kind] % _ROOM[kind]
        if kind == _BLOCK:
            return _OUT_AT + number * BLOCK_BYTES
        return _SENDS_AT + (number + (NUM_SLOTS if kind == _CREDIT else 0)) * SLOT_BYTES

    def _send(self, kind: str, num_bytes: int) -> None:
        """Post the SEND that was put together, with all credits."""
        place = self._place(kind)
        _HEAD.pack_into(self._memory, place, self._num_read[_SLOT], self._num_read[_BLOCK], num_bytes)
        self._num_read.clear()
        self._note_post(kind)
        self._pair.post_send(place, _HEAD.size + num_bytes)

    def _write_block(self, place: int, num_bytes: int) -> None:
        if self._peer is None:
            raise ConnectionAbortedError("is not connected")
        block = self._num_posted[_BLOCK] % NUM_BLOCKS
        self._note_post(_BLOCK)
        self._pair.post_write(place, num_bytes, self._peer.address + block * BLOCK_BYTES, num_bytes)

    def _note_post(self, kind: str) -> None:
        self._sends.append(kind)
        self._num_posted[kind] += 1
        self._num_sending[kind] += 1

    def _give_back(self, one: _Message) -> None:
        """Lend the receive of a message that was read again, and give credit for it."""
        with self._changed:
            for kind in (_SLOT, _BLOCK) if one.in_block else (_SLOT,):
                self._num_held[kind] -= 1
                self._num_read[kind] += 1
            if self._error is None and not self._is_shut:
                self._pair.post_receive(one.slot, one.slot * SLOT_BYTES, SLOT_BYTES)
                self._send_credits()

    def _send_credits(self) -> None:
        is_due = any(2 * self._num_read[kind] >= _ROOM[kind] for kind in (_SLOT, _BLOCK))
        if is_due and self._num_sending[_CREDIT] < NUM_CREDIT_SLOTS:
            self._send(_CREDIT, 0)

    # --- the proxy

    def _run(self) -> None:
        try:
            self._take_completions()
        except Exception as error:  # whatever it is: nothing else wakes who reads or writes
            with self._changed:
                self._fail(str(error) if isinstance(error, OSError | ValueError) else f"RDMA: {error!r}")
        finally:
            self._inner.shut_down()

    def _take_completions(self) -> None:
        """Take completions until the channel fails, or is shut down and has sent all."""
        poll = select.poll()
        connection = self.socket.fileno()
        for number in (self._pair.fileno(), connection, self._waker):
            poll.register(number, select.POLLIN)
        end_s = math.inf
        while self._error is None and time.monotonic() < end_s:
            ready = {number for number, _ in poll.poll(None if end_s == math.inf else 1e3 * _WAIT_S)}
            has_ended = connection in ready and self._look_at_socket()
            with self._changed:
                for one in self._pair.poll():
                    self._complete(one)
                if has_ended:
                    self._fail("closed its connection")
                if self._is_shut and end_s == math.inf:
                    end_s = time.monotonic() + LINGER_S
                    os.eventfd_read(self._waker)
                if self._is_shut and not self._sends:
                    return

    def _look_at_socket(self) -> bool:
        """Return whether the TCP connection has ended, or carries what it may not."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _fail(self, reason: str) -> None:
        self._error = self._error or ConnectionResetError(reason)
        self._changed.notify_all()

    def _complete(self, one: Completion) -> None:
        """Take a completion; raises `ValueError` for a message that the peer may not send."""
        if one.error:
            return self._fail(f"RDMA: {one.error}")
        if not one.is_receive:
            self._num_sending[self._sends.popleft()] -= 1
            self._send_credits()
        elif one.immediate is not None:
            if self._num_held[_BLOCK] >= NUM_BLOCKS or not 0 < one.immediate <= BLOCK_BYTES:
                raise ValueError(f"wrote {one.immediate} bytes to a block; {self._num_held[_BLOCK]} wait to be read")
            start = REGION_AT + self._num_written % NUM_BLOCKS * BLOCK_BYTES
            self._num_written += 1
            self._num_held[_BLOCK] += 1
            self._hold(_Message(self._memory[start : start + one.immediate], one.number, in_block=True))
        else:
            self._take_send(one)
        return self._changed.notify_all()

    def _take_send(self, one: Completion) -> None:
        start = one.number * SLOT_BYTES
        if not _HEAD.size <= one.num_bytes <= SLOT_BYTES:
            raise ValueError(f"sent a message of {one.num_bytes} bytes")
        slots, blocks, num_bytes = _HEAD.unpack_from(self._memory, start)
        given = {_SLOT: slots, _BLOCK: blocks}
        if num_bytes != one.num_bytes - _HEAD.size or any(self._room[k] + n > _ROOM[k] for k, n in given.items()):
            raise ValueError(f"gave credit for {slots} slots and {blocks} blocks, and sent {num_bytes} bytes")
        for kind, number in given.items():
            self._room[kind] += number
        if num_bytes:
            place = start + _HEAD.size
            self._hold(_Message(self._memory[place : place + num_bytes], one.number, in_block=False))
        else:
            self._pair.post_receive(one.number, start, SLOT_BYTES)

    def _hold(self, one: _Message) -> None:
        if self._num_held[_SLOT] >= NUM_SLOTS:
            raise ValueError(f"sent more than {NUM_SLOTS} messages that were not read")
        self._num_held[_SLOT] += 1
        self._arrived.append(one)
