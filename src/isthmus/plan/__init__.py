"""The planner: profiles of models, memory and time of a plan, and the search for plans of a job on a pool.

This is the API for notebooks; see `docs/guide/plan.md` and `docs/guide/simulate.md`.
"""

from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.model_profile import ModelProfile, profile_model
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.search_plans import SearchRequest, SearchResult, make_plans, search_plans
from isthmus.plan.search.suggest_changes import SuggestedChange, suggest_changes
from isthmus.plan.time.calibration import DATA_SHEET, Calibration, load_calibration, save_calibration
from isthmus.plan.time.fit_calibration import Observation, fit_calibration, fit_shapes
from isthmus.plan.time.fit_plan import OverfullStage, fitting_changes, overfull_stages
from isthmus.plan.time.model_flops import mfu_fraction
from isthmus.plan.time.predict import PlanForecast, estimate_s, predict

__all__ = [
    "DATA_SHEET",
    "Calibration",
    "ModelProfile",
    "Observation",
    "OverfullStage",
    "PlanForecast",
    "SearchLimits",
    "SearchRequest",
    "SearchResult",
    "SuggestedChange",
    "estimate_s",
    "fit_calibration",
    "fit_shapes",
    "fitting_changes",
    "load_calibration",
    "make_plans",
    "mfu_fraction",
    "overfull_stages",
    "predict",
    "profile_model",
    "save_calibration",
    "search_plans",
    "stage_memory",
    "suggest_changes",
]
