"""Where a rank stands among the replicas of its plan, which samples of a step are its replica's, and what all
ranks hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from isthmus.core.plan import Plan
from isthmus.train.messages.exchange import Exchange
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.update.buckets import Held
from isthmus.train.update.ownership import Ownership


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place: stage `stage` (from 0) of the pipeline of `replica`, whose stages are at `ranks`."""

    replica: int
    stage: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Place:
        """Return the place of `rank` in `plan`."""
        mine = plan.ranks[rank].stage
        replica = plan.stages[mine].replica
        line = [number for number, stage in enumerate(plan.stages) if stage.replica == replica]
        ranks = tuple(plan.ranks_of(number)[0] for number in line)
        return cls(replica=replica, stage=line.index(mine), ranks=ranks)


def rows_of(plan: Plan, replica: int, num_samples: int) -> tuple[int, int]:
    """Return the samples (first, last exclusive) of a batch of `num_samples` that a replica takes.

    Replicas take theirs one after the other: of a step as many as the plan says, of another batch as great a
    share, to within one.
    """
    each = [plan.micro_batches_of(one) * plan.micro_batch_size_of(one) for one in range(plan.dp)]
    before = sum(each[:replica])
    return num_samples * before // sum(each), num_samples * (before + each[replica]) // sum(each)


def meet_owners(
    pieces: StagePieces, rank: int, clusters: Sequence[str], exchange: Exchange, *, shard: bool
) -> Ownership:
    """Tell all ranks what is held here, and return what follows from what they hold."""
    told = exchange.tell_all(json.dumps([asdict(one) for one in held_by(pieces)]).encode())
    held = [[Held(**one) for one in json.loads(of_rank)] for of_rank in told]
    return Ownership(held, rank, clusters, shard=shard)


def held_by(pieces: StagePieces) -> list[Held]:
    """Return what a rank holds of the model's parameters."""
    return [
        Held(
            name=name, start=start, stop=stop, at=at, dim=one.dim, row_elements=one.row_elements,
            adds=one.first,
        )
        for name, one in pieces.slices.items()
        for start, stop, at in one.parts()
    ]  # fmt: skip
