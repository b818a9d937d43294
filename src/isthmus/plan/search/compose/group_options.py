"""`group_options`: the bounded pipelines of a replica group that trains beside others."""

from __future__ import annotations

import math

from isthmus.plan.search.compose.compose_groups import PipelineOption, PipelineOptions
from isthmus.plan.search.pipelines.enumerate_pipelines import PipelineEnumerator
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost

NUM_OPEN = 32
"""Options of a group that are compared at once with those of other groups."""


def group_options(pipelines: PipelineEnumerator, schedule: str, time_s: float) -> PipelineOptions:
    """Return the pipelines of a group as options, those that finish most micro-batches within `time_s` first.

    Infinite `time_s` stands for the least time in which one pipeline alone finishes all of them.
    """
    if time_s == math.inf:
        total = pipelines.micro_batches
        alone = pipelines.ranked_by(lambda dp, first_s, interval_s: first_s + total / dp * interval_s)
        time_s, _ = next(alone, (0.0, None))

    def worth(dp: int, first_s: float, interval_s: float) -> float:
        if time_s < first_s:
            return first_s - time_s
        more = (time_s - first_s) / interval_s
        whole = math.floor(more + 1e-9)
        return -(dp * (1 + whole) + (more - whole) / 2)

    ranked = pipelines.ranked_by(worth)
    return PipelineOptions(
        (
            PipelineOption(one.make(schedule), PipelineCost(one.first_s, one.interval_s), pipelines.replica_group)
            for _, one in ranked
        ),
        NUM_OPEN,
    )
