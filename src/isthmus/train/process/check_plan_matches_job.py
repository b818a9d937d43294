"""`check_plan_matches_job`: checks that a plan matches its job, for real and for virtual training."""

from __future__ import annotations

from isthmus.comm.process.shared_memory_arena import supports_shared_memory
from isthmus.comm.rdma.open_device import check_device
from isthmus.core.errors import InputError, PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import Model, load_model
from isthmus.core.plan import Plan
from isthmus.schedule import Schedule, check_schedule, make_schedule


def check_plan_matches_job(spec: WorkerSpec, model: Model) -> list[Schedule]:
    """Return the checked schedule of each replica; raise `PlanError` if the plan does not match the job.

    `model` is the job's.
    """
    plan, training = spec.plan, spec.job.training
    require_equal("compute", plan.compute, spec.job.compute)
    require_equal("sequence_length", plan.sequence_length, training.sequence_length)
    require_equal("samples a step", plan.num_samples, training.global_batch_size)
    require_equal("number of layers", plan.num_layers, model.num_layers)
    for name in ("precision", "attention", "compile", "deterministic"):
        if (stated := getattr(plan, name)) is not None:
            require_equal(name, stated, getattr(training, name))
    if plan.rollouts and spec.job.rl is None:
        raise PlanError(f"plan {plan.id} has rollouts, the job task {spec.job.task}", hint="make the plan again")
    if plan.model is not None and load_model(plan.model).config != model.config:
        require_equal("model", plan.model, spec.job.model)
    if plan.local_steps > 1:
        require_equal("local_steps", plan.local_steps, training.local_steps)
    check_job_transport(spec, has_shared_memory=supports_shared_memory())
    schedules = [_make_replica_schedule(plan, replica) for replica in range(plan.dp)]
    for one in dict.fromkeys(schedules):
        check_schedule(one)
    return schedules


def require_equal(name: str, plan_value: object, job_value: object) -> None:
    """Raise `PlanError` unless the values of `name` in plan and job are equal."""
    if plan_value != job_value:
        raise PlanError(f"{name} is {plan_value} in the plan and {job_value} in the job", hint="make the plan again")


def _make_replica_schedule(plan: Plan, replica: int) -> Schedule:
    """Return the schedule of one replica, for its number of stages and micro-batches."""
    return make_schedule(
        plan.schedule,
        len(plan.pipeline(replica)),
        plan.micro_batches_of(replica),
        warm_up=plan.warm_up,
        num_chunks=plan.num_chunks or plan.chunks,
        orders=plan.orders_of(replica),
    )


def check_job_transport(spec: WorkerSpec, *, has_shared_memory: bool) -> None:
    """Raise `PlanError` for a transport or a card that backend or machine lack, or that cannot connect the clusters."""
    if spec.job.transport == "process" and spec.backend != "isthmus":
        raise PlanError(
            f"backend '{spec.backend}' does not support transport: process",
            hint="use backend 'isthmus', or transport: thread",
        )
    if spec.job.transport == "process" and not has_shared_memory:
        raise PlanError(
            "transport: process needs anonymous shared memory (memfd_create), which this machine lacks",
            hint="run the workers on Linux, or use transport: thread",
        )
    if spec.backend != "isthmus" and len(spec.plan.clusters) > 1:
        raise PlanError(
            f"backend '{spec.backend}' does not support routes between clusters", hint="use backend 'isthmus'"
        )
    for cluster in spec.plan.clusters:
        device = spec.rdma_device(cluster)
        if device is not None:
            try:
                check_device(device)
            except InputError as error:
                link = f"the link of {spec.cluster} and {cluster} has `transport: rdma`"
                raise PlanError(f"{link}: {error.message}", hint=error.hint) from error
