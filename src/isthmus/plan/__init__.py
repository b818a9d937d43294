"""The planner: profiles of models, memory and time of a plan, and the search for plans of a job on a pool.

This is the API for notebooks; see `docs/guide/plan.md` and `docs/guide/simulate.md`.
"""

from isthmus.core.stack import DEFAULT_STACK
from isthmus.plan.calibrate.fit_calibration import Observation, fit_calibration
from isthmus.plan.calibrate.fit_memory import fit_memory
from isthmus.plan.calibrate.fit_report import FitReport, describe_fit
from isthmus.plan.calibrate.measured_runs import (
    PlannedRun,
    RunTable,
    default_keys,
    is_run_table,
    load_runs,
    planned_run,
    planned_runs,
)
from isthmus.plan.calibrate.measured_shapes import calibrate_shapes
from isthmus.plan.calibrate.micro_benchmarks import Measurement, ShapeTiming, Timing, calibrate_chip, calibrate_links
from isthmus.plan.calibrate.next_run import CandidateRun, informative_runs
from isthmus.plan.export.export_plan import command_job_text, export_plan, framework_request
from isthmus.plan.export.isthmus_runtime import to_isthmus_runtime
from isthmus.plan.export.log_summary import add_measured_run, compare_with_forecast, measured_run, summarise_log
from isthmus.plan.export.megatron import to_megatron
from isthmus.plan.export.plan_export import PlanExport
from isthmus.plan.export.torchtitan import to_torchtitan
from isthmus.plan.export.training_logs import LogFormat, read_training_log
from isthmus.plan.memory.kv_cache_limits import parse_lengths, serving_limits
from isthmus.plan.memory.memory_table import MeshDegrees, memory_table
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.memory.stage_table import TrainingMemory, stage_table
from isthmus.plan.profile.chip_score import DimensionWeights, evaluate_chips, model_weights, render_chip_scores
from isthmus.plan.profile.layer_matrix import (
    communication_matrix,
    layer_matrix,
    render_communication,
    render_layer_matrix,
)
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.plan.rollouts.choose_rollouts import choose_rollouts
from isthmus.plan.rollouts.forecast_rollouts import forecast_rollouts
from isthmus.plan.rollouts.plan_rollouts import plan_rollouts
from isthmus.plan.rollouts.rollout_request import RolloutRequest
from isthmus.plan.rollouts.training_choices import training_choices
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.costs.job_limits import job_limits
from isthmus.plan.search.costs.plan_value import ObjectiveWeights
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import SearchStats
from isthmus.plan.search.finish.plan_drawing import draw_plan, plan_page
from isthmus.plan.search.finish.plan_energy import plan_energy_j
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.plan.search.finish.score_plan import calibration_for, score_plan
from isthmus.plan.search.finish.select_plans import Objective
from isthmus.plan.search.finish.stage_group_loads import StageGroupLoad, stage_group_loads
from isthmus.plan.search.search_plans import SearchRequest, SearchResult, make_plans, search_plans
from isthmus.plan.search.suggest_changes import SuggestedChange, suggest_changes
from isthmus.plan.synchronisation.choose_strategies import StrategyChoice, choose_strategies
from isthmus.plan.time.calibration import DATA_SHEET, Calibration, load_calibration, save_calibration
from isthmus.plan.time.chip_rates import with_prior_rates
from isthmus.plan.time.fit_plan import OverfullStage, fitting_changes, overfull_stages
from isthmus.plan.time.model_flops import mfu_fraction
from isthmus.plan.time.one_f_one_b_estimate import iteration_estimate_s
from isthmus.plan.time.predict import PlanForecast, estimate_s, pipeline_bounds, predict, with_searched_schedule
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS

__all__ = [
    "DATA_SHEET",
    "DEFAULT_STACK",
    "TIME_MODEL_PARAMETERS",
    "Calibration",
    "CandidateRun",
    "DimensionWeights",
    "FitReport",
    "LogFormat",
    "Measurement",
    "MeshDegrees",
    "ModelProfile",
    "Objective",
    "ObjectiveWeights",
    "Observation",
    "OverfullStage",
    "PlanExport",
    "PlanForecast",
    "PlanLayout",
    "PlannedRun",
    "RolloutRequest",
    "RunTable",
    "SearchLimits",
    "SearchRequest",
    "SearchResult",
    "SearchStats",
    "ShapeTiming",
    "StageGroupLoad",
    "StrategyChoice",
    "SuggestedChange",
    "Timing",
    "TrainingMemory",
    "TrainingWorkload",
    "add_measured_run",
    "calibrate_chip",
    "calibrate_links",
    "calibrate_shapes",
    "calibration_for",
    "choose_rollouts",
    "choose_strategies",
    "command_job_text",
    "communication_matrix",
    "compare_with_forecast",
    "default_keys",
    "describe_fit",
    "draw_plan",
    "estimate_s",
    "evaluate_chips",
    "export_plan",
    "fit_calibration",
    "fit_memory",
    "fitting_changes",
    "forecast_rollouts",
    "framework_request",
    "informative_runs",
    "is_run_table",
    "iteration_estimate_s",
    "job_limits",
    "layer_matrix",
    "load_calibration",
    "load_runs",
    "make_plans",
    "measured_run",
    "memory_table",
    "mfu_fraction",
    "model_weights",
    "overfull_stages",
    "parse_lengths",
    "pipeline_bounds",
    "plan_energy_j",
    "plan_page",
    "plan_rollouts",
    "planned_run",
    "planned_runs",
    "predict",
    "profile_model",
    "read_training_log",
    "render_chip_scores",
    "render_communication",
    "render_layer_matrix",
    "runtime_incompatibility",
    "save_calibration",
    "score_plan",
    "search_plans",
    "serving_limits",
    "stacked_profile",
    "stage_group_loads",
    "stage_memory",
    "stage_table",
    "suggest_changes",
    "summarise_log",
    "to_isthmus_runtime",
    "to_megatron",
    "to_torchtitan",
    "training_choices",
    "with_prior_rates",
    "with_searched_schedule",
]
