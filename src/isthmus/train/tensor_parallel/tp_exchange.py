"""`SharedExchange`: messages between stages with tensor parallelism; every byte crosses the link once.

All ranks of a stage have the same hidden states, so stages with different tp degrees are compatible: the
first rank sends and receives, then broadcasts what it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.train.messages.exchange import Exchange, Message, Work
from isthmus.train.messages.metrics import Account
from isthmus.train.tensor_parallel.tensor_group import TensorGroup


class Messenger(Protocol):
    """Messages as the stage executor needs them; `start` returns handles for `wait`."""

    account: Account

    def start(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Start `messages`; return one handle for each."""
        ...

    def wait(self, work: Any, *, arrived: bool = False) -> None:
        """Wait for a message; with `arrived` also until one sent to another cluster is acknowledged.

        Raises `PeerError` if a peer is lost.
        """
        ...


@dataclass(frozen=True)
class SharedWork:
    """Handle of a message of the stage; `work` is None except on the first tensor-parallel rank."""

    message: Message
    work: Work | None


class SharedExchange:
    """A `Messenger` for one of the tensor-parallel ranks of `group`."""

    def __init__(self, exchange: Exchange, group: TensorGroup) -> None:
        self._exchange, self._group = exchange, group

    @property
    def account(self) -> Account:
        """Times of the current step."""
        return self._exchange.account

    @account.setter
    def account(self, account: Account) -> None:
        self._exchange.account = account

    def start(self, messages: Sequence[Message]) -> list[SharedWork]:
        """Start `messages` on the first rank; return one handle for each on all ranks."""
        if self._group.index > 0:
            return [SharedWork(message, None) for message in messages]
        works = self._exchange.start(messages)
        return [SharedWork(message, work) for message, work in zip(messages, works, strict=True)]

    def wait(self, work: SharedWork, *, arrived: bool = False) -> None:
        """Wait for a message and broadcast a received one; raises `PeerError` if a peer is lost."""
        if work.work is not None:
            self._exchange.wait(work.work, arrived=arrived)
        if not work.message.is_send:
            start_s = self.account.clock()
            self._group.broadcast(work.message.tensor)
            self.account.exposed_communication_s += self.account.clock() - start_s
