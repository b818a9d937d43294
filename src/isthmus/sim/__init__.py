"""Discrete-event simulation of training: schedules, replicas, links and failures on a virtual clock."""

from isthmus.sim.failures import CheckpointInterval, Failure, FailureResult, draw_failures, simulate_failures
from isthmus.sim.iteration.price_strategies import GroupPrices, price_strategies
from isthmus.sim.iteration.replica_bounds import ReplicaBounds, replica_bounds
from isthmus.sim.iteration.simulate_training import simulate_training
from isthmus.sim.iteration.simulated_training import Replica, SimulatedTraining, StageLoad
from isthmus.sim.kernel import Kernel, ProcessGenerator
from isthmus.sim.links.simulated_link import Interference, SimulatedLink, simulated_link
from isthmus.sim.output.chrome_trace import chrome_trace
from isthmus.sim.output.timeline_page import timeline_page
from isthmus.sim.pipeline.run_pipeline import PipelineResult, run_pipeline
from isthmus.sim.pipeline.warm_up import best_warm_up
from isthmus.sim.rollouts.meet_deadlines import meet_deadlines
from isthmus.sim.rollouts.rollout_pipeline import (
    DecodeRates,
    DecodeSite,
    RolloutPipeline,
    RolloutResult,
    SiteSpans,
    WeightsWay,
)
from isthmus.sim.rollouts.simulate_rollouts import simulate_rollouts
from isthmus.sim.simulation_result import LinkResult, MessageTrace, SimulationResult, StageResult, TimelineSpan
from isthmus.sim.synchronisation.sync_cluster import SyncCluster
from isthmus.sim.synchronisation.sync_seconds import SyncTime, sync_seconds
from isthmus.sim.synchronisation.sync_servers import SyncServers

__all__ = [
    "CheckpointInterval",
    "DecodeRates",
    "DecodeSite",
    "Failure",
    "FailureResult",
    "GroupPrices",
    "Interference",
    "Kernel",
    "LinkResult",
    "MessageTrace",
    "PipelineResult",
    "ProcessGenerator",
    "Replica",
    "ReplicaBounds",
    "RolloutPipeline",
    "RolloutResult",
    "SimulatedLink",
    "SimulatedTraining",
    "SimulationResult",
    "SiteSpans",
    "StageLoad",
    "StageResult",
    "SyncCluster",
    "SyncServers",
    "SyncTime",
    "TimelineSpan",
    "WeightsWay",
    "best_warm_up",
    "chrome_trace",
    "draw_failures",
    "meet_deadlines",
    "price_strategies",
    "replica_bounds",
    "run_pipeline",
    "simulate_failures",
    "simulate_rollouts",
    "simulate_training",
    "simulated_link",
    "sync_seconds",
    "timeline_page",
]
