"""Replicas of a model, each cut and fed as a plan says, whose stages are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.schedule import make_schedule
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.kernels.working_precision import message_dtype, stage_precision
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.update.optimizer import Optimizer, UpdateResult
from isthmus.train.update.replica_layout import (
    PipelinePosition,
    averaged_samples,
    rank_groups,
    replica_samples,
)
from tests.train.expert_threads import groups_of_plan
from tests.train.threads import build_pieces, meet, random_batch, training_threads

LIMIT_S = 900.0
"""How long a loaded machine may take for 200 steps of six threads."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One replica: where its stages end, in which clusters, and its micro-batches."""

    ends: Sequence[int]
    clusters: str
    micro_batches: int
    size: int


def make_plan(cuts: Sequence[Cut], sequence_length: int, **changes: Any) -> Plan:
    """Return the plan of `cuts`."""
    stages = [
        {"replica": replica, "cluster": cluster, "node_group": "cpu", "layers": layers}
        for replica, cut in enumerate(cuts)
        for cluster, layers in zip(cut.clusters, zip([0, *cut.ends], cut.ends, strict=False), strict=True)
    ]
    sizes, counts = [one.size for one in cuts], [one.micro_batches for one in cuts]
    return Plan.model_validate(
        {
            "id": "p", "stages": stages, "dp": len(cuts), "sequence_length": sequence_length,
            "micro_batches": max(counts), "micro_batch_size": max(sizes),
            "replica_micro_batches": counts, "replica_micro_batch_sizes": sizes, **changes,
        }
    )  # fmt: skip


@dataclass
class Rank:
    """What one thread holds."""

    place: PipelinePosition
    pieces: ModelChunks
    executor: StageExecutor
    optimizer: Optimizer
    # By step: batches of gradients that are under way or summed before the update.
    started_early: list[int] = field(default_factory=list)


class Replicas:
    """All ranks of a plan; the batch of a step is that of `random_batch`."""

    def __init__(
        self,
        model: Path,
        plan: Plan,
        training: TrainingConfig,
        bucket_elements: int = 512,
        device: str = "cpu",
        groups: Sequence[IsthmusGroup] = (),
        staging: HostStaging | None = None,
    ) -> None:
        self.plan, self.training = plan, training
        clusters = "".join(plan.rank_clusters)
        self.groups = list(groups) or [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(clusters))]
        places = [PipelinePosition.of_rank(plan, rank) for rank in range(len(clusters))]
        models = [
            build_pieces(
                model,
                plan.chunk_layers(one.replica)[one.stage],
                training,
                plan.num_model_copies,
                device,
                experts,
                stage_precision(plan.stage_of(rank), training.precision),
            )
            for rank, (one, experts) in enumerate(zip(places, groups_of_plan(plan, self.groups), strict=True))
        ]
        met = meet(
            models, self.groups, clusters, training, staging=staging, zero=plan.zero, bucket_elements=bucket_elements,
            on_host=plan.optimizer_on_host, overlap=plan.overlap_gradients,
            precisions=[stage_precision(plan.stage_of(rank), training.precision) for rank in range(len(models))],
            plan=plan,
        )  # fmt: skip
        dtype = message_dtype(plan, training.precision)
        self.ranks = [
            Rank(
                place,
                pieces,
                StageExecutor(
                    pieces,
                    place.stage,
                    place.ranks,
                    exchange,
                    dtype=dtype,
                    recompute=RecomputePolicy(plan.stage_of(rank).recompute, plan.stage_of(rank).recompute_layers),
                    final_backward=partial(_final_backward, pieces, optimizer),
                ),
                optimizer,
            )
            for rank, (place, pieces, (exchange, optimizer)) in enumerate(zip(places, models, met, strict=True))
        ]

    def train(self, steps: int, first: int = 0) -> list[UpdateResult]:
        """Train for `steps` steps from step `first`; return what the ranks agreed on, or those of rank 0's group."""
        with training_threads(len(self.ranks)) as pool:
            found = [one.result(LIMIT_S) for one in [pool.submit(self._run, r, first, steps) for r in self.ranks]]
        groups = rank_groups(self.plan) or (0,) * len(found)
        for group, one in zip(groups, found, strict=True):
            assert repr(one) == repr(found[groups.index(group)]), "all ranks see one loss and one norm, NaN too"
        return found[0]

    def restore(self, states: Sequence[dict[str, torch.Tensor]]) -> None:
        """Load a result of `local_state` on each rank, all at the same time."""
        with training_threads(len(self.ranks)) as pool:
            loads = zip(self.ranks, states, strict=True)
            for one in [pool.submit(rank.optimizer.load_local_state, state) for rank, state in loads]:
                one.result(LIMIT_S)

    def weights(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the parameters that a rank computes with, by their names in the whole model."""
        return {name: one.detach() for name, one in self.ranks[rank].pieces.global_named_parameters()}

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()

    def _run(self, rank: Rank, first: int, steps: int) -> list[UpdateResult]:
        plan, replica = self.plan, rank.place.replica
        schedule = make_schedule(
            plan.schedule, len(rank.place.ranks), plan.micro_batches_of(replica), num_chunks=plan.num_chunks,
            orders=plan.orders_of(replica),
        )  # fmt: skip
        done: list[UpdateResult] = []
        for step in range(first, first + steps):
            input_ids, labels = random_batch(self.training, step)
            batches = MicroBatches.split(
                len(input_ids),
                plan.micro_batch_size_of(replica),
                input_ids.shape[1],
                input_ids if rank.pieces.is_first else None,
                labels if rank.pieces.is_last else None,
                rows=replica_samples(plan, replica, len(input_ids)),
                averaged=averaged_samples(plan, replica, len(input_ids)),
            )

            def update(step: int = step) -> None:
                rank.started_early.append(rank.optimizer.reducer.num_started)
                done.append(rank.optimizer.apply(step, lambda: rank.executor.losses.loss or 0.0))

            rank.optimizer.begin_step()
            rank.executor.gradient_scale = rank.optimizer.gradient_scale
            rank.executor.run(schedule, batches, StepTimer(), update)
        return done


def _final_backward(pieces: ModelChunks, optimizer: Optimizer, chunk: int) -> AbstractContextManager[None]:
    return optimizer.final_backward(pieces.names_of(chunk))


def curve(
    model: Path, plan: Plan, training: TrainingConfig, steps: int | None = None, **options: Any
) -> list[UpdateResult]:
    """Train a plan for all steps of `training`, or the first `steps`; return the result of each step."""
    replicas = Replicas(model, plan, training, **options)
    try:
        return replicas.train(steps or training.steps)
    finally:
        replicas.close()
