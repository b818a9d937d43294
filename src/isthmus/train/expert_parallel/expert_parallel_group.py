"""`ExpertParallelGroup`: exchanges among the ranks that share the experts of their layers.

All ranks of a group start the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isthmus.comm.group.collective_work import JoinedWork
from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.device_exchange import DeviceExchange
from isthmus.train.communication.pinned_memory import copy_tensors_to_host
from isthmus.train.communication.stage_group import StageGroup


class ExpertParallelGroup(StageGroup):
    """Rank `expert_rank` of `ranks`, which hold equal numbers of the experts of a layer, in order.

    Usable after `join`; alone a rank holds all experts and exchanges nothing. `waited_s` is the total time spent in
    waits, `sent_bytes` the bytes of rows sent to other ranks.
    """

    def __init__(
        self, expert_rank: int = 0, ranks: Sequence[int] = (0,), *, clock: Callable[[], float] = steady_time_s
    ) -> None:
        super().__init__("expert-parallel", len(ranks), clock)
        self.expert_rank, self.ranks = expert_rank, tuple(ranks)
        self.sent_bytes = 0

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
        devices = self._devices_for([rows])
        if devices is not None:
            return self._start_on_device(devices, rows.detach().contiguous(), sent, received)
        carried = copy_tensors_to_host([rows])[0] if self._is_staged(rows) else rows.detach().contiguous()
        arriving = torch.empty(
            (sum(received), *rows.shape[1:]), dtype=rows.dtype, device=carried.device, pin_memory=self._is_staged(rows)
        )
        with self._waiting():
            work = self._joined_group().all_to_all_single(arriving, carried, list(received), list(sent))
        return PendingRows(self, work, (carried, arriving), rows.device)

    def _start_on_device(
        self, devices: DeviceExchange, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> PendingRows:
        """Start a message to and from each rank that has rows [N, ...] to pass."""
        arriving, own = rows.new_empty(sum(received), *rows.shape[1:]), self.expert_rank
        outgoing, incoming = rows.split(list(sent)), arriving.split(list(received))
        incoming[own].copy_(outgoing[own])
        works = []
        with self._waiting():
            for turn in range(1, self.size):
                source, to = (own - turn) % self.size, (own + turn) % self.size
                if received[source]:
                    works.append(devices.start(incoming[source], source, is_send=False))
                if sent[to]:
                    works.append(devices.start(outgoing[to], to, is_send=True))
        return PendingRows(self, JoinedWork(works), (rows, arriving), rows.device)

    def wait(self, work: Any) -> None:
        """Wait for a work of the process group; raises `PeerError` if a peer is lost."""
        with self._timed():
            work.wait()


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
