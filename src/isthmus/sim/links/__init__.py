"""Simulated links: rate, delay, jitter and queueing."""
