"""`to_runtime`: a plan as our own runtime takes it, or why it does not."""

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
    """Return the export of `plan`: its file, less the prediction and what means nothing there.

    Raises `PlanError` where the runtime cannot run it, `InputError` where the job asks for other batches.
    """
    require_none(NAME, plan.id, _obstacles(plan, model))
    training_of(plan, job)
    moot: dict[str, object] = {"predicted": None, "model": plan.model or model.path}
    if plan.dp == 1:
        moot |= {"zero": 0, "overlap_gradients": False}
    if plan.schedule != "interleaved":
        moot |= {"chunks": None}
    kept = plan.model_copy(update=moot)
    document = kept.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110)
    return Exported(framework=NAME, plan=plan.id, text=text)


def _obstacles(plan: Plan, model: Model) -> Iterator[Obstacle]:
    reason = why_not_runnable(plan)
    if reason:
        yield Obstacle(reason, "plan again with `isthmus plan --runnable`, or export to another framework")
    for tp in sorted({stage.tp for stage in plan.stages if model.num_kv_heads % stage.tp}):
        lacking = f"tp {tp} of {model.num_kv_heads} key and value heads: the runtime deals out whole ones"
        yield Obstacle(lacking, "choose a tp that divides them")
    if plan.transport != "buffered":
        yield Obstacle(f"{plan.transport} messages: the runtime buffers them", "leave transport out")
    if model.architecture not in TRAINABLE:
        yield Obstacle(f"it does not train {model.architecture}", "it trains " + ", ".join(TRAINABLE))
