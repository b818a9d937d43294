"""Copies of checkpoints in an object store, encrypted: its owner can neither read nor change them."""
