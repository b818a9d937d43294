"""`check_executable`: refuse what this runtime cannot run, before anything is started."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from isthmus.core.errors import ModelError, PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import Model, load_model, require_trainable
from isthmus.core.plan import Plan, Stage
from isthmus.schedule import Schedule
from isthmus.train.messages.device import HOST_BACKENDS, usable_backends
from isthmus.train.model.save_weights import check_output
from isthmus.train.process.check_agreement import check_agreement, require_equal
from isthmus.train.process.check_rehearsable import check_rehearsable
from isthmus.train.process.prepare import device_of
from isthmus.train.tensor_parallel.check_shares import check_shares


def check_executable(spec: WorkerSpec) -> Schedule:
    """Return the checked schedule of the plan; raise `PlanError` or `ModelError` on what cannot be run."""
    if spec.job.compute == "virtual":
        return check_rehearsable(spec)
    plan, model = spec.plan, load_model(spec.job.model)
    require_trainable(model)
    _check_repeatable(model)
    _check_backend(spec)
    schedules = check_agreement(spec, model)
    for number, stage in enumerate(plan.stages):
        _require_simple(number, stage)
    _require_executed(plan)
    if spec.job.training.optimizer_on_host:
        require_equal("optimizer_on_host", plan.optimizer_on_host, True)
    check_shares(plan, model)
    check_output(Path(spec.job.output), spec.job.model)
    for one in dict.fromkeys(schedules):
        _check_pieces(one, plan)
        if spec.backend not in HOST_BACKENDS:
            check_meetings(one)
    return schedules[spec.stage.replica]


def _require_simple(number: int, stage: Stage) -> None:
    """Refuse the degrees of a stage that this runtime does not have."""
    for kind, name, degree in (("context", "cp", stage.cp), ("expert", "ep", stage.ep)):
        if degree > 1:
            raise PlanError(
                f"stage {number} asks for {kind} parallelism {degree}", hint=f"this runtime runs {name} = 1"
            )
    if (stage.recompute_layers or 0) > stage.num_layers:
        raise PlanError(
            f"stage {number} asks for {stage.recompute_layers} recomputed layers of {stage.num_layers}",
            hint="leave recompute_layers out to recompute all",
        )


def _require_executed(plan: Plan) -> None:
    """Refuse what a hand-written plan may fix and this runtime does not follow."""
    if plan.zero > 1:
        dealt = "gradients" if plan.zero == 2 else "gradients and weights"
        raise PlanError(
            f"the plan fixes zero to {plan.zero}, which deals out {dealt} among replicas",
            hint="this runtime deals out the optimizer's state alone: set zero to 1",
        )
    if plan.overlap_gradients:
        raise PlanError(
            "the plan fixes overlap_gradients to True",
            hint="this runtime adds gradients up after the last backward: leave it out",
        )
    if plan.transport != "buffered":
        raise PlanError(f"the plan asks for {plan.transport} messages", hint="this runtime buffers them")


def _check_pieces(schedule: Schedule, plan: Plan) -> None:
    """Refuse pieces without a layer."""
    held = [of_stage for replica in range(plan.dp) for of_stage in plan.pieces(replica)]
    least = min(last - first for of_stage in held for first, last in of_stage)
    if least == 0:
        raise PlanError(
            f"schedule '{schedule.name}' cuts a stage into {schedule.num_chunks} pieces, one without a layer",
            hint="set chunks lower, or give the stage more layers",
        )


def _check_repeatable(model: Model) -> None:
    """Refuse what draws at random in every forward: no two cuts of the model would train the same."""
    for name in ("attention_dropout", "router_jitter_noise"):
        if model.config.get(name):
            raise ModelError(
                f"{model.path}: {name} is {model.config[name]}",
                hint=f"set {name} to 0 in config.json: a run must not depend on where the model is cut",
            )


def _check_backend(spec: WorkerSpec) -> None:
    usable = usable_backends(device_of(spec))
    if spec.backend not in usable:
        raise PlanError(
            f"backend '{spec.backend}' is not supported by this worker's torch and device",
            hint="supported here: " + ", ".join(usable),
        )


def check_meetings(schedule: Schedule) -> None:
    """Raise `PlanError` unless any two stages start their common exchanges in the same bundles and order.

    Groups of a vendor's devices queue what they are asked for: a message that its peer asks for behind
    another one would wait for ever.
    """
    bundles = [_bundles(schedule, stage) for stage in range(schedule.num_stages)]
    for stage, of_stage in enumerate(bundles):
        for peer, mine in of_stage.items():
            if bundles[peer].get(stage) != mine:
                raise PlanError(
                    f"schedule '{schedule.name}': stages {stage} and {peer} start exchanges in other orders",
                    hint="choose 1f1b or gpipe, or backend 'isthmus', which keeps early messages",
                )


def _bundles(schedule: Schedule, stage: int) -> dict[int, list[frozenset[tuple[bool, int]]]]:
    """Return, by peer, the (is forward, micro-batch) of exchanges that stand side by side in the schedule."""
    found: dict[int, list[frozenset[tuple[bool, int]]]] = {}
    for starts, run in groupby(schedule.stages[stage], lambda op: op.kind.startswith(("send_", "receive_"))):
        together: dict[int, set[tuple[bool, int]]] = {}
        for one in run if starts else ():
            message = one.kind.endswith("forward"), one.micro_batch
            together.setdefault(schedule.peer(stage, one), set()).add(message)
        for peer, messages in together.items():
            found.setdefault(peer, []).append(frozenset(messages))
    return found
