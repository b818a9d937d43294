"""What a plan will do: schedules run on a virtual clock."""

from isthmus.sim.pipeline import PipelineRun, run_pipeline
from isthmus.sim.wire import Wire

__all__ = ["PipelineRun", "Wire", "run_pipeline"]
