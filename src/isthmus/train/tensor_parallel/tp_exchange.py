"""`SharedExchange`: messages between stages where several ranks share one, each byte on the wire once.

All ranks of a stage have the same hidden states, whatever their number, so stages of unlike tensor
parallelism understand each other: the first rank sends and receives, and hands what came to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.train.messages.exchange import Exchange, Message, Work
from isthmus.train.messages.metrics import Account
from isthmus.train.tensor_parallel.tensor_group import TensorGroup


class Messenger(Protocol):
    """What the executor asks of an exchange; `start` returns what `wait` is given."""

    account: Account

    def start(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Start `messages`; return what to wait for, one each."""
        ...

    def wait(self, work: Any, *, arrived: bool = False) -> None:
        """Wait for a message, if `arrived` also for one sent far; `PeerError` where a peer was lost."""
        ...


@dataclass(frozen=True)
class SharedWork:
    """A message of the stage under way; `work` is that of its first rank, None at the others."""

    message: Message
    work: Work | None


class SharedExchange:
    """What the executor asks of an `Exchange`, for one of the ranks of `group`."""

    def __init__(self, exchange: Exchange, group: TensorGroup) -> None:
        self._exchange, self._group = exchange, group

    @property
    def account(self) -> Account:
        """The account of the present step."""
        return self._exchange.account

    @account.setter
    def account(self, account: Account) -> None:
        self._exchange.account = account

    def start(self, messages: Sequence[Message]) -> list[SharedWork]:
        """Start `messages`; return what to wait for, one each."""
        if self._group.index > 0:
            return [SharedWork(message, None) for message in messages]
        works = self._exchange.start(messages)
        return [SharedWork(message, work) for message, work in zip(messages, works, strict=True)]

    def wait(self, work: SharedWork, *, arrived: bool = False) -> None:
        """Wait for a message; what was received is then on all ranks. Raises `PeerError` as they do."""
        if work.work is not None:
            self._exchange.wait(work.work, arrived=arrived)
        if not work.message.is_send:
            start_s = self.account.clock()
            self._group.broadcast(work.message.tensor)
            self.account.exposed_communication_s += self.account.clock() - start_s
