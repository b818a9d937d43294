"""Kernels of a stage: the attention core, compiled layers, and whether a device has them."""
