"""A pipeline stage of a transformers model: build, load, compute, recompute, export."""
