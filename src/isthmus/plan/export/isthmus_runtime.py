"""`to_runtime`: exports a plan to the Isthmus runtime."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from isthmus.core.job import Job
from isthmus.core.model import TRAINABLE, Model
from isthmus.core.plan import Plan
from isthmus.plan.export.exported import Exported, training_of
from isthmus.plan.export.obstacle import Obstacle, require_none
from isthmus.plan.search.finish.runnable import why_not_runnable

NAME = "isthmus"


def to_runtime(plan: Plan, model: Model, *, job: Job | None = None) -> Exported:
    """Return the export of `plan`: its file without the prediction and fields that the runtime ignores.

    Raises `PlanError` if the runtime cannot run it, `InputError` if job and plan differ in their batches.
    """
    require_none(NAME, plan.id, _obstacles(plan, model))
    training_of(plan, job)
    overrides: dict[str, object] = {"predicted": None, "model": plan.model or model.path}
    if plan.dp == 1:
        overrides |= {"zero": 0, "overlap_gradients": False}
    if plan.schedule != "interleaved":
        overrides |= {"chunks": None}
    kept = plan.model_copy(update=overrides)
    document = kept.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
    return Exported(framework=NAME, plan=plan.id, text=text)


def _obstacles(plan: Plan, model: Model) -> Iterator[Obstacle]:
    reason = why_not_runnable(plan)
    if reason:
        yield Obstacle(reason, "plan again with `isthmus plan --runnable`, or export to another framework")
    for tp in sorted({stage.tp for stage in plan.stages if model.num_kv_heads % stage.tp}):
        reason = f"tp {tp} does not divide the {model.num_kv_heads} key and value heads"
        yield Obstacle(reason, f"choose a tp that divides {model.num_kv_heads}")
    if plan.transport != "buffered":
        yield Obstacle(f"{plan.transport} messages: the runtime buffers messages", "remove `transport`")
    if model.architecture not in TRAINABLE:
        yield Obstacle(f"it does not train {model.architecture}", "supported: " + ", ".join(TRAINABLE))
