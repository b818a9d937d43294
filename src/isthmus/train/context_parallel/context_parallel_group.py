"""`ContextParallelGroup`: messages among the ranks that share the tokens of a sequence.

All ranks of a group start the same exchanges in the same order, so a message needs no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.core.errors import PeerError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.pinned_memory import copy_tensors_to_host, empty_host_tensor
from isthmus.train.context_parallel.sequence_shares import SequenceShare
from isthmus.train.liveness.peer_wait import waiting_for_peer

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


class ContextParallelGroup:
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
        self.cp_rank, self.shares, self.kind, self._clock = cp_rank, tuple(shares), kind, clock
        self.waited_s = 0.0
        self._group: dist.ProcessGroup | None = None
        self._on_host = True

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def share(self) -> SequenceShare:
        """The tokens of this rank."""
        return self.shares[self.cp_rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence."""
        return sum(share.num_tokens for share in self.shares)

    def join(self, group: dist.ProcessGroup, *, on_host: bool = True) -> None:
        """Use `group`, which has the ranks in order; `on_host` if it supports host memory only."""
        self._group, self._on_host = group, on_host

    def start(self, messages: Sequence[GroupMessage]) -> PendingExchange:
        """Start `messages`, contiguous tensors that stay unchanged until `PendingExchange.wait` returns."""
        carried = [self._to_group_memory(one) for one in messages]
        with self._waiting():
            works = self._start(messages, carried)
        copies = [
            (one.tensor, memory)
            for one, memory in zip(messages, carried, strict=True)
            if not one.is_send and memory is not one.tensor
        ]
        return PendingExchange(self, works, copies, carried)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` (of any shape) over all ranks, bit-identical on each."""
        if self.size == 1:
            return tensor
        result = (copy_tensors_to_host([tensor])[0] if self._is_staged(tensor) else tensor).clone()
        with self._timed():
            self._joined_group().allreduce([result], dist.AllreduceOptions()).wait()
        return result.to(tensor.device)

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

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._on_host and tensor.device.type != "cpu"

    def _to_group_memory(self, message: GroupMessage) -> torch.Tensor:
        """Return the memory that the group carries: the tensor's own, or pinned memory of the host."""
        if not self._is_staged(message.tensor):
            return message.tensor
        return copy_tensors_to_host([message.tensor])[0] if message.is_send else empty_host_tensor(message.tensor)

    def _joined_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the context-parallel group is used before `join`")
        return self._group

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = self._clock()
        with self._waiting():
            yield
        self.waited_s += self._clock() - start_s

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark the thread as waiting for a peer; raise `PeerError` for an error of the process group."""
        try:
            with waiting_for_peer():
                yield
        except RuntimeError as error:
            raise PeerError(
                f"lost a context-parallel rank of this stage: {gloo_error_text(error) or error}",
                hint="see its log for the cause; the job restarts automatically",
            ) from error


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
