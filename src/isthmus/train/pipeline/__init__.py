"""Execution of one stage's schedule."""
