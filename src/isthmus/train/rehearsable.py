"""`check_rehearsable`: refuse what a rehearsal (`compute: virtual`) cannot stand for, before it starts.

A stage of any degrees is one process that waits as long as the plan says: what happens inside a cluster is
time, what crosses clusters is real. Averages between groups of replicas (local steps) are not rehearsed.
"""

from __future__ import annotations

from isthmus.comm.arena import is_supported
from isthmus.core.errors import PlanError
from isthmus.core.model import load_model
from isthmus.core.worker import WorkerSpec
from isthmus.schedule import Schedule, check_schedule, make_schedule
from isthmus.train.device import HOST_BACKENDS


def check_rehearsable(spec: WorkerSpec) -> Schedule:
    """Return the checked schedule of the rank's replica; raise `PlanError` on what cannot be rehearsed."""
    plan, training = spec.plan, spec.job.training
    if spec.stage_time is None:
        raise PlanError(
            f"the plan predicts no time for rank {spec.rank}",
            hint="a job of compute: virtual waits for predicted times: plan again",
        )
    _check_equal(
        ("compute", plan.compute, spec.job.compute),
        ("sequence_length", plan.sequence_length, training.sequence_length),
        ("samples a step", plan.samples, training.global_batch_size),
        ("number of layers", plan.num_layers, load_model(spec.job.model).num_layers),
    )
    if plan.local_steps > 1:
        raise PlanError(
            f"the plan fixes local_steps to {plan.local_steps}",
            hint="averages between clusters are not rehearsed: plan again with training.local_steps 1",
        )
    _check_place(spec)
    replica = spec.stage.replica
    schedule = make_schedule(
        plan.schedule,
        len(plan.pipeline(replica)),
        plan.micro_batches_of(replica),
        warm_up=plan.warm_up,
        num_chunks=plan.num_chunks or plan.chunks,
    )
    check_schedule(schedule)
    return schedule


def _check_equal(*rows: tuple[str, object, object]) -> None:
    for what, of_plan, of_job in rows:
        if of_plan != of_job:
            raise PlanError(
                f"{what} is {of_plan} in the plan and {of_job} in the job", hint="make the plan again"
            )


def _check_place(spec: WorkerSpec) -> None:
    if spec.device == "cuda":
        raise PlanError("a rehearsal needs no device 'cuda'", hint="use device 'cpu' or 'auto'")
    if spec.backend not in HOST_BACKENDS:
        raise PlanError(
            f"backend '{spec.backend}' carries tensors of a device; a rehearsal has them in host memory",
            hint="use " + " or ".join(HOST_BACKENDS),
        )
    check_routes(spec)


def check_routes(spec: WorkerSpec) -> None:
    """Refuse a backend that cannot reach other clusters where the plan has several, or not by a process."""
    if spec.job.transport == "process" and spec.backend != "isthmus":
        raise PlanError(
            f"backend '{spec.backend}' has no transport to put into a process",
            hint="use backend 'isthmus', or transport: thread",
        )
    if spec.job.transport == "process" and not is_supported():
        raise PlanError(
            "transport: process needs anonymous shared memory, which this machine has not (memfd_create)",
            hint="run the workers on Linux, or use transport: thread",
        )
    if spec.backend != "isthmus" and len(spec.plan.clusters) > 1:
        raise PlanError(
            f"backend '{spec.backend}' knows no routes between clusters", hint="use backend 'isthmus'"
        )
