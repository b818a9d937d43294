"""`ShardGroup`: over how many replicas ZeRO shards, and whether weights are resharded after the forward pass."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, PositiveInt


class ShardGroup(FrozenModel):
    """Over which replicas ZeRO shards its state (hybrid sharding, HSDP), and when its weights are whole.

    `replicas` is the number of replicas that share one copy of the state (default: all); gradients are reduced inside
    each group, then between groups. `reshard: false` keeps the weights of ZeRO 3 gathered from the forward to the
    backward pass: one gather a step, and whole weights in memory.
    """

    replicas: PositiveInt | None = None
    reshard: bool = True
