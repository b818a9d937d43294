"""`CollectiveRunner`: runs the collectives of one process group over the transport, each up to a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from isthmus.comm.group.composed.near_messages import NearMessages, NearRanks
from isthmus.comm.group.run_program import Block, Codec, Combine, run_program
from isthmus.comm.group.transport_messages import ArrivedMessage, TransportMessages, sends_of
from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import PeerError
from isthmus.strategies import Message, RankProgram

MAX_CONCURRENT = 4
"""Collectives of one group under way at a time; further ones wait in the order of their calls."""

MAX_TAG = 2**20
"""Tags of point-to-point messages are below this value."""

_Result = TypeVar("_Result")


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
    keeps_memory: bool = False
    """Whether inputs and outputs stay as they are until all messages are acknowledged; else sent ones are copied."""
    near: NearRanks | None = None
    """The ranks between which gloo carries large messages; None if the transport carries all."""
    codec: Codec | None = None
    """How messages between clusters are encoded; None: as they are."""
    prepare: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class CollectiveTurn:
    """The place of a collective among those of its group: its first number, its time-out, those to wait for."""

    sequence: int
    limit_s: float
    earlier: tuple[Future[Any], ...]

    def wait_for_earlier(self) -> None:
        """Wait for the collectives that share memory with this one; raises `TimeoutError`."""
        for one in self.earlier:
            one.exception(self.limit_s)


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
        self._under_way: dict[Future[Any], frozenset[int]] = {}
        self._lock = threading.Lock()
        self._failure: PeerError | None = None

    def reserve(self, num: int) -> int:
        """Return the first number of `num` collectives; all ranks call this in the same order with one `num`.

        A rank without a part in one of them does not submit it.
        """
        with self._lock:
            self._sequence += num
            return self._sequence - num

    def submit(
        self, collective: Collective, timeout_s: float | None = None, sequence: int | None = None
    ) -> Future[list[ArrivedMessage]]:
        """Queue `collective`; the future has the messages that arrived. `timeout_s` replaces that of the group.

        All ranks call this in the same order, but for a `sequence` that they have reserved.
        """

        def run(turn: CollectiveTurn) -> list[ArrivedMessage]:
            messages = self._messages_of(collective, turn)
            with self.failing([messages]):
                turn.wait_for_earlier()
                collective.prepare()
                run_program(
                    collective.program,
                    collective.inputs,
                    collective.outputs,
                    collective.combine,
                    messages,
                    collective.codec,
                    keeps_memory=collective.keeps_memory,
                )
                if isinstance(messages, NearMessages):
                    messages.finish()
                collective.finish()
            return messages.arrived()

        return self.submit_run(run, self._pool, collective.tensors, timeout_s, sequence=sequence)

    def submit_program(
        self, run: Callable[[TransportMessages], None], label: str, owed: Sequence[Message], sequence: int
    ) -> Future[list[ArrivedMessage]]:
        """Queue `run(messages)`, which owes the messages `owed`, under a number that all ranks have reserved."""

        def run_in_turn(turn: CollectiveTurn) -> list[ArrivedMessage]:
            messages = self.messages(turn.sequence, label, owed, turn.limit_s)
            with self.failing([messages]):
                run(messages)
            return messages.arrived()

        return self.submit_run(run_in_turn, self._pool, (), sequence=sequence)

    def submit_run(
        self,
        run: Callable[[CollectiveTurn], _Result],
        pool: Executor,
        tensors: Sequence[torch.Tensor],
        timeout_s: float | None = None,
        num_sequences: int = 1,
        sequence: int | None = None,
    ) -> Future[_Result]:
        """Queue `run(turn)` in `pool`, as a collective that uses `num_sequences` numbers; see `submit`.

        `tensors`, of any shape, are those of the caller that it reads or changes.
        """
        memory = frozenset(one.untyped_storage().data_ptr() for one in tensors if one.numel())
        first = self.reserve(num_sequences) if sequence is None else sequence
        with self._lock:
            earlier = [future for future, used in self._under_way.items() if used & memory]
            turn = CollectiveTurn(first, self.timeout_s if timeout_s is None else timeout_s, tuple(earlier))
            future = pool.submit(run, turn)
            self._under_way[future] = memory
        future.add_done_callback(self._forget)
        return future

    def messages(self, sequence: int, label: str, owed: Iterable[Message], limit_s: float) -> TransportMessages:
        """Return the messages of collective `sequence`."""
        return TransportMessages(self._transport, self._ranks, self._tag_base, sequence, label, owed, limit_s)

    def _messages_of(self, collective: Collective, turn: CollectiveTurn) -> TransportMessages | NearMessages:
        program, near = collective.program, collective.near
        receipts = near.receipts(program) if near is not None else []
        messages = self.messages(turn.sequence, collective.label, [*sends_of(program), *receipts], turn.limit_s)
        return messages if near is None else NearMessages(messages, near, program)

    @contextmanager
    def failing(self, several: Sequence[TransportMessages | NearMessages]) -> Iterator[None]:
        """Run a block that owes the messages `several`; if it fails, so do they and the group.

        Raises `PeerError`, at once if an earlier collective has failed.
        """
        try:
            if self._failure is not None:
                raise PeerError(f"an earlier collective of this group failed: {self._failure.message}")
            yield
        except Exception as error:
            failure = error if isinstance(error, PeerError) else PeerError(f"{type(error).__name__}: {error}")
            self._failure = self._failure or failure
            for messages in several:
                messages.fail(failure)
            if failure is error:
                raise
            raise failure from error

    def close(self, *, wait: bool) -> None:
        """Stop the threads: after all queued collectives if `wait`, else without those that have not begun."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way.pop(future, None)
