"""`make_local_steps`: the local SGD of a plan, as one rank takes part in it."""

from __future__ import annotations

from isthmus.core.plan import Plan
from isthmus.train.communication.communicator import Communicator
from isthmus.train.update.buckets import BUCKET_ELEMENTS
from isthmus.train.update.gradient_options import GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.local_steps.outer_buckets import make_outer_buckets
from isthmus.train.update.local_steps.outer_optimizer import LocalSteps
from isthmus.train.update.ownership import Ownership


def make_local_steps(
    plan: Plan,
    ownership: Ownership,
    communicator: Communicator,
    options: GradientOptions,
    *,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> LocalSteps | None:
    """Return how the rank of `ownership` takes part; None if `plan` has no local steps. All ranks call this.

    Changes of weights cross between clusters in the wire format of `options`; named strategies and switches sum
    gradients alone.
    """
    if plan.local_steps == 1:
        return None
    buckets = make_outer_buckets(
        ownership.buckets,
        plan.rank_clusters,
        shard_updates=ownership.shard_updates,
        bucket_elements=bucket_elements,
    )
    outer = GradientOptions(wire_format=options.wire_format)
    reducer = GradientReducer(buckets, ownership.rank, communicator, options=outer)
    return LocalSteps(every=plan.local_steps, group=ownership.group, shares=group_shares(plan), reducer=reducer)


def group_shares(plan: Plan) -> tuple[float, ...]:
    """Return the share of each replica group in the samples of a step."""
    samples = [0] * (max(plan.replica_groups) + 1)
    for replica, group in enumerate(plan.replica_groups):
        samples[group] += plan.micro_batches_of(replica) * plan.micro_batch_size_of(replica)
    return tuple(one / plan.num_samples for one in samples)
