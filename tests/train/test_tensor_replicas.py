"""Rules of replicas whose stages are shared by unlike numbers of ranks: gradients meet slice by slice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.tensor_parallel.tp_communicator import TpCommunicator
from isthmus.train.update.replica_layout import PipelinePosition
from tests.train.replica_threads import Cut, Rank, Replicas, make_plan
from tests.train.small_models import write_config
from tests.train.tensor_groups import tensor_groups
from tests.train.test_executor import make_training
from tests.train.threads import meet

pytestmark = pytest.mark.integration

CUTS = (
    Cut(ends=[2, 4], clusters="ab", micro_batches=3, size=2),
    Cut(ends=[4], clusters="b", micro_batches=2, size=1),
)


class SharedReplicas(Replicas):
    """All ranks of a plan whose stages may be shared. (Its losses count once for each of a stage.)"""

    def __init__(self, model: Path, plan: Plan, training: TrainingConfig) -> None:
        self.plan, self.training = plan, training
        clusters = "".join(plan.stage_of(rank).cluster for rank in range(len(plan.ranks)))
        self.groups = [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(clusters))]
        sharing = [group for stage in plan.stages for group in tensor_groups(stage.tp, cuts_sequence=stage.sp)]
        places = [PipelinePosition.of_rank(plan, rank) for rank in range(len(clusters))]
        fixed = {"dtype": torch.float32, "device": "cpu", "seed": training.seed, "weights": "random"}
        models = [
            ModelChunks(
                [
                    build_stage(model, layers, group=group, **fixed)
                    for layers in plan.chunk_layers(place.replica)[place.stage]
                ]
            )
            for place, group in zip(places, sharing, strict=True)
        ]
        met = meet(models, self.groups, clusters, training, zero=plan.zero, bucket_elements=512)
        self.ranks = []
        for place, pieces, (exchange, optimizer) in zip(places, models, met, strict=True):
            shared = TpCommunicator(exchange, pieces.group)
            executor = StageExecutor(pieces, place.stage, place.ranks, shared, dtype=torch.float32)
            self.ranks.append(Rank(place, pieces, executor, optimizer))


def norms(kind: type[Replicas], model: Path, plan: Plan, training: TrainingConfig) -> list[float]:
    """Train a plan; return the gradient norm of each step."""
    replicas = kind(model, plan, training)
    try:
        return [one.gradient_norm for one in replicas.train(training.steps)]
    finally:
        replicas.close()


@pytest.mark.parametrize(
    ("variant", "tps", "sp", "zero"),
    [
        ("llama-tied", (2, 1, 2), True, 1),
        pytest.param("mixtral", (2, 1, 1), False, 0, marks=pytest.mark.slow),
    ],
)
def test_replicas_with_unlike_shares_train_alike(
    tmp_path: Path, variant: str, tps: tuple[int, ...], sp: bool, zero: int
) -> None:
    """A slice is added to the rows that it is in another replica: every norm is that of unshared stages."""
    model, training = write_config(tmp_path, variant), make_training(steps=3)
    plan = make_plan(CUTS, training.sequence_length)
    stages = [one.model_copy(update={"tp": tp, "sp": sp and tp > 1}) for one, tp in zip(plan.stages, tps, strict=True)]
    shared = plan.model_copy(update={"stages": tuple(stages), "zero": zero})
    expected = norms(Replicas, model, plan, training)
    assert norms(SharedReplicas, model, shared, training) == pytest.approx(expected, rel=1e-5)
