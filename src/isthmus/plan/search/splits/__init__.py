"""Splits of layers over stages, and of micro-batches over replicas."""
