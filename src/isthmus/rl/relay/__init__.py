"""Versions of weights over the links between sites: who gets which chunk from where, without I/O."""
