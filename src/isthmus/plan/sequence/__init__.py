"""Algorithms for long sequences: attention blocks per core, ranks per sequence."""
