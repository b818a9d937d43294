"""Gradients and weights of which each rank of a cluster keeps its shard (ZeRO stages 2 and 3)."""
