"""Part `context` of `benchmarks.parallel`: a layer on 16,384 tokens that 4 ranks share, beside one rank with them all.

A machine of fewer cores than ranks computes a quarter of the work in more than a quarter of the time: the bound is the
one rank's time over the cores that the ranks can use. CPU seconds say what sharing costs whatever the machine does
besides. Bytes are those that a forward pass keeps for its backward pass.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._wan_run import Bed, launch
from benchmarks._wan_stage import StageJob, joined
from benchmarks.table import Row, compared
from isthmus.schedule import gpipe
from isthmus.train.context_parallel.context_parallel_group import (
    ContextKind,
    ContextParallelGroup,
    GroupMessage,
    whole_sequence,
)
from isthmus.train.context_parallel.sequence_shares import share_sequence
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.test_stage_model_memory import LiveBytes

RANKS, HIDDEN, HEADS = 4, 128, 4
KINDS: tuple[ContextKind, ...] = ("ring", "gather", "all_to_all")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 352,
    "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS,
    "vocab_size": 512, "max_position_embeddings": 2**14,
}  # fmt: skip


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes at one rank: seconds, CPU seconds, and bytes kept between them.

    `exchange_s` is what keys, values and their gradients take to go round with nothing computed.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    kept_bytes: int
    exchange_s: float = 0.0


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    tokens, passes = (2**11, 1) if quick else (2**14, 3)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        (alone,) = _launched("a", tokens, passes, folder, "gather")
        shared = {kind: _launched("a" * RANKS, tokens, passes, folder, kind) for kind in KINDS}
    return [
        row for kind, found in shared.items() for row in _rows(f"cp {RANKS}, {tokens:,} tokens, {kind}", alone, found)
    ]


def _launched(clusters: str, tokens: int, passes: int, folder: str, kind: ContextKind) -> list[Passes]:
    run = partial(run_passes, tokens=tokens, folder=folder, kind=kind)
    found: list[Passes] = launch(Bed(), clusters, gpipe(len(clusters), 1), (), (1, 1), passes, run)
    return found


def _rows(what: str, alone: Passes, found: Sequence[Passes]) -> list[Row]:
    wall_s = statistics.median(max(each) for each in zip(*(one.wall_s for one in found), strict=True))
    cores = min(RANKS, len(os.sched_getaffinity(0)))
    computing_s, exchange_s = statistics.median(alone.wall_s) / cores, max(one.exchange_s for one in found)
    bound_s = max(computing_s, exchange_s)
    cpu_s = statistics.median(sum(each) for each in zip(*(one.cpu_s for one in found), strict=True))
    cpu_alone_s = statistics.median(alone.cpu_s)
    kept = max(one.kept_bytes for one in found)
    return [
        compared(
            f"{what}: forward and backward pass of a layer (exchange alone {1e3 * exchange_s:.0f} ms)", 1e3 * wall_s,
            "ms", f"computing over {cores} cores, or the exchange", 1e3 * bound_s,
            target="within 10 % of the longer", met=wall_s <= 1.1 * bound_s,
        ),
        compared(
            f"{what}: CPU of all ranks", cpu_s, "CPU s", "one rank with all tokens", cpu_alone_s,
            target="within 10 %", met=cpu_s <= 1.1 * cpu_alone_s,
        ),
        compared(f"memory, {what}: kept by a rank", kept / 2**20, "MiB", "a quarter of one rank's",
                 alone.kept_bytes / RANKS / 2**20, target="5 % more", met=kept <= 1.05 * alone.kept_bytes / RANKS),
    ]  # fmt: skip


def run_passes(job: StageJob, pipe: Connection, *, tokens: int, folder: str, kind: ContextKind) -> None:
    """Compute a layer forward and backward with the other ranks; send a `Passes` back."""
    with joined(job, pipe):
        size = len(job.clusters)
        shares = share_sequence(tokens, [1.0] * size, 1) if size > 1 else (whole_sequence(tokens),)
        group = ContextParallelGroup(job.rank, shares, kind=kind)
        group.join(dist.group.WORLD)
        context = group if size > 1 else None
        stage = build_stage(
            folder, (1, 2), dtype=torch.float32, device="cpu", seed=1, weights="random", context=context
        )
        num = group.share.num_tokens
        x = torch.randn(1, num, HIDDEN, generator=torch.Generator().manual_seed(job.rank))
        kept, wall_s, cpu_s = 0, [], []
        for _ in range(job.steps):
            dist.barrier()
            start_s, cpu = time.perf_counter(), time.process_time()
            out = stage.compute(x.requires_grad_())[0]
            out.sum().backward()
            wall_s.append(time.perf_counter() - start_s)
            cpu_s.append(time.process_time() - cpu)
        kept = _kept_bytes(stage, x)
        dist.barrier()
        pipe.send(Passes(tuple(wall_s[1:]), tuple(cpu_s[1:]), kept, _exchange_s(group) if size > 1 else 0.0))


def _kept_bytes(stage: StageModel, x: torch.Tensor) -> int:
    """Return the bytes that a forward pass keeps of `x` [1, tokens, H], its input and its result included."""
    live = LiveBytes()
    with live:
        out = stage.compute(x)[0]
    kept = live.now + x.nbytes
    out.sum().backward()
    return kept


def _exchange_s(group: ContextParallelGroup) -> float:
    """Return the seconds in which keys and values go round twice, and their gradients once."""
    own = torch.ones(2, 1, HEADS, group.share.num_tokens, HIDDEN // HEADS)
    after, before = (group.cp_rank + 1) % group.size, (group.cp_rank - 1) % group.size
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(3 * (group.size - 1)):
        arriving = torch.empty_like(own)
        sent = GroupMessage(tensor=own, peer=after, is_send=True)
        group.start([sent, GroupMessage(tensor=arriving, peer=before, is_send=False)]).wait()
    return time.perf_counter() - start_s
