"""Placement: candidate places for a job's pipelines on free chips, storage and links; and refusals.

See `docs/design/placement.md`. `place` is pure: requirement, free resources and constraints in, candidates
out.
"""

from isthmus.control.placement.check_names import check_placement
from isthmus.control.placement.check_possible import NOT_FIXED, check_clusters, check_degrees
from isthmus.control.placement.place import Candidate, Placements, place
from isthmus.control.placement.place_mixed import place_all
from isthmus.control.placement.propose import PlanRequest, propose
from isthmus.control.placement.resources.demand import Demand, demand_of
from isthmus.control.placement.resources.free_resources import FreeLink, Resources
from isthmus.control.placement.resources.requirement import Requirement, StageNeed, WanNeed

__all__ = [
    "NOT_FIXED",
    "Candidate",
    "Demand",
    "FreeLink",
    "Placements",
    "PlanRequest",
    "Requirement",
    "Resources",
    "StageNeed",
    "WanNeed",
    "check_clusters",
    "check_degrees",
    "check_placement",
    "demand_of",
    "place",
    "place_all",
    "propose",
]
