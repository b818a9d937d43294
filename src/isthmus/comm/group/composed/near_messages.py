"""`NearMessages`: the messages of one collective, of which gloo carries large ones inside a cluster.

The transport stays the one that ranks agree by. It carries, in place of a large message, a notice of its size, under
the label of the collective. The receiver asks gloo for the message only then, so it never waits in gloo for a rank that
has failed or calls another collective, and sizes are equal: gloo would end the process. When it has all of them, it
sends a receipt, and the sender waits for that before it waits for gloo. So a rank that fails tells both sides why, as
it does over the transport alone; and if a process dies, the transport's loss breaks the gloo group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.comm.group.transport_messages import LAST_NUMBER, ArrivedMessage, TransportMessages
from isthmus.core.errors import PeerError
from isthmus.strategies import Message, RankProgram

MIN_ELEMENTS = 2**14
"""Smallest message that goes by gloo: 64 KiB of fp32, below which a notice costs what it saves."""

_MIN_WAIT_S = 1.0
"""Gloo gets at least this time for what is on its way: a wait that ends early breaks the gloo group."""


@dataclass(frozen=True)
class NearRanks:
    """The gloo group `backend` of a cluster; `places` has the rank in it of each rank of the process group.

    `loss_message()` returns the loss that the transport knows of, or "".
    """

    backend: Any
    places: Mapping[int, int]
    loss_message: Callable[[], str]
    unfinished: list[object] = field(default_factory=list)
    """What failed while gloo may still use its memory; kept as long as the group."""

    def carries(self, message: Message, num_elements: int) -> bool:
        """Return whether gloo carries this message; sender and receiver find the same."""
        return num_elements >= MIN_ELEMENTS and message.peer in self.places

    def senders(self, program: RankProgram) -> Counter[int]:
        """Return how many messages gloo brings from each rank in `program`."""
        return Counter(
            message.peer
            for turn in program.turns
            for message in turn.parts
            if self.carries(message, turn.elements[1] - turn.elements[0])
        )

    def receipts(self, program: RankProgram) -> list[Message]:
        """Return the receipts that this rank owes in `program`."""
        return [_receipt(peer) for peer in self.senders(program)]


@dataclass
class _Incoming:
    """A message that gloo brings: its announced size, [1] of int64, and where it goes."""

    message: Message
    size: torch.Tensor
    into: torch.Tensor
    notice: Future[Any]
    work: Any = None


class NearMessages:
    """The messages of `program`: those that `near` carries, and the others by `messages`, which owe its receipts."""

    def __init__(self, messages: TransportMessages, near: NearRanks, program: RankProgram) -> None:
        self.rank = messages.rank
        self._messages, self._near = messages, near
        self._incoming: dict[Future[Any], _Incoming] = {}
        self._announced: deque[_Incoming] = deque()
        self._left = near.senders(program)
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._receipts: dict[int, Future[Any]] = {}

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send `tensor`, flat [num_elements], which does not change afterwards."""
        if not self._near.carries(message, tensor.numel()):
            self._messages.send(message, tensor)
            return
        peer = message.peer
        if peer not in self._receipts:
            self._receipts[peer] = self._messages.receive(_receipt(peer), _size(0))
        with self._gloo_errors_as_peer_errors():
            tag = self._messages.tag_in_group(message)
            work = self._near.backend.send([tensor.detach()], self._near.places[peer], tag)
        self._sent.append((work, tensor))
        self._messages.send(message, _size(tensor.nbytes))

    def receive(self, message: Message, into: torch.Tensor) -> Future[Any]:
        """Post a receive into `into`, flat [num_elements]."""
        if not self._near.carries(message, into.numel()):
            return self._messages.receive(message, into)
        size = _size(0)
        one = _Incoming(message, size, into, self._messages.receive(message, size))
        self._incoming[one.notice] = one
        self._announced.append(one)
        return one.notice

    def wait(self, message_peer: int, future: Future[Any]) -> None:
        """Wait for a receive from `message_peer`; raises `PeerError`."""
        self._begin_announced()
        self._messages.wait(message_peer, future)
        one = self._incoming.pop(future, None)
        if one is None:
            return
        if one.work is None:
            self._announced.remove(one)
            self._begin(one)
        with self._gloo_errors_as_peer_errors():
            one.work.wait(self._limit())
        self._left[message_peer] -= 1
        if not self._left[message_peer]:
            self._messages.send(_receipt(message_peer), _size(0))

    def finish(self) -> None:
        """Wait until what was sent by gloo has been received, so that its memory is free; raises `PeerError`."""
        for peer, receipt in self._receipts.items():
            self._messages.wait(peer, receipt)
        with self._gloo_errors_as_peer_errors():
            for work, _ in self._sent:
                work.wait(self._limit())

    def arrived(self) -> list[ArrivedMessage]:
        """Return what has arrived over the transport."""
        return self._messages.arrived()

    def fail(self, failure: PeerError) -> None:
        """Send the reason in place of the messages, notices and receipts that this rank still owes."""
        self._near.unfinished.append(self)
        self._messages.fail(failure)

    def _begin_announced(self) -> None:
        """Ask gloo for all messages whose notices are there, so that they arrive beside the one that is waited for."""
        for _ in range(len(self._announced)):
            one = self._announced.popleft()
            if one.notice.done() and one.notice.exception() is None:
                self._begin(one)
            else:
                self._announced.append(one)

    def _begin(self, one: _Incoming) -> None:
        message, announced = one.message, int(one.size)
        if announced != one.into.nbytes:
            raise PeerError(f"rank {message.peer} sends {announced} bytes where {one.into.nbytes} are expected")
        with self._gloo_errors_as_peer_errors():
            tag = self._messages.tag_in_group(message)
            one.work = self._near.backend.recv([one.into.detach()], self._near.places[message.peer], tag)

    def _limit(self) -> timedelta:
        return timedelta(seconds=max(self._messages.left_s, _MIN_WAIT_S))

    @contextmanager
    def _gloo_errors_as_peer_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(self._near.loss_message() or gloo_error_text(error) or str(error)) from error


def _receipt(peer: int) -> Message:
    return Message(peer, LAST_NUMBER)


def _size(num_bytes: int) -> torch.Tensor:
    return torch.tensor([num_bytes], dtype=torch.int64)
