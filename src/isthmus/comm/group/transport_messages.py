"""`TransportMessages`: the messages of one collective over the transport, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.comm.group.group_work import tensor_bytes
from isthmus.comm.transport.transport import Arrival, Transport
from isthmus.core.errors import PeerError
from isthmus.strategies import Message, RankProgram

FAILED = "failed: "
"""Label of an empty message that a rank sends in place of each message that it cannot send any more."""

GROUP_TAGS = 2**28
"""Tags of one group: `[base, base + GROUP_TAGS)`, the upper half for collectives."""

_COLLECTIVE = 2**27
_MESSAGES = 2**15
LAST_NUMBER = _MESSAGES - 1
"""The last number that a message between two ranks can have in a collective; no program counts so far."""

_SEQUENCES = _COLLECTIVE // _MESSAGES

_MAX_LABEL_BYTES = 255


def sends_of(program: RankProgram) -> list[Message]:
    """Return the messages that `program` sends."""
    return [message for _, message in program.first_sends] + [one for turn in program.turns for one in turn.sends]


@dataclass(frozen=True)
class ArrivedMessage:
    """A received message: the rank of the transport that sent it, its size and times."""

    source: int
    num_bytes: int
    arrival: Arrival


class TransportMessages:
    """The messages of collective `sequence` of the group of `ranks`; `owed` are those that this rank sends.

    `label` is what all ranks must agree on. Waiting ends `limit_s` after this object was made.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        tag_base: int,
        sequence: int,
        label: str,
        owed: Iterable[Message],
        limit_s: float,
    ) -> None:
        self.rank = ranks.index(transport.rank)
        self._transport, self._ranks, self._limit_s = transport, ranks, limit_s
        self._tag_base, self._first_tag = tag_base, _COLLECTIVE + sequence % _SEQUENCES * _MESSAGES
        self._label = f"{label} #{sequence}".encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
        self._end_s = time.monotonic() + limit_s
        self._owed = dict.fromkeys(owed)
        self._received: list[tuple[int, int, Future[Arrival]]] = []

    @property
    def left_s(self) -> float:
        """Seconds until waiting ends."""
        return max(self._end_s - time.monotonic(), 0.0)

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send `tensor`, flat [num_elements], which does not change afterwards."""
        self._owed.pop(message, None)
        self._transport.send(self._ranks[message.peer], self._tag(message), self._label, tensor_bytes(tensor))

    def receive(self, message: Message, into: torch.Tensor) -> Future[Any]:
        """Post a receive into `into`, flat [num_elements]."""
        peer = self._ranks[message.peer]
        future = self._transport.receive(peer, self._tag(message), self._label, tensor_bytes(into))
        self._received.append((peer, into.nbytes, future))
        return future

    def arrived(self) -> list[ArrivedMessage]:
        """Return the messages that have arrived."""
        return [
            ArrivedMessage(peer, num_bytes, future.result(0))
            for peer, num_bytes, future in self._received
            if future.done() and future.exception(0) is None
        ]

    def wait(self, message_peer: int, future: Future[Any]) -> None:
        """Wait for a receive from `message_peer`; raises `PeerError`."""
        try:
            future.result(self.left_s)
        except FutureTimeoutError as error:
            raise PeerError(
                f"nothing from rank {self._ranks[message_peer]} within {self._limit_s:g} s",
                hint="see its log: it has not called this collective, or waits itself",
            ) from error

    def fail(self, failure: PeerError) -> None:
        """Send the reason in place of the messages that this rank still owes."""
        reason = failure.message.rpartition(FAILED)[2]
        label = (FAILED + reason).encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
        for message in list(self._owed):
            with suppress(PeerError):
                self._transport.send(self._ranks[message.peer], self._tag(message), label, memoryview(b""))

    def tag_in_group(self, message: Message) -> int:
        """Return the tag of `message` among those of the group: 2**27 to 2**28, above those of single messages."""
        return self._first_tag + message.number % _MESSAGES

    def _tag(self, message: Message) -> int:
        return self._tag_base + self.tag_in_group(message)
