"""Gradients of which each rank of a cluster keeps its shard (ZeRO stage 2)."""
