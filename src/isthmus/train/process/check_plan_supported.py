"""`check_plan_supported`: rejects, before start, plans and models that this runtime does not support."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path

from isthmus.core.errors import ModelError, PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import Model, load_model, require_trainable
from isthmus.core.plan import Plan, Stage
from isthmus.core.runs.check_job import max_positions
from isthmus.core.runs.plan_words import stated_words
from isthmus.core.runs.runnable.sharding_problem import sharding_problem
from isthmus.schedule import Schedule
from isthmus.train.communication.torch_device import HOST_BACKENDS, supported_backends
from isthmus.train.context_parallel.check_context_parallel import check_context_parallel
from isthmus.train.expert_parallel.check_expert_parallel import check_expert_parallel
from isthmus.train.kernels.check_kernels import DeviceKernels, check_kernels
from isthmus.train.model.save_weights import check_output
from isthmus.train.process.check_plan_matches_job import check_plan_matches_job, require_equal
from isthmus.train.process.check_virtual_training import check_virtual_training
from isthmus.train.process.prepare_stage import worker_device
from isthmus.train.tensor_parallel.check_tensor_parallel import check_tensor_parallel
from isthmus.train.update.gradient_options import check_gradient_options
from isthmus.train.update.replica_layout import replica_samples


def check_plan_supported(spec: WorkerSpec) -> Schedule:
    """Return the checked schedule of the rank's replica; raise `PlanError` or `ModelError` if unsupported."""
    check_gradient_options(spec)
    if spec.job.compute == "virtual":
        return check_virtual_training(spec)
    plan, model = spec.plan, load_model(spec.job.model)
    require_trainable(model)
    _check_deterministic(model)
    _check_positions(spec.job.training.sequence_length, model)
    _check_backend(spec)
    schedules = check_plan_matches_job(spec, model)
    for number, stage in enumerate(plan.stages):
        _check_recomputed_layers(number, stage)
    _check_plan_options(plan)
    if spec.job.training.optimizer_on_host:
        require_equal("optimizer_on_host", plan.optimizer_on_host, True)
    check_tensor_parallel(plan, model)
    check_kernels(spec.job.training, plan, model, spec.stage, DeviceKernels.of(worker_device(spec)))
    check_context_parallel(plan, model)
    check_expert_parallel(plan, model, spec.job.training, partial(_num_samples, plan))
    check_output(Path(spec.job.output), spec.job.model)
    for one in dict.fromkeys(schedules):
        _check_model_chunks(one, plan)
        if spec.backend not in HOST_BACKENDS:
            check_message_order(one)
    return schedules[spec.stage.replica]


def _check_recomputed_layers(index: int, stage: Stage) -> None:
    """Reject recompute settings of a stage that this runtime does not support."""
    if (stage.recompute_layers or 0) > stage.num_layers:
        raise PlanError(
            f"stage {index} asks for {stage.recompute_layers} recomputed layers of {stage.num_layers}",
            hint="remove `recompute_layers` to recompute all",
        )


def _num_samples(plan: Plan, replica: int, num_samples: int) -> int:
    """Return how many of `num_samples` samples a replica evaluates."""
    first, end = replica_samples(plan, replica, num_samples)
    return end - first


def _check_plan_options(plan: Plan) -> None:
    """Reject options of hand-written plans that this runtime does not support."""
    if (problem := sharding_problem(plan)) is not None:
        raise PlanError(problem.message, hint=problem.hint)
    for name in stated_words(plan):
        if name in ("cp_kind", "cp_rates") or (name == "sharding" and plan.zero > 1):
            continue
        raise PlanError(f"the plan states {name}", hint=f"this runtime has no such choice: remove {name}")
    if plan.transport != "buffered":
        raise PlanError(f"the plan asks for {plan.transport} messages", hint="this runtime supports buffered messages")


def _check_model_chunks(schedule: Schedule, plan: Plan) -> None:
    """Reject chunks without a layer."""
    stages = [chunks for replica in range(plan.dp) for chunks in plan.chunk_layers(replica)]
    if min(end - first for chunks in stages for first, end in chunks) == 0:
        raise PlanError(
            f"schedule '{schedule.name}' splits a stage into {schedule.num_chunks} chunks, one of them empty",
            hint="lower `chunks`, or give the stage more layers",
        )


def _check_deterministic(model: Model) -> None:
    """Reject random operations in the forward: results would depend on the split of the model."""
    for name in ("attention_dropout", "router_jitter_noise"):
        if model.config.get(name):
            raise ModelError(
                f"{model.path}: {name} is {model.config[name]}",
                hint=f"set {name} to 0 in config.json: results must not depend on the split of the model",
            )


def _check_positions(sequence_length: int, model: Model) -> None:
    """Reject sequences longer than the positions that the model has learned or scales to."""
    most = max_positions(model)
    if most is not None and sequence_length > most:
        raise PlanError(
            f"training.sequence_length is {sequence_length}, and {model.path} has {most} positions",
            hint=f"set training.sequence_length to {most} at most, or state rope_parameters that scale the positions",
        )


def _check_backend(spec: WorkerSpec) -> None:
    supported = supported_backends(worker_device(spec))
    if spec.backend not in supported:
        raise PlanError(
            f"backend '{spec.backend}' is not supported by this worker's torch and device",
            hint="supported here: " + ", ".join(supported),
        )
    if spec.plan.zero > 1 and spec.backend != "isthmus":
        raise PlanError(
            f"the plan fixes zero to {spec.plan.zero}, and backend '{spec.backend}' sums gradients after the backward",
            hint="use backend 'isthmus', or set zero to 1",
        )
    if spec.plan.overlap_gradients and spec.backend != "isthmus":
        raise PlanError(
            f"the plan fixes overlap_gradients to True, and backend '{spec.backend}' sums gradients after the backward",
            hint="use backend 'isthmus', or remove overlap_gradients",
        )


def check_message_order(schedule: Schedule) -> None:
    """Raise `PlanError` unless each two stages start their common messages in the same groups and order.

    Device backends such as NCCL execute messages in order: sides with different orders deadlock.
    """
    groups = [_message_groups(schedule, stage) for stage in range(schedule.num_stages)]
    for stage, by_peer in enumerate(groups):
        for peer, messages in by_peer.items():
            if groups[peer].get(stage) != messages:
                raise PlanError(
                    f"schedule '{schedule.name}': stages {stage} and {peer} order their messages differently",
                    hint="choose 1f1b or gpipe, or backend 'isthmus', which buffers early messages",
                )


def _message_groups(schedule: Schedule, stage: int) -> dict[int, list[frozenset[tuple[bool, int]]]]:
    """Return by peer the groups of adjacent message starts, as sets of (is_forward, micro_batch)."""
    groups: dict[int, list[frozenset[tuple[bool, int]]]] = {}
    for starts, run in groupby(schedule.stages[stage], lambda op: op.kind.startswith(("send_", "receive_"))):
        adjacent: dict[int, set[tuple[bool, int]]] = {}
        for operation in run if starts else ():
            message = operation.kind.endswith("forward"), operation.micro_batch
            adjacent.setdefault(schedule.peer_stage(stage, operation), set()).add(message)
        for peer, messages in adjacent.items():
            groups.setdefault(peer, []).append(frozenset(messages))
    return groups
