"""Comparison of a plan's run in processes with that of one process."""

from isthmus.train.comparison.check_parallel import ParallelCheck, check_parallel

__all__ = ["ParallelCheck", "check_parallel"]
