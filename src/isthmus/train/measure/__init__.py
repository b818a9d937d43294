"""Micro-benchmarks of chips, model parts and messages."""
