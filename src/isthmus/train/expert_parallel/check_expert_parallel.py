"""`check_expert_parallel`: reject stages whose experts their expert-parallel ranks cannot share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from isthmus.core.errors import PlanError
from isthmus.core.job import TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.runs.check_job import num_experts
from isthmus.core.runs.check_plan import divisor_below
from isthmus.core.runs.runnable.expert_groups import expert_groups


def check_expert_parallel(
    plan: Plan, model: Model, training: TrainingConfig, evaluated_samples: Callable[[int, int], int]
) -> None:
    """Raise `PlanError` unless the experts of each stage can be dealt out to the ranks of a group.

    The ranks of a group exchange in every micro-batch, so their replicas need equally many, in an evaluation too:
    `evaluated_samples(replica, num_samples)` are the samples of `num_samples` that a replica evaluates.
    """
    groups, experts = expert_groups(plan), num_experts(model)
    for number, stage in enumerate(plan.stages):
        if stage.ep == 1:
            continue
        if not experts or experts % stage.ep:
            why = f"does not divide the model's {experts} experts" if experts else "has no use in a model without any"
            raise PlanError(
                f"stage {number} deals out experts by ep {stage.ep}, which {why}",
                hint=f"nearest valid: ep {divisor_below(experts, stage.ep) if experts else 1}",
            )
        if stage.recompute == "selective":
            raise PlanError(
                f"stage {number} has ep {stage.ep} and selective recomputation, which would repeat its exchanges in "
                "part",
                hint="choose recompute full, moe or none",
            )

    def is_even(num_samples: int) -> bool:
        sizes = {replica: plan.micro_batch_size_of(replica) for replica in range(plan.dp)}
        counts = {one: -(-evaluated_samples(one, num_samples) // size) for one, size in sizes.items()}
        return all(len({counts[plan.stage_of(rank).replica] for rank in ranks}) == 1 for ranks in groups.values())

    size = training.evaluate_samples
    if training.evaluate_every and not is_even(size):
        raise PlanError(
            f"training.evaluate_samples is {size}, by which replicas that share experts evaluate unlike numbers of "
            "micro-batches",
            hint=f"nearest valid: {next(filter(is_even, itertools.count(size)))}",
        )
