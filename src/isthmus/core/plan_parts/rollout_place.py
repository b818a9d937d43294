"""`RolloutPlace`: where a rank of a job with `task: rl` decodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, PositiveInt

MAX_SOURCES = 16


class RolloutPlace(FrozenModel):
    """One rank that decodes on `chips` chips of a node group; it takes no part in training.

    It decodes at most `sequences` at once, whose keys and values have room for `cache_tokens` tokens. Without them the
    rank has room for its share of all samples that may be trained in time, each of the longest length.
    `joins` says that its chips were not free when the plan was made: the job starts without it, and it joins once they
    are. `sources` are clusters that decode too and pass weights on to this one, the nearest first; without any, weights
    come from the cluster of rank 0.
    """

    cluster: Name
    node_group: Name
    chips: PositiveInt = 1
    sequences: PositiveInt | None = None
    cache_tokens: PositiveInt | None = None
    joins: bool = False
    sources: Annotated[tuple[Name, ...], Field(max_length=MAX_SOURCES)] = ()
