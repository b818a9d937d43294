"""Faults that a simulated pool injects."""
