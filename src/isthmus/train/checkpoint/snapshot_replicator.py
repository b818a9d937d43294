"""`SnapshotReplicator`: replicates each rank's snapshot to a peer on another machine.

Copies run in the background over the run's transport, in chunks of `COPY_CHUNK_BYTES`, one at a time with pauses:
training traffic waits for at most one chunk, and copies use at most `LINK_SHARE` of a link. A copy replaces the
older of two at the holder and is valid once the holder has verified its checksum.

Wire protocol: the sender sends a header (label length, data length); the receiver accepts or refuses; the
sender sends label and chunks; the receiver answers whether the copy is valid.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError, UnavailableError
from isthmus.train.checkpoint.layout.checkpoint_layout import MAX_SIZE
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_slot import MAX_INDEX_BYTES, MemorySlot, Snapshot

COPY_CHUNK_BYTES = 2**20
LINK_SHARE = 0.5
"""Fraction of the time in which a background copy occupies its link."""

_FIRST_TAG = 1 << 40
"""First tag of copies and their answers, far above the tags of the process group."""

_ANSWER_TAG_OFFSET = 2
_HEADER = struct.Struct("<qq")
_REFUSED, _ACCEPTED, _DAMAGED, _VALID = range(4)


def send_slot(
    transport: Transport,
    peer: int,
    slot: MemorySlot,
    *,
    returning: bool = False,
    link_share: float = 1.0,
    chunk_bytes: int = COPY_CHUNK_BYTES,
) -> bool:
    """Send the contents of `slot` to `peer`, which calls `receive_slot`; return whether its copy is valid.

    `returning` marks a copy that the holder returns to its owner; both ends must agree on it. `link_share` is the
    fraction of the time in which the copy may occupy the link. Both ends cut it into `chunk_bytes`. Raises
    `PeerError` if the peer is lost.
    """
    # Step 1: announce the sizes; stop if the slot is invalid or the peer refuses.
    found = slot.read_raw()
    label, memory = found if found is not None else ("", torch.empty(0, dtype=torch.uint8))
    tag, text = _FIRST_TAG + returning, label.encode()
    transport.send(peer, tag, "head", memoryview(_HEADER.pack(len(text), memory.numel()))).result()
    if found is None or _receive_answer(transport, peer, tag) == _REFUSED:
        return False
    # Step 2: send label and chunks, with pauses.
    transport.send(peer, tag, "label", memoryview(text)).result()
    for piece in memory.split(chunk_bytes):
        start_s = time.monotonic()
        transport.send(peer, tag, "piece", tensor_bytes(piece)).result()
        if link_share < 1:
            time.sleep((time.monotonic() - start_s) * (1 / link_share - 1))
    # Step 3: wait for the peer's verdict.
    return _receive_answer(transport, peer, tag) == _VALID


def receive_slot(
    transport: Transport,
    peer: int,
    target: MemoryCheckpoint,
    *,
    returning: bool = False,
    log_refusal: bool = True,
    chunk_bytes: int = COPY_CHUNK_BYTES,
) -> bool:
    """Receive a copy from `peer` over the older snapshot of `target`; return whether it is valid.

    `log_refusal` logs why a copy is refused. Raises `PeerError` if the peer is lost.
    """
    # Step 1: accept or refuse the announced size.
    tag, head = _FIRST_TAG + returning, bytearray(_HEADER.size)
    transport.receive(peer, tag, "head", memoryview(head)).result()
    num_text, num_bytes = _HEADER.unpack(head)
    if num_bytes == 0:
        return False
    if not (0 < num_text <= MAX_INDEX_BYTES and 0 < num_bytes <= MAX_SIZE):
        print(f"warning: refused a copy of rank {peer}: it announces {num_text} and {num_bytes} bytes", flush=True)
        _send_answer(transport, peer, tag, _REFUSED)
        return False
    slot = target.reserve_slot()
    try:
        memory = slot.open_for_write(num_bytes)[:num_bytes]
    except UnavailableError as error:
        if log_refusal:
            print(f"warning: refused a snapshot copy of rank {peer}: {error}", flush=True)
        _send_answer(transport, peer, tag, _REFUSED)
        return False
    _send_answer(transport, peer, tag, _ACCEPTED)
    # Step 2: receive label and chunks.
    text = bytearray(num_text)
    transport.receive(peer, tag, "label", memoryview(text)).result()
    for piece in memory.split(chunk_bytes):
        transport.receive(peer, tag, "piece", tensor_bytes(piece)).result()
    # Step 3: verify the checksum and answer.
    step = slot.seal_raw(text.decode(errors="replace"))
    target.commit_slot(slot, step)
    _send_answer(transport, peer, tag, _DAMAGED if step is None else _VALID)
    return step is not None


class SnapshotReplicator:
    """Sends this rank's snapshots (`memory`) to its holder and holds the copies of other ranks.

    `holders` is by rank. A missing copy is logged once until the next valid one. The receive threads end when
    the transport closes.
    """

    def __init__(
        self,
        transport: Transport,
        memory: MemoryCheckpoint,
        holders: Sequence[int | None],
        chunk_bytes: int = COPY_CHUNK_BYTES,
    ) -> None:
        self._transport, self._memory, self._holder = transport, memory, holders[transport.rank]
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-copy")
        self._sending: Future[bool] | None = None
        self._has_copy = True
        self.held_copies = {
            other: memory.for_rank(other) for other, holder in enumerate(holders) if holder == transport.rank
        }

    def start(self) -> None:
        """Start one receive thread for each rank whose copy is held here."""
        for other, held in self.held_copies.items():
            threading.Thread(
                target=self._receive_copies, args=(other, held), name=f"isthmus-hold-{other}", daemon=True
            ).start()

    def send(self, step: int) -> None:
        """Send the snapshot after `step` steps in the background; it must stay while `is_sending`."""
        last = self._memory.last_snapshot
        if self._holder is not None and last is not None:
            self._sending = self._pool.submit(self._send, self._holder, step, last)

    @property
    def is_sending(self) -> bool:
        """Whether a copy is being sent."""
        return self._sending is not None and not self._sending.done()

    def wait(self) -> None:
        """Wait until the current copy has succeeded or failed."""
        if self._sending is not None:
            with suppress(UnavailableError):
                self._sending.result()

    def close(self) -> None:
        """Stop sending; held copies stay."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, holder: int, step: int, last: Future[Snapshot]) -> bool:
        last.result()
        slot = self._memory.slot(step)
        valid = slot is not None and send_slot(
            self._transport, holder, slot, link_share=LINK_SHARE, chunk_bytes=self._chunk_bytes
        )
        if self._has_copy and not valid:
            print(f"warning: rank {holder} holds no copy of the state after step {step}", flush=True)
        self._has_copy = valid
        return valid

    def _receive_copies(self, other: int, copies: MemoryCheckpoint) -> None:
        is_valid = True
        with suppress(PeerError):
            while True:
                is_valid = receive_slot(
                    self._transport, other, copies, log_refusal=is_valid, chunk_bytes=self._chunk_bytes
                )


def _send_answer(transport: Transport, peer: int, tag: int, answer: int) -> None:
    transport.send(peer, tag + _ANSWER_TAG_OFFSET, "answer", memoryview(bytes([answer]))).result()


def _receive_answer(transport: Transport, peer: int, tag: int) -> int:
    answer = bytearray(1)
    transport.receive(peer, tag + _ANSWER_TAG_OFFSET, "answer", memoryview(answer)).result()
    return answer[0]
