"""What a plan will do: schedules run on a virtual clock."""

from isthmus.sim.pipeline import PipelineRun, Wire, run_pipeline

__all__ = ["PipelineRun", "Wire", "run_pipeline"]
