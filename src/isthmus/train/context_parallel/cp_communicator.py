"""`CpCommunicator`: hidden states between stages whose ranks share sequences: each rank sends its own tokens.

Between stages of equal degrees rank i sends to rank i. Otherwise each pair of ranks passes the tokens that both have,
so that every byte crosses the link once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from isthmus.core.plan import Plan
from isthmus.train.communication.communicator import Communicator, CommWork, TensorMessage
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.context_parallel.cp_process_group import stage_shares
from isthmus.train.context_parallel.sequence_shares import SequenceShare


@dataclass(frozen=True)
class SharedTokens:
    """Tokens that this rank and `peer` (global rank) both have: `rows` of this rank's, None for all of them."""

    peer: int
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class CpWork:
    """Handle of a message of the stage: its parts, each with the rows that it fills in the received tensor."""

    message: TensorMessage
    parts: tuple[tuple[CommWork, TensorMessage, SharedTokens], ...]


def shared_tokens(own: SequenceShare, shares: Sequence[SequenceShare], ranks: Sequence[int]) -> list[SharedTokens]:
    """Return the tokens of `own` that each of `ranks` has (rank by rank those of `shares`), empty sets left out."""
    found = []
    for peer, share in zip(ranks, shares, strict=True):
        held = set(share.positions)
        rows = tuple(row for row, position in enumerate(own.positions) if position in held)
        if rows:
            found.append(SharedTokens(peer, None if len(rows) == own.num_tokens else rows))
    return found


class CpCommunicator:
    """Messages of rank `rank` of `plan` with other stages of its pipeline, in parts; see `Communicator`.

    A message names the first rank of the other stage.
    """

    def __init__(self, communicator: Communicator, plan: Plan, rank: int) -> None:
        self._communicator = communicator
        stage = plan.stage_of(rank)
        own = stage_shares(plan, stage)[plan.ranks[rank].cp]
        self._parts = {
            plan.ranks_of(number)[0]: shared_tokens(own, stage_shares(plan, other), plan.cp_ranks_of(number))
            for number, other in enumerate(plan.stages)
            if other.replica == stage.replica
        }

    @property
    def timer(self) -> StepTimer:
        """Times of the current step."""
        return self._communicator.timer

    @timer.setter
    def timer(self, account: StepTimer) -> None:
        self._communicator.timer = account

    def start(self, messages: Sequence[TensorMessage]) -> list[CpWork]:
        """Start `messages` in parts; return one handle for each."""
        parts = [[self._part(message, one) for one in self._parts[message.peer]] for message in messages]
        works = iter(self._communicator.start([part for of_message in parts for part in of_message]))
        return [
            CpWork(
                message,
                tuple(
                    (next(works), part, one)
                    for part, one in zip(of_message, self._parts[message.peer], strict=True)
                ),
            )
            for message, of_message in zip(messages, parts, strict=True)
        ]  # fmt: skip

    def wait(self, work: CpWork, *, until_delivered: bool = False) -> None:
        """Wait for all parts of a message, and put received ones in place; raises `PeerError` if a peer is lost."""
        for one, part, tokens in work.parts:
            self._communicator.wait(one, until_delivered=until_delivered)
            if not part.is_send and tokens.rows is not None:
                rows = torch.tensor(tokens.rows, device=part.tensor.device)
                work.message.tensor.index_copy_(1, rows, part.tensor)

    def _part(self, message: TensorMessage, tokens: SharedTokens) -> TensorMessage:
        """Return the part of `message` [B, S, H] that consists of `tokens`."""
        if tokens.rows is None:
            return replace(message, peer=tokens.peer)
        rows, tensor = torch.tensor(tokens.rows, device=message.tensor.device), message.tensor
        part = (
            tensor.index_select(1, rows)
            if message.is_send
            else tensor.new_empty(tensor.shape[0], len(tokens.rows), *tensor.shape[2:])
        )
        return replace(message, tensor=part, peer=tokens.peer)
