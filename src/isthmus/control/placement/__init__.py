"""Where a job can run: its requirement, the stages compute, storage and network, and what they refuse.

See `docs/design/placement.md`. `place` is pure: a requirement, what is free, the job's switches; candidates.
"""

from isthmus.control.placement.demand import Demand, demand_of
from isthmus.control.placement.names import check_placement
from isthmus.control.placement.place import Candidate, Placements, place
from isthmus.control.placement.possible import NOT_FIXED, check_clusters, check_degrees
from isthmus.control.placement.propose import PlanRequest, propose
from isthmus.control.placement.requirement import Requirement, StageNeed, WanNeed
from isthmus.control.placement.resources import FreeLink, Resources
from isthmus.control.placement.unlike import place_all

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
