"""Stages that several ranks share: tensors cut among them (tensor and sequence parallelism)."""
