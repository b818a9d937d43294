"""ZeRO 2 and 3 over four ranks of one cluster: bytes held beside the memory model, and a step beside `fully_shard`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._collective_ranks import gloo_joined
from benchmarks._wan_run import Bed, launch
from benchmarks._wan_stage import StageJob, begin, joined
from benchmarks.table import Row, compared
from isthmus.core.job import TrainingConfig
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.plan.memory.plan_stage_memory import plan_stage_memory
from isthmus.plan.profile.model_profile import profile_model
from isthmus.schedule import gpipe, make_schedule
from isthmus.train.communication.communicator import Communicator
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.optimizer import Optimizer
from isthmus.train.update.replica_layout import exchange_ownership
from isthmus.train.update.sharding.layer_gathering import layer_gathering
from isthmus.train.update.sharding.shard_exchange import ShardExchange, summed_buckets

NUM_LAYERS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 2048, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
RANKS, LENGTH, MICRO_BATCHES, LEARNING_RATE = 4, 64, 2, 1e-3


@dataclass(frozen=True)
class ZeroRun:
    """What a rank has seen: the losses of its samples and the seconds by step, and the most bytes that it held."""

    losses: tuple[float, ...]
    steps_s: tuple[float, ...]
    gradient_bytes: int = 0
    weight_bytes: int = 0
    # CPU seconds of the rank by step, all threads together.
    cpu_s: tuple[float, ...] = ()


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    rounds, steps = (1, 4) if quick else (3, 6)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(CONFIG), encoding="utf-8")
        ways: dict[str, Callable[[StageJob, Connection], None]] = {
            "zero 3": partial(run_sharded, folder=folder, zero=3),
            "fully_shard": partial(run_fully_shard, folder=folder),
        }
        turns: dict[str, list[list[ZeroRun]]] = {name: [] for name in ways}
        for _ in range(rounds):  # by turns: the machine has other work too
            for name, way in ways.items():
                turns[name].append(_launched(way, steps))
        runs = {
            "zero 2": _launched(partial(run_sharded, folder=folder, zero=2), 1),
            **{name: [_joined(each) for each in zip(*of, strict=True)] for name, of in turns.items()},
        }
        return [*_memory_rows(model, runs), *_step_rows(runs)]


def _joined(runs: Sequence[ZeroRun]) -> ZeroRun:
    """Return the runs of one rank as one, without the first step of each."""
    return ZeroRun(
        tuple(one for each in runs for one in each.losses),
        tuple(one for each in runs for one in each.steps_s[1:]),
        max(one.gradient_bytes for one in runs),
        max(one.weight_bytes for one in runs),
        tuple(one for each in runs for one in each.cpu_s[1:]),
    )


def _launched(run: Callable[[StageJob, Connection], None], steps: int) -> list[ZeroRun]:
    found: list[ZeroRun] = launch(Bed(), "a" * RANKS, gpipe(RANKS, 1), (), (1, 1), steps, run)
    return found


def _memory_rows(model: Path, runs: dict[str, list[ZeroRun]]) -> list[Row]:
    profile, rows = profile_model(load_model(model)), []
    for zero in (2, 3):
        plan, found = _plan(zero), runs[f"zero {zero}"]
        counted = plan_stage_memory(plan, profile, plan.pipeline(0), 0)
        parts = [("gradients", max(one.gradient_bytes for one in found), counted.gradients_bytes)]
        if zero == 3:
            parts.append(("weights", max(one.weight_bytes for one in found), counted.weights_bytes))
        for what, held, expected in parts:
            rows.append(
                compared(f"memory, ZeRO {zero}, {RANKS} ranks: {what} held", held / 2**20, "MiB", "the memory model",
                         expected / 2**20, target="within 2 %", met=abs(held / expected - 1) <= 0.02)
            )  # fmt: skip
    return rows


def _step_rows(runs: dict[str, list[ZeroRun]]) -> list[Row]:
    peer = runs["fully_shard"]
    times = {
        name: [1e3 * max(each) for each in zip(*(rank.steps_s for rank in of), strict=True)]
        for name, of in runs.items()
        if name != "zero 2"
    }
    total = {name: [sum(each) for each in zip(*(rank.losses for rank in of), strict=True)] for name, of in runs.items()}
    apart = max(abs(a - b) / b for a, b in zip(total["zero 3"], total["fully_shard"], strict=True))
    ours, theirs = statistics.median(times["zero 3"]), statistics.median(times["fully_shard"])
    spread = f"{min(times['zero 3']):.0f} to {max(times['zero 3']):.0f} ms, there "
    spread += f"{min(times['fully_shard']):.0f} to {max(times['fully_shard']):.0f}"
    own_cpu, peer_cpu = (statistics.median(map(sum, zip(*(one.cpu_s for one in runs[name]), strict=True)))
                         for name in ("zero 3", "fully_shard"))  # fmt: skip
    return [
        Row(what=f"ZeRO-3 step, {RANKS} ranks: loss apart from fully_shard's over {len(peer[0].losses)} steps, most",
            ours=apart, unit="of the loss", target="1e-4", met=apart <= 1e-4),
        compared(f"ZeRO-3 step, {RANKS} ranks ({spread})", ours, "ms", "fully_shard over gloo", theirs,
                 target="no slower", met=ours <= theirs),
        compared(f"ZeRO-3 step, {RANKS} ranks: CPU of all ranks", own_cpu, "CPU s", "fully_shard over gloo", peer_cpu),
    ]  # fmt: skip


def run_sharded(job: StageJob, pipe: Connection, *, zero: int, folder: str) -> None:
    """Train under ZeRO stage `zero` over isthmus; send a `ZeroRun` back."""
    with joined(job, pipe) as communicator:
        pipe.send(_train_sharded(job, communicator, zero, folder))


def run_fully_shard(job: StageJob, pipe: Connection, *, folder: str) -> None:
    """Train by torch's `fully_shard` over gloo; send a `ZeroRun` back."""
    begin(job)
    with gloo_joined(job, pipe):
        pipe.send(_train_fully_sharded(job, folder))


