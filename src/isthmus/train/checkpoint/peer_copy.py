"""`PeerCopies`: each rank's snapshot is kept by another rank too, on a machine that does not fail with it.

Copies go in the background over the run's own transport, in pieces of `PIECE_BYTES`, one at a time and with
pauses: training traffic waits for one piece at most, and copies take at most `SHARE` of a link. A copy
replaces the older of two at the holder, and counts once the holder has verified it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from isthmus.comm.group.group_work import payload_of
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError, UnavailableError
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import MemorySlot, Snapshot

PIECE_BYTES = 2**20
SHARE = 0.5
"""Part of the time in which a background copy is on its way; in the rest the link is free."""

_FIRST_TAG = 1 << 40
"""Tags from here on are those of copies and of answers to them: far above those of the process group."""

_ANSWERS = 2
_HEAD = struct.Struct("<qq")
_REFUSED, _ACCEPTED, _DAMAGED, _WHOLE = range(4)


def send_slot(
    transport: Transport, peer: int, slot: MemorySlot, *, back: bool = False, share: float = 1.0
) -> bool:
    """Send what `slot` holds to `peer`, who calls `receive_slot`; tell whether it is whole there.

    `back` tells a copy given back from one given to be held. Raises `PeerError` where the peer is lost.
    """
    found = slot.copy()
    label, memory = found if found is not None else ("", torch.empty(0, dtype=torch.uint8))
    tag, text = _FIRST_TAG + back, label.encode()
    transport.send(peer, tag, "head", memoryview(_HEAD.pack(len(text), memory.numel()))).result()
    if found is None or _answer(transport, peer, tag) == _REFUSED:
        return False
    transport.send(peer, tag, "label", memoryview(text)).result()
    for piece in memory.split(PIECE_BYTES):
        start_s = time.monotonic()
        transport.send(peer, tag, "piece", payload_of(piece)).result()
        if share < 1:
            time.sleep((time.monotonic() - start_s) * (1 / share - 1))
    return _answer(transport, peer, tag) == _WHOLE


def receive_slot(
    transport: Transport, peer: int, into: MemoryCheckpoint, *, back: bool = False, warns: bool = True
) -> bool:
    """Put what `peer` sends in place of the older snapshot of `into`; tell whether it is whole.

    `warns` says in the log why there is no room. Raises `PeerError` where the peer is lost.
    """
    tag, head = _FIRST_TAG + back, bytearray(_HEAD.size)
    transport.receive(peer, tag, "head", memoryview(head)).result()
    num_text, num_bytes = _HEAD.unpack(head)
    if num_bytes == 0:
        return False
    slot = into.spare_slot()
    try:
        memory = slot.begin(num_bytes)[:num_bytes]
    except UnavailableError as error:
        if warns:
            print(f"warning: no copy of rank {peer} is held here: {error}", flush=True)
        _tell(transport, peer, tag, _REFUSED)
        return False
    _tell(transport, peer, tag, _ACCEPTED)
    text = bytearray(num_text)
    transport.receive(peer, tag, "label", memoryview(text)).result()
    for piece in memory.split(PIECE_BYTES):
        transport.receive(peer, tag, "piece", payload_of(piece)).result()
    step = slot.adopt(text.decode())
    into.put(slot, step)
    _tell(transport, peer, tag, _DAMAGED if step is None else _WHOLE)
    return step is not None


class PeerCopies:
    """The copy of `memory`, this rank's, at its holder, and the copies that it holds for others.

    `holders` are by rank. That a copy is missing is told once, until there is one again. Threads end once the
    transport is closed.
    """

    def __init__(self, transport: Transport, memory: MemoryCheckpoint, holders: Sequence[int | None]) -> None:
        self._transport, self._memory, self._holder = transport, memory, holders[transport.rank]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-copy")
        self._sending: Future[bool] | None = None
        self._is_held = True
        self.held = {
            other: memory.sibling(other) for other, holder in enumerate(holders) if holder == transport.rank
        }

    def start(self) -> None:
        """Begin to hold what others send."""
        for other, held in self.held.items():
            threading.Thread(
                target=self._hold, args=(other, held), name=f"isthmus-hold-{other}", daemon=True
            ).start()

    def send(self, step: int) -> None:
        """Begin to send the snapshot after `step` steps, once it is whole; it stays while `busy`."""
        last = self._memory.last
        if self._holder is not None and last is not None:
            self._sending = self._pool.submit(self._send, self._holder, step, last)

    @property
    def busy(self) -> bool:
        """Whether a copy is on its way."""
        return self._sending is not None and not self._sending.done()

    def wait(self) -> None:
        """Return once the copy that was begun last has ended, well or not."""
        if self._sending is not None:
            with suppress(UnavailableError):
                self._sending.result()

    def close(self) -> None:
        """Send no more; what is held stays."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, holder: int, step: int, last: Future[Snapshot]) -> bool:
        last.result()
        slot = self._memory.slot(step)
        whole = slot is not None and send_slot(self._transport, holder, slot, share=SHARE)
        if self._is_held and not whole:
            print(f"warning: rank {holder} holds no copy of the state after step {step}", flush=True)
        self._is_held = whole
        return whole

    def _hold(self, other: int, held: MemoryCheckpoint) -> None:
        is_whole = True
        with suppress(PeerError):
            while True:
                is_whole = receive_slot(self._transport, other, held, warns=is_whole)


def _tell(transport: Transport, peer: int, tag: int, answer: int) -> None:
    transport.send(peer, tag + _ANSWERS, "answer", memoryview(bytes([answer]))).result()


def _answer(transport: Transport, peer: int, tag: int) -> int:
    answer = bytearray(1)
    transport.receive(peer, tag + _ANSWERS, "answer", memoryview(answer)).result()
    return answer[0]
