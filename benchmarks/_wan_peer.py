"""One rank of `torch.distributed.pipelining` on the same virtual chips, for `benchmarks.wan_pipeline`.

Its public API alone: `PipelineStage` and `Schedule1F1B` over gloo. The modules wait as long as ours do.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks._wan_stage import TIMEOUT_S, StageJob, StepTime, begin, start_ns, together_s
from isthmus.core.plan import StageTime
from isthmus.train.communication.exact_sleep import sleep_exactly
from isthmus.wan import listen


class Chip(nn.Module):  # type: ignore[misc]
    """A stage that waits, and hands on zeros [B, S, H] (the last: [B, 1]); always the same memory."""

    def __init__(self, time: StageTime, shape: tuple[int, int], is_last: bool) -> None:
        super().__init__()
        self.time, self.is_last = time, is_last
        self.zeros = torch.zeros(1, *shape)
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take a micro-batch [B, S, H]."""
        result: torch.Tensor = _Wait.apply(x, self.anchor, self)
        return result


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, chip: Chip) -> torch.Tensor:
        ctx.chip, ctx.anchor = chip, anchor.detach()
        if x.is_meta:
            return x[:, :1, 0] if chip.is_last else torch.empty_like(x)
        sleep_exactly(chip.time.forward_s)
        return chip.zeros[:, :1, 0].detach() if chip.is_last else chip.zeros.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        del gradients
        sleep_exactly(ctx.chip.time.backward_s)
        return ctx.chip.zeros.detach(), ctx.anchor, None


def run_peer(job: StageJob, pipe: Connection) -> None:
    """Run the steps among all ranks of the job; send a `StepTime` of each back."""
    begin(job)
    rank, size = job.rank, len(job.clusters)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.namespace is None else "wan"
    listener = listen(job.hosts[rank])
    pipe.send(int(listener.getsockname()[1]))
    port, limit = pipe.recv()[0], timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(
        job.hosts[0],
        port,
        None,
        rank == 0,
        limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    chip = Chip(job.times[rank], job.shape, rank == size - 1)
    stage = PipelineStage(chip, rank, size, torch.device("cpu"))
    count = job.schedule.num_micro_batches
    schedule = Schedule1F1B(stage, count, loss_fn=lambda out, _: out.sum())
    whole = torch.zeros(1, *job.shape).expand(count, *job.shape)
    given = (whole,) if rank == 0 else ()
    labels = {"target": torch.zeros(count, 1)} if rank == size - 1 else {}
    steps = []
    for _ in range(job.steps):
        wanted = torch.tensor([start_ns()])
        dist.broadcast(wanted, 0)
        start_s = together_s(int(wanted))
        schedule.step(*given, **labels, return_outputs=False)
        steps.append(StepTime(start_s, time.time(), 0.0, 0.0))
    pipe.send(steps)
    dist.barrier()
    dist.destroy_process_group()
