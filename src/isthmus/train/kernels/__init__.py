"""Kernels of a stage: the attention core, compiled layers, products of 8 bits, and whether a device has them."""
