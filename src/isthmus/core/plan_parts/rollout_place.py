"""`RolloutPlace`: where a rank of a job with `task: rl` decodes."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, Name, PositiveInt


class RolloutPlace(FrozenModel):
    """One rank that decodes on `chips` chips of a node group; it takes no part in training.

    It decodes at most `sequences` at once, whose keys and values have room for `cache_tokens` tokens. Without them the
    rank has room for its share of all samples that may be trained in time, each of the longest length.
    """

    cluster: Name
    node_group: Name
    chips: PositiveInt = 1
    sequences: PositiveInt | None = None
    cache_tokens: PositiveInt | None = None
