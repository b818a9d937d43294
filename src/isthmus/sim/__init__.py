"""What a plan will do: schedules, replicas, wires and failures on a virtual clock."""

from isthmus.sim.failures import Checkpoints, Failure, FailureRun, draw_failures, simulate_failures
from isthmus.sim.page import timeline_page
from isthmus.sim.pipeline import PipelineRun, run_pipeline
from isthmus.sim.result import Flight, LinkRun, Span, StageRun, TrainingRun
from isthmus.sim.run import simulate
from isthmus.sim.trace import chrome_trace
from isthmus.sim.training import Replica, StageLoad, Training
from isthmus.sim.warm_up import best_warm_up
from isthmus.sim.wire import Interference, Wire, wire_of

__all__ = [
    "Checkpoints",
    "Failure",
    "FailureRun",
    "Flight",
    "Interference",
    "LinkRun",
    "PipelineRun",
    "Replica",
    "Span",
    "StageLoad",
    "StageRun",
    "Training",
    "TrainingRun",
    "Wire",
    "best_warm_up",
    "chrome_trace",
    "draw_failures",
    "run_pipeline",
    "simulate",
    "simulate_failures",
    "timeline_page",
    "wire_of",
]
