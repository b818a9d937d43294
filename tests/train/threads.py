"""A pipeline whose stages are threads of this process, joined by the in-memory transport: quick and exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.transport_messages import GROUP_TAGS
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.base_model import TrainingPrecision
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.schedule import forward_only, make_schedule
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.kernels.linear_products import BlockScaledProducts
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.update.buckets import BUCKET_ELEMENTS
from isthmus.train.update.gradient_options import GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.local_steps.make_local_steps import make_local_steps
from isthmus.train.update.optimizer import Optimizer, UpdateResult
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.replica_layout import held_rows_of, rank_groups
from isthmus.train.update.sharding.layer_gathering import layer_gathering
from isthmus.train.update.sharding.shard_exchange import ShardExchange, summed_buckets
from tests.train.devices import staging_for

LONG, SAMPLED, SHORT = 200, 60, 10
"""Steps that curves are compared over: all of them if asked; else of a sample of the cases, and of the others.

`test_long_curves.py` goes all the way with one case in every run.
"""


class GroupExchange(Communicator):
    """An exchange over a group that is not torch's default one, of which a process has only one."""

    def __init__(self, clusters: Sequence[str], group: IsthmusGroup, staging: HostStaging | None = None) -> None:
        super().__init__(clusters, group.rank(), staging=staging)
        self.group, self.num_made = group, 0

    @property
    def isthmus_group(self) -> IsthmusGroup:
        return self.group

    def make_group(self, ranks: Sequence[int]) -> IsthmusGroup | None:
        self.num_made += 1
        if self.group.rank() not in ranks:
            return None
        tags = (1000 + self.num_made) * GROUP_TAGS
        return IsthmusGroup(self.group.transport, self.clusters, ranks=ranks, tag_base=tags)

    def start_message(self, message: TensorMessage) -> dist.Work:
        start = self.group.send if message.is_send else self.group.recv
        return start([message.tensor], message.peer, message.tag)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        self.group.allreduce([tensor]).wait()


@dataclass
class Stage:
    """What one thread holds, and what it has seen."""

    model: ModelChunks
    executor: StageExecutor
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    balance_losses: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    accounts: list[StepTimer] = field(default_factory=list)


def meet(
    models: Sequence[ModelChunks],
    groups: Sequence[IsthmusGroup],
    clusters: str,
    training: TrainingConfig,
    *,
    staging: HostStaging | None = None,
    zero: int = 0,
    bucket_elements: int = BUCKET_ELEMENTS,
    on_host: bool = False,
    overlap: bool = False,
    precisions: Sequence[TrainingPrecision] = (),
    plan: Plan | None = None,
) -> list[tuple[GroupExchange, Optimizer]]:
    """Return exchange and optimizer of every rank, given its pieces of the model; `plan` says of local steps."""
    held, found = [held_rows_of(model) for model in models], []
    for rank, model in enumerate(models):
        exchange = GroupExchange(clusters, groups[rank], staging or staging_for(model.device))
        own = Ownership(
            held, rank, clusters, shard_updates=zero > 0, by_layer=zero > 1, bucket_elements=bucket_elements,
            groups=rank_groups(plan) if plan else (),
        )  # fmt: skip
        summed, batch = summed_buckets(own, zero), 4 * bucket_elements
        shared = ShardExchange(own.buckets, rank, exchange, batch_elements=batch) if zero > 1 else None
        if shared is not None:
            shared.form_groups()
        optimizer = Optimizer(
            model.global_named_parameters(),
            training,
            sum_over_all=exchange.sum_over_all,
            ownership=own,
            reducer=GradientReducer(summed, rank, exchange, batch_elements=batch),
            exchange=shared,
            late=model.late_names,
            gathers=zero == 3,
            on_host=on_host,
            overlap_reduction=overlap,
            precision=precisions[rank] if precisions else None,
            scales_loss="fp16" in (precisions or [training.precision]),
            local=make_local_steps(plan, own, exchange, GradientOptions(), bucket_elements=bucket_elements)
            if plan
            else None,
        )
        optimizer.by_layer = layer_gathering(optimizer.gatherer, model)
        found.append((exchange, optimizer))
    return found


Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Input ids and labels [n, S] of a step."""


def random_batch(training: TrainingConfig, step: int, vocabulary: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a step, each twice the one before plus one; some labels do not count."""
    shape = training.global_batch_size, 1
    columns = [torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(step))]
    for _ in range(training.sequence_length):
        columns.append((columns[-1] * 2 + 1) % vocabulary)
    tokens = torch.cat(columns, dim=1)
    labels = tokens[:, 1:].clone()
    labels[0, : step % 5] = -100
    return tokens[:, :-1], labels