def _plan(zero: int) -> Plan:
    stage = {"cluster": "a", "node_group": "cpu", "layers": (0, NUM_LAYERS)}
    return Plan.model_validate(
        {
            "id": "p", "stages": [stage], "dp": RANKS, "equal_replicas": True, "micro_batches": MICRO_BATCHES,
            "micro_batch_size": 1, "sequence_length": LENGTH, "zero": zero, "precision": "fp32",
        }
    )  # fmt: skip


def _training(steps: int) -> TrainingConfig:
    return TrainingConfig(
        steps=steps, learning_rate=LEARNING_RATE, min_learning_rate=LEARNING_RATE, warmup_steps=0, clip_norm=0,
        precision="fp32", weight_decay=0.0,
    )  # fmt: skip


def _batches(rank: int, step: int) -> MicroBatches:
    """Return the micro-batches of a rank in a step: tokens that follow from each other."""
    vocabulary, samples = int(str(CONFIG["vocab_size"])), RANKS * MICRO_BATCHES
    columns = [torch.randint(vocabulary, (samples, 1), generator=torch.Generator().manual_seed(step))]
    for _ in range(LENGTH):
        columns.append((columns[-1] * 5 + 3) % vocabulary)
    tokens = torch.cat(columns, 1)
    rows = rank * MICRO_BATCHES, (rank + 1) * MICRO_BATCHES
    return MicroBatches.split(samples, 1, LENGTH, tokens[:, :-1], tokens[:, 1:], rows)


def _train_sharded(job: StageJob, communicator: Communicator, zero: int, folder: str) -> ZeroRun:
    plan, training = _plan(zero), _training(job.steps)
    layers = plan.stages[0].layers
    chunks = ModelChunks([build_stage(folder, layers, dtype=torch.float32, device="cpu", seed=1, weights="random")])
    ownership = exchange_ownership(chunks, job.rank, job.clusters, communicator, zero=zero)
    exchange = ShardExchange(ownership.buckets, job.rank, communicator)
    exchange.form_groups()
    optimizer = Optimizer(
        chunks.global_named_parameters(), training, sum_over_all=communicator.sum_over_all, ownership=ownership,
        reducer=GradientReducer(summed_buckets(ownership, zero), job.rank, communicator),
        exchange=exchange,
        gathers=zero == 3,
    )  # fmt: skip
    optimizer.by_layer = layer_gathering(optimizer.gatherer, chunks)
    executor = StageExecutor(
        chunks, 0, (job.rank,), communicator, dtype=torch.float32,
        final_backward=lambda chunk: optimizer.final_backward(chunks.names_of(chunk)),
    )  # fmt: skip
    schedule, held, steps = make_schedule("1f1b", 1, MICRO_BATCHES), [0], _Steps()
    optimizer.adam.register_step_pre_hook(lambda adam, *_: held.append(_gradient_bytes(adam)))
    for step in range(job.steps):
        batches = _batches(job.rank, step)
        with steps.timed():
            optimizer.begin_step()
            loss = executor.run(schedule, batches, StepTimer(), partial(_apply, optimizer, step)).loss
        steps.losses.append(loss or 0.0)
    dist.barrier()
    kept = 0 if optimizer.gatherer is None else optimizer.gatherer.kept_bytes
    return ZeroRun(tuple(steps.losses), tuple(steps.seconds), max(held), kept, tuple(steps.cpu_s))


def _train_fully_sharded(job: StageJob, folder: str) -> ZeroRun:
    """Train the same model and samples; as ours, gradients are reduced after each micro-batch."""
    stage = build_stage(folder, (0, NUM_LAYERS), dtype=torch.float32, device="cpu", seed=1, weights="random")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
    model.load_state_dict({name: weight.detach() for name, weight in stage.global_named_parameters()})
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam, steps = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True), _Steps()
    training = _training(job.steps)
    for group in adam.param_groups:
        group |= {"betas": (training.beta1, training.beta2), "eps": training.epsilon}
    for step in range(job.steps):
        batches, total = _batches(job.rank, step), torch.zeros(())
        with steps.timed():
            for ids, labels in zip(batches.inputs, batches.labels, strict=True):
                logits = model(input_ids=ids, use_cache=False).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = loss * batches.token_weight
                (loss * RANKS).backward()  # gradients are averaged over ranks
                total += loss.detach()
            adam.step()
            adam.zero_grad()
        steps.losses.append(float(total))
    return ZeroRun(tuple(steps.losses), tuple(steps.seconds), cpu_s=tuple(steps.cpu_s))


class _Steps:
    """The losses of a run, and the seconds of its steps, which begin together, with the CPU seconds of this process."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        dist.barrier()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - start_s)
        self.cpu_s.append(time.process_time() - cpu_s)


def _apply(optimizer: Optimizer, step: int) -> None:
    optimizer.apply(step)


def _gradient_bytes(adam: torch.optim.Optimizer) -> int:
    gradients = (one.grad for group in adam.param_groups for one in group["params"])
    return sum(one.nbytes for one in gradients if one is not None)
