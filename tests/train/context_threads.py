"""A pipeline whose stages are shared by threads in any degrees: as `tests.train.tensor_threads`, with tokens shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.vendors.gloo_vendor import gloo_group
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.train.communication.device_exchange import CONTEXT_TAGS, DeviceExchange
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.context_parallel.cp_communicator import CpCommunicator
from isthmus.train.context_parallel.cp_process_group import make_cp_group
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.recompute import NO_RECOMPUTE, RecomputePolicy
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.tensor_parallel.tp_communicator import TpCommunicator
from isthmus.train.tensor_parallel.tp_process_group import make_tp_group
from isthmus.train.update.replica_layout import PipelinePosition
from tests.train.expert_threads import groups_of_plan
from tests.train.threads import Pipeline, Stage, meet, training_threads


class ContextPipeline(Pipeline):
    """Stages that end at the layers `ends`, each changed as `stages` says, in clusters a, b and so on."""

    def __init__(
        self,
        model: Path,
        ends: Sequence[int],
        stages: Sequence[dict[str, Any]],
        training: TrainingConfig,
        *,
        recompute: RecomputePolicy = NO_RECOMPUTE,
        schedule: str = "1f1b",
        groups: Callable[[str], list[IsthmusGroup]] | None = None,
        staging: HostStaging | None = None,
    ) -> None:
        self.training, self.size = training, len(ends)
        self.chunks = 1
        layers = zip([0, *ends], ends, "abcdef"[: len(ends)], stages, strict=False)
        self.plan = Plan.model_validate(
            {
                "id": "p",
                "stages": [
                    {"cluster": cluster, "node_group": "cpu", "layers": (first, last), **more}
                    for first, last, cluster, more in layers
                ],
                "micro_batches": training.num_micro_batches,
                "micro_batch_size": training.micro_batch_size,
                "sequence_length": training.sequence_length,
                "schedule": schedule,
            }
        )
        clusters, count = "".join(self.plan.rank_clusters), len(self.plan.ranks)
        self.groups = (
            groups(clusters) if groups else [IsthmusGroup(one, list(clusters)) for one in memory_transports(count)]
        )
        stores = {ranks: dist.HashStore() for ranks in self._all_groups()}
        self.experts = groups_of_plan(self.plan, self.groups)
        with training_threads(count) as pool:
            waiting = [pool.submit(self._build, model, rank, stores) for rank in range(count)]
            models = [one.result(120) for one in waiting]
        self.stages = []
        for rank, (exchange, optimizer) in enumerate(meet(models, self.groups, clusters, training, staging=staging)):
            position = PipelinePosition.of_rank(self.plan, rank)
            parts = CpCommunicator(exchange, self.plan, rank)
            shared = TpCommunicator(parts, models[rank].group) if models[rank].group.size > 1 else parts
            dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
            executor = StageExecutor(
                models[rank], position.stage, position.ranks, shared, dtype=dtype, recompute=recompute
            )
            self.stages.append(Stage(models[rank], executor, optimizer))

    def summed_losses(self) -> list[float]:
        """Return the loss of each step: the sum over the first tensor-parallel ranks of the last stage."""
        last = self.plan.cp_ranks_of(len(self.plan.stages) - 1)
        return [sum(parts) for parts in zip(*(self.stages[rank].losses for rank in last), strict=True)]

    def _all_groups(self) -> list[tuple[int, ...]]:
        plan = self.plan
        found = [tuple(plan.tp_ranks_of(n, cp)) for n, one in enumerate(plan.stages) for cp in range(one.cp)]
        return found + [tuple(plan.cp_ranks_of(n, tp)) for n, one in enumerate(plan.stages) for tp in range(one.tp)]

    def _build(self, model: Path, rank: int, stores: dict[tuple[int, ...], dist.HashStore]) -> ModelChunks:
        plan, mine = self.plan, self.plan.ranks[rank]
        group, context = make_tp_group(plan, rank), make_cp_group(plan, rank)
        for target, ranks in (
            (group, plan.tp_ranks_of(mine.stage, mine.cp)),
            (context, plan.cp_ranks_of(mine.stage, mine.tp)),
        ):
            if target is not None and len(ranks) > 1:
                own = ranks.index(rank)
                near = self.groups[rank].device_messages
                devices = DeviceExchange(near, ranks, CONTEXT_TAGS) if near and target is context else None
                joined = gloo_group(stores[tuple(ranks)], own, len(ranks), "127.0.0.1", timedelta(seconds=60))
                target.join(joined, devices=devices)
        stage = build_stage(
            model, plan.stages[mine.stage].layers, dtype=torch.float32, device="cpu", seed=self.training.seed,
            weights="random", group=group, context=context, experts=self.experts[rank],
        )  # fmt: skip
        return ModelChunks([stage])

    def _cut(self, stage: Stage, input_ids: torch.Tensor, labels: torch.Tensor) -> MicroBatches:
        context = stage.model.context
        return MicroBatches.split(
            len(input_ids),
            self.training.micro_batch_size,
            input_ids.shape[1],
            input_ids if stage.model.is_first else None,
            labels if stage.model.is_last else None,
            positions=None if context is None else context.share.positions,
        )
