"""From a job and a pool to candidate plans: model profile, memory, time, search."""

from isthmus.plan.search import make_plans

__all__ = ["make_plans"]