def build_pieces(
    path: Path,
    layers: Sequence[tuple[int, int]],
    training: TrainingConfig,
    num_copies: int = 1,
    device: str = "cpu",
    experts: ExpertParallelGroup | None = None,
    precision: TrainingPrecision | None = None,
) -> ModelChunks:
    """Return pieces of the model with random weights, as a rank holds them that computes in `precision`."""
    products = BlockScaledProducts() if (precision or training.precision) == "fp8" else None
    return ModelChunks(
        [
            build_stage(
                path,
                one,
                dtype=torch.float32,
                device=device,
                seed=training.seed,
                weights="random",
                experts=experts,
                products=products,
            )
            for one in layers
        ],
        num_copies,
    )


def training_threads(count: int) -> ThreadPoolExecutor:
    """Return threads that are a rank each: the backward of one never waits for that of another.

    Backwards on a card would otherwise share one thread of torch's.
    """
    single = torch.autograd.set_multithreading_enabled
    return ThreadPoolExecutor(count, initializer=single, initargs=(False,))


class Pipeline:
    """The stages of one model, `chunks` pieces each: the `p`-th piece ends at layer `ends[p]`."""

    def __init__(
        self,
        model: Path,
        ends: Sequence[int],
        training: TrainingConfig,
        *,
        clusters: str = "",
        staging: HostStaging | None = None,
        chunks: int = 1,
        device: str = "cpu",
        groups: Sequence[IsthmusGroup] = (),
        **options: object,
    ) -> None:
        clusters = clusters or "abcdef"[: len(ends) // chunks]
        self.training, self.size, self.chunks = training, len(ends) // chunks, chunks
        self.groups = list(groups) or [IsthmusGroup(one, list(clusters)) for one in memory_transports(self.size)]
        layers = list(zip([0, *ends], ends, strict=False))
        models = [
            build_pieces(model, layers[stage :: self.size], training, device=device) for stage in range(self.size)
        ]
        dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
        met = meet(models, self.groups, clusters, training, staging=staging)
        self.stages = [
            Stage(one, StageExecutor(one, rank, range(self.size), exchange, dtype=dtype, **options), optimizer)
            for rank, (one, (exchange, optimizer)) in enumerate(zip(models, met, strict=True))
        ]

    def train(self, steps: int, *, schedule: str = "1f1b", batch: Batch | None = None, first: int = 0) -> list[float]:
        """Train for `steps` steps from step `first`; return the loss of each step so far."""
        chunks = self.chunks if schedule == "interleaved" else None
        plan = make_schedule(schedule, self.size, self.training.num_micro_batches, num_chunks=chunks)

        def run(stage: Stage) -> None:
            for step in range(first, first + steps):
                account, done = StepTimer(is_traced=True), list[UpdateResult]()
                apply = partial(stage.optimizer.apply, step)
                batches = self._cut(stage, *(batch or partial(random_batch, self.training))(step))
                paid = stage.executor.run(plan, batches, account, lambda: done.append(apply()))  # noqa: B023
                stage.accounts.append(account)
                stage.norms.append(done[0].gradient_norm)
                stage.balance_losses.append(paid.balance_loss)
                if paid.loss is not None:
                    stage.losses.append(paid.loss)

        self._each(run)
        return self.stages[-1].losses

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float | None:
        """Return the loss of one batch without training on it."""

        def run(stage: Stage) -> float | None:
            batches = self._cut(stage, input_ids, labels)
            return stage.executor.run(
                forward_only(self.size, len(batches.sizes), self.chunks), batches, StepTimer()
            ).loss

        return self._each(run)[-1]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of all stages by their names in the whole model."""
        return {
            name.partition("/")[2]: tensor.clone()
            for stage in self.stages
            for name, tensor in stage.optimizer.checkpoint_state().items()
            if name.startswith("weight/")
        }

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()

    def _cut(self, stage: Stage, input_ids: torch.Tensor, labels: torch.Tensor) -> MicroBatches:
        return MicroBatches.split(
            len(input_ids),
            self.training.micro_batch_size,
            input_ids.shape[1],
            input_ids if stage.model.is_first else None,
            labels if stage.model.is_last else None,
        )

    def _each(self, run: Callable[[Stage], Any]) -> list[Any]:
        with training_threads(len(self.stages)) as pool:
            return [one.result(300) for one in [pool.submit(run, stage) for stage in self.stages]]
