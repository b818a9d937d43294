"""`training_choices`: the job of a request narrowed to clusters that could train, so that the others could decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from isthmus.core.job import Job
from isthmus.core.pool import Pool

ALL_SETS = 3
"""Clusters of which all sets are tried as those that train; of more, all together and the largest alone."""
MAX_ALONE = 6


def training_choices(job: Job, pool: Pool) -> Iterator[Job]:
    """Yield the job, and without `placement.train` the job on fewer of the clusters that it admits."""
    yield job
    placement = job.placement
    if job.rl is None or placement.train:
        return
    if placement.rollouts:
        others = tuple(one.name for one in pool.clusters if one.name not in placement.rollouts)
        if others and not placement.clusters:
            yield job.model_copy(update={"placement": placement.model_copy(update={"clusters": others})})
        return
    admitted = [one for one in pool.clusters if placement.admits(one.name, one.owner, one.region)]
    speed = {
        one.name: sum(group.num_chips * pool.chip(group).flop_per_s("bf16") for group in one.node_groups)
        for one in admitted
    }
    names = sorted(speed, key=lambda name: (-speed[name], name))
    sizes = range(1, len(names)) if len(names) <= ALL_SETS else (1,)
    for size in sizes:
        some = itertools.combinations(names if len(names) <= ALL_SETS else names[:MAX_ALONE], size)
        for clusters in some:
            narrowed = placement.model_copy(update={"clusters": clusters})
            yield job.model_copy(update={"placement": narrowed})
