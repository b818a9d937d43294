"""`check_virtual_training`: rejects, before start, plans that virtual training (`compute: virtual`) lacks.

A stage of any parallelism is one process that sleeps for the predicted time; messages between clusters are real.
"""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.schedule import Schedule
from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.process.check_plan_matches_job import check_plan_matches_job


def check_virtual_training(spec: WorkerSpec) -> Schedule:
    """Return the checked schedule of the rank's replica; raise `PlanError` if the plan is unsupported."""
    if spec.stage_time is None:
        raise PlanError(
            f"the plan predicts no stage time for rank {spec.rank}",
            hint="compute: virtual sleeps for predicted times: make the plan again",
        )
    _check_device(spec)
    _check_gradients(spec.plan)
    return check_plan_matches_job(spec, load_model(spec.job.model))[spec.stage.replica]


def _check_device(spec: WorkerSpec) -> None:
    if spec.device == "cuda":
        raise PlanError("virtual training does not use device 'cuda'", hint="use device 'cpu' or 'auto'")
    if spec.backend not in HOST_BACKENDS:
        raise PlanError(
            f"backend '{spec.backend}' sends from device memory; virtual training uses host memory",
            hint="use " + " or ".join(HOST_BACKENDS),
        )


def _check_gradients(plan: Plan) -> None:
    """Reject gradient options that change traffic between clusters and have no virtual counterpart."""
    if not any(plan.gradient_peer_clusters(stage) for stage in range(len(plan.stages))):
        return
    for name, is_set in (("zero", plan.zero > 1), ("overlap_gradients", plan.overlap_gradients)):
        if is_set:
            raise PlanError(
                f"the plan fixes {name} to {getattr(plan, name)}, with replicas in several clusters",
                hint="virtual training reduces gradients after the last backward: remove it",
            )
