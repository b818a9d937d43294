"""A rank's position in the plan, its replica's samples, and the parameters that all ranks hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from isthmus.core.plan import Plan
from isthmus.train.communication.communicator import Communicator
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.ownership import Ownership


@dataclass(frozen=True, kw_only=True)
class PipelinePosition:
    """Position of a rank in the pipeline of its replica."""

    replica: int
    # Stage within the pipeline, from 0.
    stage: int
    # First rank of each stage of the pipeline.
    ranks: tuple[int, ...]

    @classmethod
    def of_rank(cls, plan: Plan, rank: int) -> PipelinePosition:
        """Return the position of `rank` in `plan`."""
        mine = plan.ranks[rank].stage
        replica = plan.stages[mine].replica
        stages = [number for number, stage in enumerate(plan.stages) if stage.replica == replica]
        ranks = tuple(plan.ranks_of(number)[0] for number in stages)
        return cls(replica=replica, stage=stages.index(mine), ranks=ranks)


def replica_samples(plan: Plan, replica: int, num_samples: int) -> tuple[int, int]:
    """Return the samples (first, last exclusive) of a batch of `num_samples` that `replica` processes.

    Replicas take consecutive ranges: for a training step as the plan says, for other batch sizes
    proportionally.
    """
    each = [plan.micro_batches_of(one) * plan.micro_batch_size_of(one) for one in range(plan.dp)]
    before = sum(each[:replica])
    return num_samples * before // sum(each), num_samples * (before + each[replica]) // sum(each)


def rank_groups(plan: Plan) -> tuple[int, ...]:
    """Return the replica group of each rank, in which gradients are summed; empty if all ranks are of one."""
    if plan.local_steps == 1:
        return ()
    return tuple(plan.replica_groups[plan.stage_of(rank).replica] for rank in range(len(plan.ranks)))


def averaged_samples(plan: Plan, replica: int, num_samples: int) -> tuple[tuple[int, int], ...]:
    """Return the samples, as ranges like `replica_samples`, whose mean loss `replica` takes the gradient of.

    All of the batch; with local steps those of its replica group.
    """
    if plan.local_steps == 1:
        return ((0, num_samples),)
    group = plan.replica_groups[replica]
    members = [one for one in range(plan.dp) if plan.replica_groups[one] == group]
    return tuple(replica_samples(plan, one, num_samples) for one in members)


def evaluation_passes(plan: Plan, num_samples: int) -> int:
    """Return the most micro-batches of a replica in an evaluation of `num_samples`."""
    rows = (replica_samples(plan, replica, num_samples) for replica in range(plan.dp))
    return max(-(-(last - first) // plan.micro_batch_size_of(n)) for n, (first, last) in enumerate(rows))


def exchange_ownership(
    chunks: ModelChunks,
    rank: int,
    clusters: Sequence[str],
    communicator: Communicator,
    *,
    zero: int,
    groups: Sequence[int] = (),
) -> Ownership:
    """Exchange the held rows with all ranks; return this rank's ownership under ZeRO stage `zero`.

    `groups` are those of `Ownership`.
    """
    gathered = communicator.all_gather_bytes(json.dumps([asdict(one) for one in held_rows_of(chunks)]).encode())
    held = [[HeldRows(**one) for one in json.loads(of_rank)] for of_rank in gathered]
    return Ownership(held, rank, clusters, shard_updates=zero > 0, by_layer=zero > 1, groups=groups)


def held_rows_of(chunks: ModelChunks) -> list[HeldRows]:
    """Return the rows of all parameters in `chunks`."""
    return [
        HeldRows(
            name=name, start=start, stop=stop, at=at, dim=one.dim, row_elements=one.row_elements,
            adds=one.is_first_copy,
        )
        for name, one in chunks.slices.items()
        for start, stop, at in one.row_ranges()
    ]  # fmt: skip
