"""`TpCommunicator`: messages between stages with tensor parallelism; every byte crosses the link once.

All ranks of a stage have the same hidden states, so stages with different tp degrees are compatible: the
first rank sends and receives, then broadcasts what it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.train.communication.communicator import TensorMessage
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup


class StageCommunicator(Protocol):
    """Messages as the stage executor needs them; `start` returns handles for `wait`."""

    timer: StepTimer

    def start(self, messages: Sequence[TensorMessage]) -> Sequence[Any]:
        """Start `messages`; return one handle for each."""
        ...

    def wait(self, work: Any, *, until_delivered: bool = False) -> None:
        """Wait for a message; with `until_delivered` also until one sent to another cluster is acknowledged.

        Raises `PeerError` if a peer is lost.
        """
        ...


@dataclass(frozen=True)
class TpWork:
    """Handle of a message of the stage; `work` is None except on the first tensor-parallel rank."""

    message: TensorMessage
    work: Any


class TpCommunicator:
    """A `StageCommunicator` for one of the tensor-parallel ranks of `group`."""

    def __init__(self, communicator: StageCommunicator, group: TensorParallelGroup) -> None:
        self._communicator, self._group = communicator, group

    @property
    def timer(self) -> StepTimer:
        """Times of the current step."""
        return self._communicator.timer

    @timer.setter
    def timer(self, account: StepTimer) -> None:
        self._communicator.timer = account

    def start(self, messages: Sequence[TensorMessage]) -> list[TpWork]:
        """Start `messages` on the first rank; return one handle for each on all ranks."""
        if self._group.tp_rank > 0:
            return [TpWork(message, None) for message in messages]
        works = self._communicator.start(messages)
        return [TpWork(message, work) for message, work in zip(messages, works, strict=True)]

    def wait(self, work: TpWork, *, until_delivered: bool = False) -> None:
        """Wait for a message and broadcast a received one; raises `PeerError` if a peer is lost."""
        if work.work is not None:
            self._communicator.wait(work.work, until_delivered=until_delivered)
        if not work.message.is_send:
            start_s = self.timer.clock()
            self._group.broadcast(work.message.tensor)
            self.timer.exposed_communication_s += self.timer.clock() - start_s
