"""`check_rehearsable`: refuse what a rehearsal (`compute: virtual`) cannot stand for, before it starts.

A stage of any degrees is one process that waits as long as the plan says: what happens inside a cluster is
time, what crosses clusters is real. Averages between groups of replicas (local steps) are not rehearsed.
"""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.schedule import Schedule
from isthmus.train.messages.device import HOST_BACKENDS
from isthmus.train.process.check_agreement import check_agreement


def check_rehearsable(spec: WorkerSpec) -> Schedule:
    """Return the checked schedule of the rank's replica; raise `PlanError` on what cannot be rehearsed."""
    if spec.stage_time is None:
        raise PlanError(
            f"the plan predicts no time for rank {spec.rank}",
            hint="a job of compute: virtual waits for predicted times: plan again",
        )
    _check_place(spec)
    _check_gradients(spec.plan)
    return check_agreement(spec, load_model(spec.job.model))[spec.stage.replica]


def _check_place(spec: WorkerSpec) -> None:
    if spec.device == "cuda":
        raise PlanError("a rehearsal needs no device 'cuda'", hint="use device 'cpu' or 'auto'")
    if spec.backend not in HOST_BACKENDS:
        raise PlanError(
            f"backend '{spec.backend}' carries tensors of a device; a rehearsal has them in host memory",
            hint="use " + " or ".join(HOST_BACKENDS),
        )


def _check_gradients(plan: Plan) -> None:
    """Refuse what would cross clusters in another way than it is rehearsed."""
    if not any(plan.adding_clusters(stage) for stage in range(len(plan.stages))):
        return
    for name, fixed in (("zero", plan.zero > 1), ("overlap_gradients", plan.overlap_gradients)):
        if fixed:
            raise PlanError(
                f"the plan fixes {name} to {getattr(plan, name)}, and has replicas in several clusters",
                hint="between clusters gradients are rehearsed as sums after the last backward: leave it out",
            )
