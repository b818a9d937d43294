"""Execution of one stage's schedule, with real or virtual compute."""
