"""`RolloutPlace`: where a rank of a job with `task: rl` decodes."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, Name, PositiveInt


class RolloutPlace(FrozenModel):
    """One rank that decodes on `chips` chips of a node group; it takes no part in training."""

    cluster: Name
    node_group: Name
    chips: PositiveInt = 1
