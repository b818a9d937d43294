"""Tensor and sequence parallelism: stages whose parameters several ranks share."""
