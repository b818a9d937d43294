"""Channels over one TCP connection: in the clear, or authenticated and encrypted with the keys of a run."""
