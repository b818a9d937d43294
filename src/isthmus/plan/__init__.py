"""From a job and a pool to candidate plans; from a plan to what it takes: profile, memory, time, search.

The functions below are all a notebook needs; see `docs/guide/simulate.md`.
"""

from isthmus.plan.calibration import DATA_SHEET, Calibration, load_calibration, save_calibration
from isthmus.plan.fit import Observation, fit_calibration, fit_shapes
from isthmus.plan.memory import stage_memory
from isthmus.plan.predict import Forecast, estimate_s, predict
from isthmus.plan.profile import ModelProfile, profile_model
from isthmus.plan.search import make_plans

__all__ = [
    "DATA_SHEET",
    "Calibration",
    "Forecast",
    "ModelProfile",
    "Observation",
    "estimate_s",
    "fit_calibration",
    "fit_shapes",
    "load_calibration",
    "make_plans",
    "predict",
    "profile_model",
    "save_calibration",
    "stage_memory",
]
