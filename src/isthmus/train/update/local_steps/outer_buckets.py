"""`make_outer_buckets`: the parameters of all replica groups in buckets, for sums over the groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from isthmus.train.update.buckets import BUCKET_ELEMENTS, GradientBucket, HeldRows, make_buckets


def make_outer_buckets(
    buckets: Sequence[GradientBucket],
    clusters: Sequence[str],
    *,
    shard_updates: bool,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> tuple[GradientBucket, ...]:
    """Return buckets whose owners are the ranks that update a row, in any group; one rank of each group contributes it.

    `buckets` are those of all groups (`Ownership.buckets`), `clusters` are by rank. With `shard_updates` only leaders
    update; the first leader of a bucket contributes for its group, whose ranks hold the same weights.
    """
    held: list[list[HeldRows]] = [[] for _ in clusters]
    for bucket in buckets:
        for rank in bucket.leaders if shard_updates else chain(*bucket.owners):
            for one in bucket.segments:
                held[rank].append(
                    HeldRows(
                        name=one.name,
                        start=one.start,
                        stop=one.stop,
                        row_elements=one.num_elements // (one.stop - one.start),
                        dim=one.dim,
                        adds=rank == bucket.leaders[0],
                    )
                )
    return make_buckets(held, clusters, bucket_elements)
