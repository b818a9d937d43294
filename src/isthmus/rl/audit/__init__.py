"""Audits: trajectories recomputed at the versions that they claim."""
