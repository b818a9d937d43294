"""Placement: candidate places for a job's pipelines on free chips, storage and links; and refusals.

See `docs/design/placement.md`. `place_pipelines` is pure: requirement, free resources and constraints in, candidates
out. `propose_plans.py`, `place_plan.py` and `plan_requirement.py` use the planner and are imported where they are: the
server, whose planners are processes of their own, starts without them.
"""

from isthmus.control.placement.check_placement_names import (
    check_output_site,
    check_owner_name,
    check_placement_names,
)
from isthmus.control.placement.check_satisfiable import NO_FIXED_DEGREES, check_clusters, check_degrees
from isthmus.control.placement.place_pipelines import Candidate, PlacementResult, place_pipelines
from isthmus.control.placement.plan_request import PlanRequest
from isthmus.control.placement.planned_clusters import MAX_PLANNED_CLUSTERS, planned_clusters
from isthmus.control.placement.resources.free_resources import FreeLink, FreeResources
from isthmus.control.placement.resources.pipeline_requirement import (
    PipelineRequirement,
    StageRequirement,
    WanRequirement,
)

__all__ = [
    "MAX_PLANNED_CLUSTERS",
    "NO_FIXED_DEGREES",
    "Candidate",
    "FreeLink",
    "FreeResources",
    "PipelineRequirement",
    "PlacementResult",
    "PlanRequest",
    "StageRequirement",
    "WanRequirement",
    "check_clusters",
    "check_degrees",
    "check_output_site",
    "check_owner_name",
    "check_placement_names",
    "place_pipelines",
    "planned_clusters",
]
