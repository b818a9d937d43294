"""`ExpertParallelGroup`: exchanges among the ranks that share the experts of their layers.

All ranks of a group start the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_error_text
from isthmus.core.errors import PeerError
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.pinned_memory import copy_tensors_to_host
from isthmus.train.liveness.peer_wait import waiting_for_peer


class ExpertParallelGroup:
    """Rank `expert_rank` of `ranks`, which hold equal numbers of the experts of a layer, in order.

    Usable after `join`; alone a rank holds all experts and exchanges nothing. `waited_s` is the total time spent in
    waits, `sent_bytes` the bytes of rows sent to other ranks.
    """

    def __init__(
        self, expert_rank: int = 0, ranks: Sequence[int] = (0,), *, clock: Callable[[], float] = steady_time_s
    ) -> None:
        self.expert_rank, self.ranks, self._clock = expert_rank, tuple(ranks), clock
        self.waited_s, self.sent_bytes = 0.0, 0
        self._group: dist.ProcessGroup | None = None
        self._on_host = True

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def join(self, group: dist.ProcessGroup, *, on_host: bool = True) -> None:
        """Use `group`, which has the ranks in order; `on_host` if it supports host memory only."""
        self._group, self._on_host = group, on_host

    def start(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingRows:
        """Start to send `sent[r]` consecutive rows of `rows` [N, ...] to each rank r; `received[r]` come from it.

        The sum of `sent` is N. `rows` stay unchanged until `PendingRows.wait` returns.
        """
        self.sent_bytes += (len(rows) - sent[self.expert_rank]) * rows[0].nbytes if len(rows) else 0
        return self._start(rows, sent, received)

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return what each rank has for this one: row r of `counts` [size, L] goes to rank r, and rows come by rank."""
        each = [1] * self.size
        return self._start(counts, each, each).wait()

    def _start(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingRows:
        carried = copy_tensors_to_host([rows])[0] if self._is_staged(rows) else rows.detach().contiguous()
        arriving = torch.empty(
            (sum(received), *rows.shape[1:]), dtype=rows.dtype, device=carried.device, pin_memory=self._is_staged(rows)
        )
        with self._waiting():
            work = self._joined_group().all_to_all_single(arriving, carried, list(received), list(sent))
        return PendingRows(self, work, (carried, arriving), rows.device)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` (of any shape) over all ranks, bit-identical on each."""
        if self.size == 1:
            return tensor
        result = (copy_tensors_to_host([tensor])[0] if self._is_staged(tensor) else tensor).clone()
        self.wait(self._joined_group().allreduce([result], dist.AllreduceOptions()))
        return result.to(tensor.device)

    def wait(self, work: Any) -> None:
        """Wait for a work of the process group; raises `PeerError` if a peer is lost."""
        start_s = self._clock()
        with self._waiting():
            work.wait()
        self.waited_s += self._clock() - start_s

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._on_host and tensor.device.type != "cpu"

    def _joined_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the expert-parallel group is used before `join`")
        return self._group

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark the thread as waiting for a peer; raise `PeerError` for an error of the process group."""
        try:
            with waiting_for_peer():
                yield
        except RuntimeError as error:
            raise PeerError(
                f"lost an expert-parallel rank of this stage: {gloo_error_text(error) or error}",
                hint="see its log for the cause; the job restarts automatically",
            ) from error


class PendingRows:
    """Rows on their way among the ranks of `group`."""

    def __init__(
        self, group: ExpertParallelGroup, work: Any, memory: tuple[torch.Tensor, torch.Tensor], device: torch.device
    ) -> None:
        self._group, self._work, self._memory, self._device = group, work, memory, device  # `memory`: sent, received

    def wait(self) -> torch.Tensor:
        """Return the received rows [M, ...], by rank; raises `PeerError` if a peer is lost."""
        self._group.wait(self._work)
        return self._memory[1].to(self._device, non_blocking=True)
