"""Discrete-event simulation of training: schedules, replicas, links and failures on a virtual clock."""

from isthmus.sim.failures import Checkpoints, Failure, FailureRun, draw_failures, simulate_failures
from isthmus.sim.iteration.simulate import simulate
from isthmus.sim.iteration.training import Replica, StageLoad, Training
from isthmus.sim.links.wire import Interference, Wire, wire_of
from isthmus.sim.output.chrome_trace import chrome_trace
from isthmus.sim.output.timeline_page import timeline_page
from isthmus.sim.pipeline.run_pipeline import PipelineRun, run_pipeline
from isthmus.sim.pipeline.warm_up import best_warm_up
from isthmus.sim.result import Flight, LinkRun, Span, StageRun, TrainingRun

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
