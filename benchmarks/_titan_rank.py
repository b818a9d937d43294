"""One rank that trains torchtitan's Llama over gloo on the CPU, as its trainer does, for `benchmarks.parallel`.

`python -m benchmarks._titan_rank JSON`: the arguments are those of `TitanJob`. Prints the seconds of each step and its
loss at this rank as JSON. torchtitan's own functions build model, pipeline, shards, slices and optimizer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class TitanJob:
    """What a rank does. `folder` is where torchtitan is installed, if it is not in the environment.

    A replica's batch is [micro_batches * micro_batch_size, length] tokens; without a pipeline it computes micro-batches
    one by one and adds up their gradients.
    """

    folder: str
    rank: int
    # File by which the ranks meet.
    store: str
    steps: int
    pp: int
    tp: int
    shards: int
    width: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    micro_batches: int
    micro_batch_size: int
    learning_rate: float


def main(argument: str) -> None:
    """Train, and print seconds and losses."""
    job = TitanJob(**json.loads(argument))
    if job.folder:
        sys.path.append(job.folder)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = job.pp * job.tp * job.shards
    dist.init_process_group("gloo", store=dist.FileStore(job.store, size), rank=job.rank, world_size=size)
    print(json.dumps(_train(job)), flush=True)
    dist.destroy_process_group()


def _train(job: TitanJob) -> dict[str, list[float]]:
    import torchtitan.distributed.parallel_dims as dims_module
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import utils as titan
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    dims_module.device_type = "cpu"  # it takes a GPU for granted where torch sees no other accelerator
    dims = dims_module.ParallelDims(
        dp_replicate=1, dp_shard=job.shards, cp=1, tp=job.tp, pp=job.pp, ep=1, etp=1,
        world_size=dist.get_world_size(),
    )  # fmt: skip
    config = JobConfig()
    config.training.seq_len, config.training.mixed_precision_param = job.length, "float32"
    config.training.local_batch_size = job.micro_batches * job.micro_batch_size
    config.parallelism.pipeline_parallel_degree = job.pp
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = job.micro_batch_size
    config.parallelism.pipeline_parallel_first_stage_less_layers = 0
    config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    config.activation_checkpoint.mode = "none"
    torch.manual_seed(1)
    model = Transformer(
        TransformerModelArgs(
            dim=job.width, n_layers=job.layers, n_heads=job.heads, vocab_size=job.vocabulary, multiple_of=128,
            max_seq_len=job.length,
        )
    )  # fmt: skip
    model.init_weights()
    loss_fn, schedule = build_cross_entropy_loss(config), None
    if dims.pp_enabled:
        schedule, parts, is_first, is_last = pipeline_llm(
            model, dims, config, torch.device("cpu"), model.model_args, parallelize_llama, loss_fn
        )
    else:
        parts, is_first, is_last = [parallelize_llama(model, dims, config)], True, True
    parameters = [one for part in parts for one in part.parameters()]
    adam = torch.optim.AdamW(parameters, lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=job.tp == 1)
    in_step = titan.get_train_context(dims.tp_enabled, enable_compiled_autograd=False)
    seconds, losses = [], []
    replica = dims.world_mesh["dp"].get_local_rank() if dims.dp_enabled else 0
    for step in range(job.steps):
        tokens = _tokens(job, step * job.shards + replica)
        dist.barrier()
        start_s = time.perf_counter()
        adam.zero_grad()
        loss = _passes(job, schedule, parts, loss_fn, in_step, tokens, is_first, is_last)
        titan.clip_grad_norm_(parameters, 1.0, foreach=True, pp_mesh=dims.world_mesh["pp"] if dims.pp_enabled else None)
        adam.step()
        seconds.append(time.perf_counter() - start_s)
        losses.append(loss)
    return {"seconds": seconds, "losses": losses}


def _passes(
    job: TitanJob, schedule: Any, parts: list[Any], loss_fn: Any, in_step: Any, tokens: torch.Tensor, is_first: bool,
    is_last: bool,
) -> float:  # fmt: skip
    """Compute the gradients of a batch as torchtitan's trainer does; return its loss here, -1 at an earlier stage."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    context: AbstractContextManager[None]
    if schedule is not None:
        losses: list[torch.Tensor] | None = [] if is_last else None
        target = labels if is_last else None
        with in_step(None) as context:  # noqa: F841
            if is_first:
                schedule.step(inputs, target=target, losses=losses)
            else:
                schedule.step(target=target, losses=losses)
        return float(torch.stack(losses).sum()) if losses else -1.0
    total = 0.0
    for ids, wanted in zip(inputs.split(job.micro_batch_size), labels.split(job.micro_batch_size), strict=True):
        with in_step(None):
            loss = loss_fn(parts[0](ids), wanted) / job.micro_batches
            loss.backward()
        total += float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
    return total


def _tokens(job: TitanJob, seed: int) -> torch.Tensor:
    """Return the tokens of a replica's batch [samples, length + 1], which follow from each other."""
    samples = job.micro_batches * job.micro_batch_size
    columns = [torch.randint(job.vocabulary, (samples, 1), generator=torch.Generator().manual_seed(seed))]
    for _ in range(job.length):
        columns.append((columns[-1] * 5 + 3) % job.vocabulary)
    return torch.cat(columns, 1)


if __name__ == "__main__":
    main(sys.argv[1])
