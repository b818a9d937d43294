"""Micro-benchmarks of a chip, of a model's parts and of messages."""
