"""`CollectiveRunner`: runs the collectives of one process group over the transport, each up to a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.comm.group.run_program import Block, Combine, run_program
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError
from isthmus.strategies import Message, RankProgram

MAX_CONCURRENT = 4
"""Collectives of one group under way at a time; further ones wait in the order of their calls."""

MAX_TAG = 2**20
"""Tags of point-to-point messages are below this value."""

GROUP_TAGS = 2**28
"""Tags of one group: `[base, base + GROUP_TAGS)`, the upper half for collectives."""

_COLLECTIVE = 2**27
_MESSAGES = 2**15
_SEQUENCES = _COLLECTIVE // _MESSAGES

FAILED = "failed: "
"""Label of an empty message that a rank sends in place of each message that it cannot send any more."""

_MAX_LABEL_BYTES = 255


@dataclass(frozen=True)
class Collective:
    """One call: what all ranks must agree on (`label`), and what this rank does.

    `prepare` waits for the inputs, `finish` stores the outputs; both run in the group's thread.
    """

    label: str
    program: RankProgram
    inputs: Sequence[Block]
    outputs: Sequence[Block]
    tensors: Sequence[torch.Tensor]
    """The caller's tensors; collectives that share memory run in the order of the calls."""
    combine: Combine | None = None
    prepare: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None


class CollectiveRunner:
    """The collectives of one group of `ranks` of `transport`, whose tags begin at `tag_base`.

    A collective ends at all ranks or fails at all: a rank that fails sends the reason in place of the messages that
    it still owes, and a message that does not arrive within `timeout_s` fails the receiver. After a failure the group
    accepts no more collectives.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], tag_base: int, timeout_s: float) -> None:
        self._transport, self._ranks, self._tag_base = transport, tuple(ranks), tag_base
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="isthmus-collective")
        self._sequence = 0
        self._under_way: dict[Future[None], frozenset[int]] = {}
        self._lock = threading.Lock()
        self._failure: PeerError | None = None

    def submit(self, collective: Collective, timeout_s: float | None = None) -> Future[None]:
        """Queue `collective`; all ranks call this in the same order. `timeout_s` replaces that of the group."""
        memory = frozenset(one.untyped_storage().data_ptr() for one in collective.tensors if one.numel())
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            earlier = [future for future, used in self._under_way.items() if used & memory]
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            future = self._pool.submit(self._run, collective, sequence, earlier, limit_s)
            self._under_way[future] = memory
        future.add_done_callback(self._forget)
        return future

    def close(self, *, wait: bool) -> None:
        """Stop the threads: after all queued collectives if `wait`, else without those that have not begun."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._under_way.pop(future, None)

    def _run(self, collective: Collective, sequence: int, earlier: Sequence[Future[None]], limit_s: float) -> None:
        messages = _TransportMessages(self._transport, self._ranks, self._tag_base, sequence, collective, limit_s)
        try:
            if self._failure is not None:
                raise PeerError(f"an earlier collective of this group failed: {self._failure.message}")
            for one in earlier:
                one.exception(limit_s)
            collective.prepare()
            run_program(collective.program, collective.inputs, collective.outputs, collective.combine, messages)
            collective.finish()
        except Exception as error:
            failure = error if isinstance(error, PeerError) else PeerError(f"{type(error).__name__}: {error}")
            self._failure = self._failure or failure
            messages.fail(failure)
            if isinstance(error, PeerError):
                raise
            raise failure from error


class _TransportMessages:
    """The messages of one collective over the transport, up to a deadline."""

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        tag_base: int,
        sequence: int,
        collective: Collective,
        limit_s: float,
    ) -> None:
        self.rank = ranks.index(transport.rank)
        self._transport, self._ranks, self._limit_s = transport, ranks, limit_s
        self._first_tag = tag_base + _COLLECTIVE + sequence % _SEQUENCES * _MESSAGES
        self._label = f"{collective.label} #{sequence}"
        self._end_s = time.monotonic() + limit_s
        sends = [message for _, message in collective.program.first_sends]
        self._owed = dict.fromkeys(sends + [one for turn in collective.program.turns for one in turn.sends])

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        del self._owed[message]
        self._transport.send(self._ranks[message.peer], self._tag(message), self._label, tensor_bytes(tensor))

    def receive(self, message: Message, into: torch.Tensor) -> Future[Any]:
        peer = self._ranks[message.peer]
        return self._transport.receive(peer, self._tag(message), self._label, tensor_bytes(into))

    def wait(self, message_peer: int, future: Future[Any]) -> None:
        try:
            future.result(max(self._end_s - time.monotonic(), 0.0))
        except FutureTimeoutError as error:
            raise PeerError(
                f"nothing from rank {self._ranks[message_peer]} within {self._limit_s:g} s",
                hint="see its log: it has not called this collective, or waits itself",
            ) from error

    def fail(self, failure: PeerError) -> None:
        """Send the reason in place of the messages that this rank still owes."""
        reason = failure.message.rpartition(FAILED)[2]
        label = (FAILED + reason).encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
        for message in self._owed:
            with suppress(PeerError):
                self._transport.send(self._ranks[message.peer], self._tag(message), label, memoryview(b""))

    def _tag(self, message: Message) -> int:
        return self._first_tag + message.number % _MESSAGES
