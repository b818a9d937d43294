"""`ContextParallelGroup`: messages among the ranks that share the tokens of a sequence.

All ranks of a group start the same exchanges in the same order, so a message needs no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.pinned_memory import copy_tensors_to_host, empty_host_tensor
from isthmus.train.communication.stage_group import StageGroup
from isthmus.train.context_parallel.sequence_shares import SequenceShare

ContextKind: TypeAlias = Literal["gather", "ring", "all_to_all"]
"""How ranks exchange a sequence, as plans name it (`Stage.cp_kind`)."""


@dataclass(frozen=True, kw_only=True)
class GroupMessage:
    """A tensor to send to, or a buffer to receive from, rank `peer` of the group."""

    tensor: torch.Tensor
    peer: int
    is_send: bool
    # Tells messages of one exchange and pair apart.
    tag: int = 0


class ContextParallelGroup(StageGroup):
    """Rank `cp_rank` of the ranks that share a sequence, rank r the tokens `shares[r]`; usable after `join`.

    A single share is the whole sequence, and nothing is exchanged. `waited_s` is the total time spent in waits.
    """

    def __init__(
        self,
        cp_rank: int,
        shares: Sequence[SequenceShare],
        *,
        kind: ContextKind = "gather",
        clock: Callable[[], float] = steady_time_s,
    ) -> None:
        super().__init__("context-parallel", len(shares), clock)
        self.cp_rank, self.shares, self.kind = cp_rank, tuple(shares), kind

    @property
    def share(self) -> SequenceShare:
        """The tokens of this rank."""
        return self.shares[self.cp_rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence."""
        return sum(share.num_tokens for share in self.shares)

    def start(self, messages: Sequence[GroupMessage]) -> PendingExchange:
        """Start `messages`, contiguous tensors that stay unchanged until `PendingExchange.wait` returns."""
        devices = self._devices_for([one.tensor for one in messages])
        if devices is not None:
            with self._waiting():
                begun = [devices.start(one.tensor, one.peer, one.tag, is_send=one.is_send) for one in messages]
            return PendingExchange(self, begun, (), [one.tensor for one in messages])
        carried = [self._to_group_memory(one) for one in messages]
        with self._waiting():
            works = self._start(messages, carried)
        copies = [
            (one.tensor, memory)
            for one, memory in zip(messages, carried, strict=True)
            if not one.is_send and memory is not one.tensor
        ]
        return PendingExchange(self, works, copies, carried)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for works of the process group; raises `PeerError` if a peer is lost."""
        with self._timed():
            for work in works:
                work.wait()

    def _start(self, messages: Sequence[GroupMessage], carried: Sequence[torch.Tensor]) -> list[Any]:
        group = self._joined_group()
        if self._on_host:
            return [
                group.send([memory], one.peer, one.tag) if one.is_send else group.recv([memory], one.peer, one.tag)
                for one, memory in zip(messages, carried, strict=True)
            ]
        operations = [
            dist.P2POp(dist.isend if one.is_send else dist.irecv, memory, group=group, tag=one.tag, group_peer=one.peer)
            for one, memory in zip(messages, carried, strict=True)
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _to_group_memory(self, message: GroupMessage) -> torch.Tensor:
        """Return the memory that the group carries: the tensor's own, or pinned memory of the host."""
        if not self._is_staged(message.tensor):
            return message.tensor
        return copy_tensors_to_host([message.tensor])[0] if message.is_send else empty_host_tensor(message.tensor)


class PendingExchange:
    """Messages under way among the ranks of `group`."""

    def __init__(
        self,
        group: ContextParallelGroup,
        works: Sequence[Any],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        memory: Sequence[torch.Tensor],
    ) -> None:
        self._group, self._works, self._copies, self._memory = group, works, copies, memory

    def wait(self) -> None:
        """Wait until all have arrived and all sent memory is free; raises `PeerError` if a peer is lost."""
        self._group.wait(self._works)
        for target, memory in self._copies:
            target.copy_(memory, non_blocking=True)
        self._memory = ()


def whole_sequence(num_tokens: int) -> SequenceShare:
    """Return the share of a rank that has all of `num_tokens` tokens."""
    return SequenceShare(((0, num_tokens),))
